"""One workload of the search benchmark, in a process of its own: both tuners, then a race of what they found; prints JSON."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import bench_search_workloads
from tvm import s_tir

from raftune.device import current_device
from raftune.dialects import registry
from raftune.dialects.tvm import target
from raftune.dialects.tvm.build import compile_module
from raftune.dialects.tvm.kernel import make_kernel
from raftune.dialects.tvm.lowering.builder import Builder
from raftune.dialects.tvm.lowering.lower import lower
from raftune.dialects.tvm.schedule import space
from raftune.graph.workloads import Task
from raftune.log import TuningLog
from raftune.measure.guard import ContentionGuard
from raftune.measure.inputs import make_inputs
from raftune.measure.rematch import interleave
from raftune.measurement import Policy, Status
from raftune.search import Budget, tune
from raftune.search.events import Measured
from raftune.workload import Candidate, Workload

DIALECT = "tvm"
# Stock asks for 64 candidates at a time and its model first predicts after 100: of 64 trials all would be drawn at random.
_ITERATION = 32
_FAILED_US = 1e9


def main() -> int:
    name, seed, *budgets = sys.argv[1:]
    trials = [int(budget) for budget in budgets]
    workload = bench_search_workloads.workload(name)
    row: dict[str, Any] = {"workload": name, "trials": trials, "seed": int(seed)}
    ours, stock = tune_ours(workload, max(trials), int(seed)), tune_stock(workload, max(trials), int(seed))
    row |= {"raftune_s": ours.seconds, "stock_s": stock.seconds, "raftune_trials": ours.made, "stock_trials": stock.made}
    kernels = {"any dialect": ours.best(max(trials))}
    for count in trials:
        kernels[f"raftune {count}"] = ours.best(count, lambda candidate: candidate.dialect == DIALECT)
        kernels[f"stock {count}"] = stock.best(count)
    default = registry.candidates(workload)[0]
    inputs = make_inputs(workload, 0)
    calls = [partial(kernel, *inputs) for kernel in kernels.values()]
    reference = partial(build(workload, default), *inputs)
    rematches = interleave(reference, calls, Policy(rematch_rounds=31), lambda _: None, ContentionGuard())
    for contender, rematch in zip(kernels, rematches, strict=True):
        if rematch.status is not Status.OK:
            raise SystemExit(f"{name}, {contender}: {rematch.message}")
        row[contender] = rematch.ratio
    row["default_us"] = rematches[0].default_us
    print(json.dumps(row))
    return 0


class Trials:
    """What a tuner did: seconds, and for each trial in order its time and how to build it."""

    def __init__(self, seconds: float, trials: Sequence[tuple[float, Any]], make: Callable[[Any], Any]) -> None:
        self.seconds = seconds
        self.made = len(trials)
        self._trials = trials
        self._make = make

    def best(self, count: int, wanted: Callable[[Any], bool] = lambda _: True) -> Any:
        """The kernel of the fastest of the first ``count`` trials."""
        found = [trial for trial in self._trials[:count] if wanted(trial[1])]
        return self._make(min(found, key=lambda trial: trial[0])[1])


def tune_ours(workload: Workload, trials: int, seed: int) -> Trials:
    found: list[tuple[float, Any]] = []

    def listen(event: object) -> None:
        if isinstance(event, Measured):
            found.append((event.outcome.time_us or _FAILED_US, event.candidate))

    with tempfile.TemporaryDirectory() as folder, TuningLog(Path(folder) / "log.sqlite") as log:
        start = time.perf_counter()
        tune(
            [Task(workload, 1)],
            log,
            device=current_device(1),
            policy=Policy(),
            budget=Budget(trials=trials),
            dialects=[registry.DEFAULT_DIALECT, DIALECT],
            seed=seed,
            progress=listen,
        )
        return Trials(time.perf_counter() - start, found, partial(build, workload))


def build(workload: Workload, candidate: Candidate) -> Any:
    return registry.get(candidate.dialect).build(workload, candidate.config)


def tune_stock(workload: Workload, trials: int, seed: int) -> Trials:
    """``tune_tir`` on the same plain function, for the same target, with workers that import what they need in time."""
    space.load()
    from tvm.s_tir import meta_schedule as ms

    host = target.host_target()
    # Its estimate of the work, for its display only, knows no let expression: it is told one.
    function = lower(workload, Builder()).function.with_attr("estimated_flops", 1)
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        database = ms.tune_tir(
            function,
            host.target,
            folder,
            trials,
            num_trials_per_iter=_ITERATION,
            builder=ms.builder.LocalBuilder(max_workers=2, initializer=space.load),
            runner=ms.runner.LocalRunner(initializer=space.load),
            database="memory",
            cost_model=ms.cost_model.XGBModel(num_warmup_samples=_ITERATION, num_tuning_cores=1),
            num_tuning_cores=2,
            seed=seed + 1,
        )
        seconds = time.perf_counter() - start
    records = database.get_all_tuning_records()
    found = [(min(float(s) for s in r.run_secs) * 1e6 if r.run_secs else _FAILED_US, r) for r in records]

    def make(record: Any) -> Any:
        schedule = s_tir.Schedule(record.workload.mod)
        record.trace.apply_to_schedule(schedule, remove_postproc=False)
        return make_kernel(workload, compile_module(schedule.mod, host)["main"])

    return Trials(seconds, found, make)


if __name__ == "__main__":
    sys.exit(main())
