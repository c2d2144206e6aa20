"""Whole training steps, interleaved in one process per model: eager, eager with a fused optimizer, torch.compile, raftune.

Every contender trains its own copy of the model with the same data, dtype and threads, and is warm before the first timed
round. Compile time is listed apart. raftune runs its compiled plan even where its own race would have chosen eager.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

MODELS = ("mlp", "resnet", "bert", "gpt")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=f"some of {', '.join(MODELS)} [all]")
    parser.add_argument("--log", default="raftune.sqlite", help="tuning log, tuned for the same number of threads")
    parser.add_argument("--tune", metavar="BUDGET", help="tune each model into the log first, for this long in all (5m)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(bench(options.models[0], options.log, options.threads, options.rounds)))
        return 0
    rows = [row for model in options.models for row in run_child(model, options)]
    report(rows, options.as_json)
    return 0


def run_child(model: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A fresh process per model, with its threads pinned before torch is loaded."""
    from raftune.device import thread_environment

    threads = str(options.threads)
    if options.tune:
        command = [sys.executable, "-m", "raftune.cli", "tune", "model", model, "--log", options.log, "--budget", options.tune]
        subprocess.run([*command, "--threads", threads], check=True, stdout=sys.stderr)
    print(f"timing {model} ...", file=sys.stderr)
    command = [sys.executable, __file__, "--child", model, "--log", options.log, "--threads", threads]
    environment = os.environ | thread_environment(options.threads, pinned=True)
    done = subprocess.run(
        [*command, "--rounds", str(options.rounds)], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    return list(json.loads(done.stdout.splitlines()[-1]))


def bench(model: str, log: str, threads: int, rounds: int) -> list[dict[str, Any]]:
    """One row per contender: times in milliseconds, ``ratio`` is its time over eager's, the median of the rounds."""
    import torch

    from raftune.compiler.step import compile_step
    from raftune.measure.race import interleave, lower_quartile
    from raftune.models import BUILT_IN

    torch.set_num_threads(threads)
    target = BUILT_IN[model]()
    plain = target.optimizer
    contenders: dict[str, Callable[[], object]] = {}
    compile_s: dict[str, float] = {}

    def add(name: str, make: Callable[[], Callable[[], object]]) -> None:
        start = time.perf_counter()
        contenders[name] = make()
        for _ in range(3):
            contenders[name]()
        compile_s[name] = time.perf_counter() - start

    def fused(parameters: Any) -> torch.optim.Optimizer:
        made = plain(parameters)
        for group in made.param_groups:
            group["foreach"], group["fused"] = False, True
        return made

    add("eager", lambda: eager(target, lambda m: m, plain))
    add("eager, fused optimizer", lambda: eager(target, lambda m: m, fused))
    add("torch.compile", lambda: eager(target, torch.compile, plain))
    add("torch.compile, fused optimizer", lambda: eager(target, torch.compile, fused))

    def raftune() -> Callable[[], object]:
        step = compile_step(copy.deepcopy(target.model), target.inputs, loss=target.loss, optimizer=plain, log=log, race=False)
        return lambda: step.run_compiled(target.inputs)

    add("raftune", raftune)
    times = interleave(contenders, rounds)
    return [
        {
            "model": model,
            "contender": name,
            "threads": threads,
            "median_ms": statistics.median(found),
            "lower_quartile_ms": lower_quartile(found),
            "ratio": statistics.median(a / b for a, b in zip(found, times["eager"], strict=True)),
            "compile_s": compile_s[name],
        }
        for name, found in times.items()
    ]


def eager(target: Any, wrap: Callable[[Any], Any], optimizer: Callable[[Any], Any]) -> Callable[[], object]:
    """The step as a user writes it, over a copy of the model."""
    from raftune.compiler.eager import EagerStep

    model = copy.deepcopy(target.model)
    step = EagerStep(wrap(model), target.loss, optimizer(model.parameters()), "train")
    return lambda: step(target.inputs)


def report(rows: list[dict[str, Any]], as_json: bool) -> None:
    """``geomean`` and ``worst`` compare raftune with the best other contender of each model."""
    against_best, against_eager = [], []
    for model in dict.fromkeys(row["model"] for row in rows):
        here = {row["contender"]: row for row in rows if row["model"] == model}
        best = min(row["ratio"] for name, row in here.items() if name != "raftune")
        against_best.append(best / here["raftune"]["ratio"])
        against_eager.append(1 / here["raftune"]["ratio"])
    summary = {
        "geomean": math.exp(statistics.fmean(map(math.log, against_best))),
        "worst": min(against_best),
        "geomean_over_eager": math.exp(statistics.fmean(map(math.log, against_eager))),
        "rows": rows,
    }
    if as_json:
        print(json.dumps(summary))
        return
    print(f"{'model':8} {'contender':32} {'median ms':>10} {'/ eager':>8} {'compile s':>10}")
    for row in rows:
        print(f"{row['model']:8} {row['contender']:32} {row['median_ms']:10.2f} {row['ratio']:8.3f} {row['compile_s']:10.1f}")
    print(
        f"\nspeed-up of raftune, geometric mean: {summary['geomean_over_eager']:.2f}x over eager, "
        f"{summary['geomean']:.2f}x over the best other contender of each model (worst {summary['worst']:.2f}x)"
    )


if __name__ == "__main__":
    sys.exit(main())
