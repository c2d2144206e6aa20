"""Records candidates of the built-in models' workloads into a log for simulations, whether they promise something or not.

Of each workload everything that is listed is measured, then what dialects sample: half at random, half near the fastest so far.
What the log holds is not measured again, so that a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import lzma
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from raftune.cost_model.flops import flops
from raftune.device import Device
from raftune.dialects import registry
from raftune.dialects.base import Dialect
from raftune.graph import Task, merge_tasks
from raftune.lifetime import exit_on_terminate
from raftune.log import TuningLog
from raftune.measure import Measurer
from raftune.measurement import Outcome, Policy, Status
from raftune.search.budget import parse_duration
from raftune.tuning import ModelRequest, prepare
from raftune.workload import Candidate, Workload

MODELS = ("bert", "gpt", "resnet", "mlp")
# Shorter than for a winner's sake: what is recorded is compared with what is ten or more percent apart.
_POLICY = Policy(max_seconds=0.15, rematch_rounds=7, timeout=20.0)
_DRAWN = 16
_PARENTS = 8
# A workload whose spaces give nothing new so many times in a row is left.
_PATIENCE = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL", help=f"[{' '.join(MODELS)}]")
    parser.add_argument("--log", type=Path, default=Path("dataset.sqlite"), help="[dataset.sqlite]")
    parser.add_argument("--workloads", type=int, default=44, help="how many with so many candidates [44]")
    parser.add_argument("--candidates", type=int, default=200, help="of each workload that has them [200]")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="the K-th of N runs that share the work and the log [1/1]")
    parser.add_argument("--budget", metavar="TIME", help="stop after about this long (30m)")
    parser.add_argument("--compress", type=Path, metavar="FILE.xz", help="write the log compressed to this file in the end")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    exit_on_terminate()
    deadline = time.monotonic() + (parse_duration(options.budget) if options.budget else float("inf"))
    prepared = [prepare(ModelRequest(name, threads=1)) for name in options.models]
    device = prepared[0].device
    with TuningLog(options.log) as log, Measurer(_POLICY, device) as measurer:
        tasks = heaviest([task for one in prepared for task in one.tasks], 2 * options.workloads)[part - 1 :: parts]
        complete = 0
        log.record_tasks(log.start_run("dataset", {"models": options.models}), [(t.workload, t.weight) for t in tasks])
        for number, task in enumerate(tasks, 1):
            recorder = Recorder(log, measurer, device, task.workload)
            for count in recorder.record(options.candidates):
                print(f"\r{number}/{len(tasks)} {task.workload.op[:60]} {count}  ", end="", file=sys.stderr, flush=True)
                if time.monotonic() > deadline:
                    break
            print(file=sys.stderr)
            complete += recorder.is_complete(options.candidates)
            if complete * parts >= options.workloads:
                break
            if time.monotonic() > deadline:
                print("the budget is spent: run the same command again to go on", file=sys.stderr)
                break
    if options.compress:
        with options.log.open("rb") as source, lzma.open(options.compress, "wb", preset=9) as packed:
            shutil.copyfileobj(source, packed)
        print(f"{options.compress}: {options.compress.stat().st_size / 1e6:.1f} MB", file=sys.stderr)
    return 0


def heaviest(tasks: list[Task], count: int) -> list[Task]:
    """The workloads with a space to sample from that have most elements and weight, no operator more than its share."""
    known = merge_tasks(tasks)
    spacious = [task for task in known if any(is_sampled(d) and d.supports(task.workload) for d in registry.enabled())]
    spacious.sort(key=lambda task: -task.weight * sum(spec.numel for spec in (*task.workload.inputs, *task.workload.results)))
    most = max(2, count // 8)
    taken: dict[str, int] = {}
    chosen = []
    for task in spacious:
        taken[task.workload.op] = taken.get(task.workload.op, 0) + 1
        if taken[task.workload.op] <= most:
            chosen.append(task)
    # What is quick to measure first: a budget then covers more of them.
    return sorted(chosen[:count], key=lambda task: flops(task.workload))


def is_sampled(dialect: Dialect) -> bool:
    return type(dialect).sample is not Dialect.sample


class Recorder:
    """Measures candidates of one workload that its log does not have yet."""

    def __init__(self, log: TuningLog, measurer: Measurer, device: Device, workload: Workload) -> None:
        self._log, self._measurer, self._device, self._workload = log, measurer, device, workload
        self._default = registry.default_candidate(workload)
        self._listed = registry.candidates(workload)
        self._known = log.outcomes(workload, device, _POLICY)

    def record(self, most: int) -> Iterator[int]:
        """The number of outcomes after each one, until there are ``most`` or nothing new is proposed."""
        if self._outcome(self._default).status is not Status.OK:
            return
        for candidate in self._listed:
            self._outcome(candidate)
            yield len(self._known)
        for dialect in filter(is_sampled, registry.enabled()):
            idle = 0
            while len(self._known) < most and idle < _PATIENCE and dialect.supports(self._workload):
                seed = len(self._known) + idle
                proposed = self._propose(dialect.name, seed, near=False) + self._propose(dialect.name, seed, near=True)
                idle = 0 if any(candidate.digest not in self._known for candidate in proposed) else idle + 1
                for candidate in proposed:
                    self._outcome(candidate)
                    yield len(self._known)

    def is_complete(self, most: int) -> bool:
        return len(self._known) >= most

    def _propose(self, dialect: str, seed: int, *, near: bool) -> list[Candidate]:
        parents: list[Candidate] = []
        if near:
            sampled = [pair for pair in self._known.values() if pair[0].dialect == dialect and pair[0] not in self._listed]
            timed = [(outcome.time_us, candidate) for candidate, outcome in sampled if outcome.time_us is not None]
            parents = [candidate for _, candidate in sorted(timed, key=lambda pair: pair[0])[:_PARENTS]]
            if not parents:
                return []
        return list(self._measurer.sample(self._workload, dialect, _DRAWN, seed, parents=parents))

    def _outcome(self, candidate: Candidate) -> Outcome:
        if candidate.digest in self._known:
            return self._known[candidate.digest][1]
        is_default = candidate == self._default
        against = None if is_default else (self._default, self._known[self._default.digest][1].time_us or 0.0)
        outcome = self._measurer.measure(self._workload, candidate, default=against)
        self._log.record(self._workload, candidate, self._device, _POLICY, outcome, is_default=is_default)
        self._known[candidate.digest] = (candidate, outcome)
        return outcome


if __name__ == "__main__":
    sys.exit(main())
