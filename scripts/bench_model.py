"""Judges the cost model and the search on a recorded data set: nothing is measured, so the figures are the same again.

Leave one workload out: how good are the first and the first five by the model's rating, and what it would choose unmeasured.
Trials: a simulated search in each workload, by a model that learned from the others, until it has found what is within 5% of
the best; against the expectation of a random order, (n + 1) / (g + 1) trials where g of n candidates are as good.

Transfer: the recorded part of a second model, tuned after the first with a quarter of the trials, against tuned cold with all.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from raftune.cost_model import CostModel, Describer, evaluate
from raftune.graph import Task
from raftune.log import TuningLog
from raftune.search import Budget, Event, Measured, ModelGuided, Recording, TuneResult, simulate
from raftune.tuning import ModelRequest, prepare
from raftune.workload import Workload

_SHARE = 0.95
# Fewer candidates are no search.
_LEAST = 100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(__file__).resolve().parent.parent / "db" / "dataset.sqlite.xz"
    parser.add_argument("log", nargs="?", type=Path, default=default, help="[db/dataset.sqlite.xz]")
    parser.add_argument("--seeds", type=int, default=3, help="searches of each workload [3]")
    parser.add_argument("--transfer", nargs=2, default=("bert", "gpt"), metavar="MODEL", help="[bert gpt]")
    parser.add_argument("--trials", type=int, default=400, help="of a cold run, for the transfer [400]")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with TuningLog(options.log, read_only=True) as log:
        evaluation = evaluate(log)
        recording = Recording(log)
    rows = []
    describer = Describer()
    for workload in recording.workloads:
        row = search(recording, workload, options.seeds, describer)
        if row is not None:
            rows.append(row)
            print(f"{row['op'][:70]:70} {row['trials']:6.1f} of {row['random']:6.1f}", file=sys.stderr)
    report = {
        "evaluation": evaluation.to_json(),
        "trials": statistics.fmean(row["trials"] for row in rows),
        "random": statistics.fmean(row["random"] for row in rows),
        "trials_ratio": sum(row["trials"] for row in rows) / sum(row["random"] for row in rows),
        "trials_ratio_geomean": math.exp(statistics.fmean(math.log(row["trials"] / row["random"]) for row in rows)),
        "transfer": transfer(recording, *options.transfer, options.trials),
        "rows": rows,
    }
    if options.json:
        print(json.dumps(report))
        return 0
    print(evaluation)
    print(
        f"within 5% of the best after {report['trials']:.1f} trials, at random {report['random']:.1f}: "
        f"ratio {report['trials_ratio']:.3f}, geometric mean {report['trials_ratio_geomean']:.3f} over {len(rows)} workloads"
    )
    first, second = options.transfer
    print(f"{second} after {first} with a quarter of the trials takes {report['transfer']['ratio']:.3f} of what cold takes")
    return 0


def transfer(recording: Recording, first: str, second: str, trials: int) -> dict[str, float]:
    """Time of the second model's recorded tasks: cold, after the first with a quarter of the trials, and by defaults."""
    before, after = (prepare(ModelRequest(name, threads=recording.device.threads)).tasks for name in (first, second))
    cold = simulate(recording, tasks=after, budget=Budget(trials=trials))
    with tempfile.TemporaryDirectory() as folder, TuningLog(Path(folder) / "simulated.sqlite") as log:
        simulate(recording, tasks=before, budget=Budget(trials=trials), log=log)
        warm = simulate(recording, tasks=after, budget=Budget(trials=trials // 4), log=log)
    return {
        "cold_us": total_us(cold),
        "warm_us": total_us(warm),
        "default_us": sum(task.weight * (task.default_us or 0.0) for task in cold.tasks),
        "ratio": total_us(warm) / total_us(cold),
        "shared": sum(task.workload in {t.workload for t in before} for task in cold.tasks) / len(cold.tasks),
    }


def total_us(result: TuneResult) -> float:
    return sum(task.weight * (task.best_us or 0.0) for task in result.tasks)


def search(recording: Recording, workload: Workload, seeds: int, describer: Describer) -> dict[str, Any] | None:
    """Trials until 95% of the best, the mean over seeds; ``None`` for a workload with few candidates."""
    own = [row for row in recording.rows if row.workload == workload]
    times = [row.outcome.time_us or math.inf for row in own]
    if len(own) < _LEAST:
        return None
    goal = min(times) / _SHARE
    good = sum(time <= goal for time in times)
    others = [row for row in recording.rows if row.workload != workload]
    models = [CostModel(seed=seed, device=recording.device, describe=describer) for seed in range(seeds)]
    found = [_found(recording, workload, others, model) for model in models]
    needed = [_trials(each, goal, good, len(own)) for each in found]
    return {
        "op": workload.op,
        "digest": workload.digest,
        "candidates": len(own),
        "good": good,
        "trials": statistics.fmean(needed),
        "random": (len(own) + 1) / (good + 1),
    }


def _found(recording: Recording, workload: Workload, others: list[Any], model: CostModel) -> list[float]:
    """The times in the order of a simulated search, infinite for what fails."""
    measured: list[float] = []

    def watch(event: Event) -> None:
        if isinstance(event, Measured):
            measured.append(event.outcome.time_us or math.inf)

    strategy = ModelGuided(model, lambda: others)
    simulate(recording, tasks=[Task(workload, 1)], budget=Budget(), strategy=strategy, seed=model.seed, progress=watch)
    return measured


def _trials(found: list[float], goal: float, good: int, candidates: int) -> float:
    for number, time in enumerate(found, 1):
        if time <= goal:
            return number
    # The search gave up: what remains is gone through at random.
    return len(found) + (candidates - len(found) + 1) / (good + 1)


if __name__ == "__main__":
    sys.exit(main())
