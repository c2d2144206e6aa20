"""Whole training steps of eight models, each at a small and a moderate batch: raftune, eager, torch.compile, JAX and others.

Every contender has a process of its own and trains the same model on the same data from the same seed, is warm before it is
timed, and takes turns with the others, on pinned threads. Compile time is listed apart: torch.compile's with empty caches,
raftune's from the log and with the caches that tuning has left. raftune runs its compiled plan even where its own race would
have chosen eager. Tune for the same number of threads first, or with --tune.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from bench_case import Settings, bench_case
from bench_models import CASES
from bench_peers import CONTENDERS, EAGER, RAFTUNE
from bench_report import left_to_do, load_rows, save_rows, summarize, table
from bench_rounds import Cores

from raftune.lifetime import exit_on_terminate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"some of {', '.join(CASES)} [all]")
    parser.add_argument("--log", type=Path, default=Path("raftune.sqlite"), help="tuning log [raftune.sqlite]")
    parser.add_argument("--tune", metavar="BUDGET", help="tune each case into the log first, for this long in all (5m)")
    parser.add_argument("--threads", type=int, default=1, help="each on a core of its own [1]")
    parser.add_argument("--rounds", type=int, default=15, help="[15]")
    parser.add_argument("--peers", help=f"some of {', '.join(n for n in CONTENDERS if n not in (EAGER, RAFTUNE))} [all]")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object")
    parser.add_argument("--output", type=Path, metavar="FILE", help="keep results here; cases that are in it are not run again")
    options = parser.parse_args()
    cases = list(dict.fromkeys(options.cases or CASES))
    peers = list(CONTENDERS) if options.peers is None else [name.strip() for name in options.peers.split(",")]
    if unknown := [*(set(cases) - set(CASES)), *(set(peers) - set(CONTENDERS))]:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if options.threads < 1 or options.rounds < 1:
        parser.error("--threads and --rounds must be at least 1")
    try:
        rows = load_rows(options.output) if options.output else []
    except (OSError, ValueError) as error:
        parser.error(str(error))
    exit_on_terminate()
    todo = left_to_do(cases, rows, options.threads)
    speed = Cores(options.threads).speed if todo else None
    for case in todo:
        if options.tune:
            tune(case, options)
        log = options.log if options.log.exists() else None
        if log is None:
            print(f"there is no log {options.log}: raftune runs PyTorch's operators", file=sys.stderr)
        contenders = [name for name in CONTENDERS if name in (EAGER, RAFTUNE, *peers)]
        rows += bench_case(case, Settings(contenders, options.threads, options.rounds, log), speed)
        if options.output:
            save_rows(options.output, rows)
    wanted = [row for row in rows if row["threads"] == options.threads and row["case"] in cases]
    print(json.dumps(summarize(wanted)) if options.as_json else table(wanted))
    return 0


def tune(case: str, options: argparse.Namespace) -> None:
    target = f"{Path(__file__).with_name('bench_models.py')}:{case}"
    command = [sys.executable, "-m", "raftune.cli", "tune", "model", target, "--log", str(options.log)]
    command += ["--budget", options.tune, "--threads", str(options.threads)]
    subprocess.run(command, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
