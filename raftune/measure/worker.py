"""The worker process: builds, checks and times candidates, one request after the other, until its parent goes away.

Started as ``python -m raftune.measure.worker FD PARENT THREADS MEMORY_MB [CORE]`` with one end of a socket pair as file
descriptor FD; with CORE it keeps to that core.
Whatever a candidate raises becomes a typed reply; whatever kills the process is seen, and typed, by the parent.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import resource
import socket
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from raftune.dialects import registry
from raftune.dialects.base import Kernel
from raftune.lifetime import die_with
from raftune.measure.check import Checker, Verdict
from raftune.measure.failures import describe, status_of
from raftune.measure.guard import ContentionGuard
from raftune.measure.protocol import Channel, Message
from raftune.measure.rematch import MIN_ROUNDS, interleave
from raftune.measure.timer import best_of, time_call
from raftune.measurement import Outcome, Policy, Status
from raftune.memory import keep_pages
from raftune.workload import Candidate, Workload

_KEPT_KERNELS = 256
# References may be large, and the search goes to and fro between a few tasks.
_KEPT_CHECKERS = 4
# So many times slower than the default in its first calls, a candidate is not timed any further.
_HOPELESS = 3.0
_DISTURBED = "timed while something else used the processor"


@dataclass(slots=True)
class _Built:
    """A kernel that a later rematch need not build again."""

    kernel: Kernel
    build_s: float
    verdict: Verdict | None = None


class Worker:
    """Answers requests over ``channel``."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._guard = ContentionGuard()
        self._kernels: OrderedDict[tuple[str, str], _Built] = OrderedDict()
        self._checkers: OrderedDict[str, Checker] = OrderedDict()
        self._warm: set[str] = set()

    def serve(self) -> None:
        """Answer until the other end closes the connection."""
        actions: dict[str, Callable[[Message], Message]] = {
            "measure": self._measure,
            "rematch": self._rematch,
            "sample": self._sample,
            "prepare": self._prepare,
            "warm up": self._warm_ahead,
        }
        self._channel.send({"event": "ready"})
        while True:
            try:
                request = self._channel.receive(None)
            except EOFError:
                return
            if request is not None:
                if (known := request.get("reference_ns")) is not None:
                    self._guard.believe(known)
                reply = actions[request["do"]](request)
                self._channel.send(reply | {"reference_ns": self._guard.reference_ns})

    def _measure(self, request: Message) -> Message:
        workload, policy = Workload.from_json(request["workload"]), Policy(**request["policy"])
        candidate = _candidate(request["candidate"])
        building, start = True, time.perf_counter()
        try:
            self._warm_up(candidate.dialect)
            start = time.perf_counter()
            built = self._build(workload, candidate, ahead=request["built"])
            building = False
            verdict = self._check(workload, built)
        except (Exception, SystemExit) as error:  # a candidate's code: it may raise anything, and that is its outcome
            self._forget(workload, candidate)
            build_s = time.perf_counter() - start if building else 0.0
            return _outcome(Outcome(status_of(error, building=building), message=describe(error), build_s=build_s))
        result = Outcome(verdict.status, max_error=verdict.max_error, message=verdict.message, build_s=built.build_s)
        if verdict.status is not Status.OK:
            self._forget(workload, candidate)
            return _outcome(result)
        try:
            if (default := request.get("default")) is None:
                return _outcome(self._time(workload, built, policy, result))
            return _outcome(self._compare(workload, built, policy, result, _candidate(default), request["default_us"]))
        except (Exception, SystemExit) as error:  # as above: a kernel may fail late
            self._forget(workload, candidate)
            return _outcome(dataclasses.replace(result, status=status_of(error, building=False), message=describe(error)))

    def _time(self, workload: Workload, built: _Built, policy: Policy, result: Outcome) -> Outcome:
        """The outcome with its time on the wall clock."""
        timing = time_call(partial(built.kernel, *self._checker_of(workload).scratch()), policy, self._guard)
        estimate = timing.estimate
        if estimate is None:
            message = f"only {timing.clean} of {timing.clean + timing.dropped} batches had the cores to themselves"
            return dataclasses.replace(result, status=Status.NOISY, repeats=timing.clean, message=message)
        return dataclasses.replace(
            result,
            time_us=estimate.value / 1e3,
            low_us=estimate.low / 1e3,
            high_us=estimate.high / 1e3,
            repeats=timing.clean,
            message=result.message if timing.quiet else f"{_DISTURBED}; {result.message}".rstrip("; "),
        )

    def _compare(
        self, workload: Workload, built: _Built, policy: Policy, result: Outcome, default: Candidate, default_us: float
    ) -> Outcome:
        """The outcome with its time on the default's scale: turns with the default, so that what disturbs, disturbs both."""
        reference = self._build(workload, default)
        inputs = self._checker_of(workload).scratch()
        calls = [partial(kernel, *inputs) for kernel in (reference.kernel, built.kernel)]
        first_us, usual_us = (best_of(call, 1) / 1e3 for call in reversed(calls))
        if first_us > _HOPELESS * usual_us:
            ratio = first_us / usual_us
            return dataclasses.replace(result, time_us=ratio * default_us, repeats=1)
        short = dataclasses.replace(policy, rematch_rounds=MIN_ROUNDS)
        (found,) = interleave(calls[0], calls[1:], short, lambda _: None, self._guard)
        if found.ratio is None or found.ratio_high is None:
            return dataclasses.replace(result, status=Status.NOISY, repeats=found.rounds, message=found.message)
        spread = found.ratio_high / found.ratio
        time_us = found.ratio * default_us
        return dataclasses.replace(
            result, time_us=time_us, low_us=time_us / spread, high_us=time_us * spread, repeats=found.rounds
        )

    def _rematch(self, request: Message) -> Message:
        workload, policy = Workload.from_json(request["workload"]), Policy(**request["policy"])
        candidates = [_candidate(value) for value in (request["default"], *request["candidates"])]
        current = -1
        building = True

        def announce(index: int) -> None:
            nonlocal current
            current = index
            self._channel.send({"event": "at", "index": index})

        try:
            kernels = []
            for index, candidate in enumerate(candidates, start=-1):
                announce(index)
                building = True
                built = self._build(workload, candidate)
                building = False
                verdict = self._check(workload, built)
                if verdict.status is not Status.OK:
                    return {"failed": current, "status": verdict.status, "message": verdict.message}
                kernels.append(built.kernel)
            # All share one set of inputs: where memory lies changes times by more than some margins.
            inputs = self._checker_of(workload).scratch()
            default, *contenders = [partial(kernel, *inputs) for kernel in kernels]
            rematches = interleave(default, contenders, policy, announce, self._guard)
        except (Exception, SystemExit) as error:  # a candidate's code: it may raise anything, and that is its outcome
            if current >= 0:
                self._forget(workload, candidates[current + 1])
            return {"failed": current, "status": status_of(error, building=building), "message": describe(error)}
        return {"rematches": [dataclasses.asdict(rematch) for rematch in rematches]}

    def _sample(self, request: Message) -> Message:
        workload = Workload.from_json(request["workload"])
        try:
            dialect = registry.get(request["dialect"])
            self._warm_up(dialect.name)
            count, seed = request["count"], request["seed"]
            if parents := request["parents"]:
                configs = dialect.vary(workload, parents, count, seed)
            else:
                configs = dialect.sample(workload, count, seed)
            return {"candidates": [registry.candidate(dialect, config).to_json() for config in configs]}
        except (Exception, SystemExit) as error:  # a dialect's code: the parent reports that it proposed nothing
            return {"error": describe(error)}

    def _warm_ahead(self, request: Message) -> Message:
        try:
            self._warm_up(request["dialect"])
        except (Exception, SystemExit) as error:  # a dialect's code: its candidates meet it too
            return {"error": describe(error)}
        return {}

    def _prepare(self, request: Message) -> Message:
        workload, candidate = Workload.from_json(request["workload"]), _candidate(request["candidate"])
        try:
            self._warm_up(candidate.dialect)
            registry.prepare(workload, candidate)
        except (Exception, SystemExit) as error:  # a candidate's code: whoever measures it meets the same, and types it
            return {"error": describe(error)}
        return {}

    def _build(self, workload: Workload, candidate: Candidate, *, ahead: bool = False) -> _Built:
        key = (workload.digest, candidate.digest)
        if key in self._kernels:
            self._kernels.move_to_end(key)
            return self._kernels[key]
        self._warm_up(candidate.dialect)
        start = time.perf_counter()
        kernel = (registry.load if ahead else registry.build)(workload, candidate)
        self._kernels[key] = built = _Built(kernel, time.perf_counter() - start)
        if len(self._kernels) > _KEPT_KERNELS:
            self._kernels.popitem(last=False)
        return built

    def _warm_up(self, dialect: str) -> None:
        """What a dialect does once is no candidate's fault, and may take longer than any candidate may."""
        if dialect in self._warm or dialect not in registry.installed():
            return
        self._warm.add(dialect)
        self._channel.send({"event": "warming up"})
        registry.get(dialect).warm_up()
        self._channel.send({"event": "warm"})

    def _forget(self, workload: Workload, candidate: Candidate) -> None:
        self._kernels.pop((workload.digest, candidate.digest), None)

    def _check(self, workload: Workload, built: _Built) -> Verdict:
        if built.verdict is None:
            built.verdict = self._checker_of(workload).check(built.kernel)
        return built.verdict

    def _checker_of(self, workload: Workload) -> Checker:
        checker = self._checkers.pop(workload.digest, None) or Checker(workload)
        self._checkers[workload.digest] = checker
        if len(self._checkers) > _KEPT_CHECKERS:
            self._checkers.popitem(last=False)
        return checker


def main(arguments: list[str]) -> None:
    """Entry point of the process; see the module's description."""
    descriptor, parent, threads, memory_mb, *cores = map(int, arguments)
    die_with(parent)
    if cores:
        os.sched_setaffinity(0, cores)
    faulthandler.enable()
    connection = socket.socket(fileno=descriptor)
    connection.set_inheritable(False)
    torch.set_num_threads(threads)
    keep_pages()  # as a compiled step does: what is timed is what will run
    limit = (memory_mb << 20) + _data_bytes()
    # The parent watches resident memory; this stops a single allocation that is larger than any watch is quick.
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with torch.no_grad():
        Worker(Channel(connection)).serve()


def _data_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    return 0


def _outcome(outcome: Outcome) -> Message:
    return {"outcome": dataclasses.asdict(outcome)}


def _candidate(value: Any) -> Candidate:
    return Candidate(value["dialect"], value["version"], value["config"])


if __name__ == "__main__":
    main(sys.argv[1:])
