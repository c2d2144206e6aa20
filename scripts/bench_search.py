"""The search for TVM schedules against MetaSchedule's ``tune_tir`` with its own XGBModel: same workloads and trials.

Each workload has a process of its own, in which both tune from nothing; then the best kernels of both, after the smaller and
the larger number of trials, are raced against each other, interleaved. Of raftune only TVM's schedules count; what it found in
any dialect is a column of its own. A tuner that stops early has used fewer trials.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import bench_search_workloads
from bench_report import load_rows, save_rows

from raftune.device import thread_environment
from raftune.lifetime import exit_on_terminate

Row = Mapping[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"some of: {'; '.join(bench_search_workloads.NAMES)}")
    parser.add_argument("--trials", type=int, nargs=2, default=(64, 200), metavar=("FEW", "MANY"), help="[64 200]")
    parser.add_argument("--seed", type=int, default=0, help="[0]")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object")
    parser.add_argument("--output", type=Path, metavar="FILE", help="keep results here; what is in it is not run again")
    options = parser.parse_args()
    names = options.workloads or list(bench_search_workloads.NAMES)
    if unknown := set(names) - set(bench_search_workloads.NAMES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if not 1 <= options.trials[0] <= options.trials[1]:
        parser.error("--trials are two numbers from 1, the smaller one first")
    try:
        rows = load_rows(options.output) if options.output else []
    except (OSError, ValueError) as error:
        parser.error(str(error))
    exit_on_terminate()
    trials = list(options.trials)

    def is_wanted(row: Row) -> bool:
        return row["workload"] in names and row["trials"] == trials and row["seed"] == options.seed

    failed = []
    for name in names:
        if any(row["workload"] == name for row in rows if is_wanted(row)):
            continue
        print(f"{name} ...", file=sys.stderr)
        row = run_one(name, options.seed, trials)
        if row is None:
            failed.append(name)
            continue
        rows.append(row)
        print(line(row), file=sys.stderr)
        if options.output:
            save_rows(options.output, rows)
    wanted = [row for row in rows if is_wanted(row)]
    summary = summarize(wanted, trials) | {"failed": failed}
    print(json.dumps(summary | {"rows": wanted}) if options.as_json else report(wanted, summary))
    return 1 if failed else 0


def run_one(name: str, seed: int, trials: Iterable[int]) -> dict[str, Any] | None:
    script = Path(__file__).with_name("bench_search_one.py")
    environment = dict(os.environ) | thread_environment(1, pinned=False)
    command = [sys.executable, str(script), name, str(seed), *map(str, trials)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(f"{name} failed: {done.stderr[-800:]}", file=sys.stderr)
        return None
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def summarize(rows: Sequence[Row], trials: Sequence[int]) -> dict[str, Any]:
    """Geometric means over the workloads, raftune over stock: best time found after so many trials, wall time of a trial."""
    found = {f"geomean_{n}": _geomean(row[f"raftune {n}"] / row[f"stock {n}"] for row in rows) for n in trials}
    few, many = trials
    found["geomean_few_over_stock_many"] = _geomean(row[f"raftune {few}"] / row[f"stock {many}"] for row in rows)
    return found | {"time_per_trial_ratio": _geomean(map(_time_ratio, rows))}


def _time_ratio(row: Row) -> float:
    return float((row["raftune_s"] / row["raftune_trials"]) / (row["stock_s"] / row["stock_trials"]))


def _geomean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else None


def line(row: Row) -> str:
    few, many = row["trials"]
    ratios = [row[f"raftune {n}"] / row[f"stock {n}"] for n in (few, many)]
    return (
        f"{row['workload']:28} {ratios[0]:8.3f} {ratios[1]:8.3f} {row[f'raftune {many}']:9.3f} {row[f'stock {many}']:8.3f}"
        f" {row['any dialect']:8.3f} {row['default_us']:9.1f} {row['raftune_trials']:7} {row['stock_trials']:6}"
        f" {row['raftune_s']:7.0f} {row['stock_s']:6.0f}"
    )


def report(rows: Sequence[Row], summary: Mapping[str, Any]) -> str:
    heads = ("workload", "few", "many", "raftune", "stock", "any", "PyTorch us", "trials", "stock", "s", "stock")
    head = "{:28} {:>8} {:>8} {:>9} {:>8} {:>8} {:>9} {:>7} {:>6} {:>7} {:>6}".format(*heads)
    legend = (
        "few, many: time of raftune's best TVM schedule over stock's; raftune, stock, any: over PyTorch's, after the many\n"
        "trials, any: in whatever dialect; trials and seconds that each tuner took."
    )
    figures = "\n".join(
        f"{key}: {value:.3f}" if isinstance(value, float) else f"{key}: {value}" for key, value in summary.items()
    )
    return "\n".join([head, *map(line, rows), legend, figures])


if __name__ == "__main__":
    sys.exit(main())
