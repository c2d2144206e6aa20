"""Building ahead: what will be measured soon is compiled by processes of their own, on cores that measuring leaves idle."""

from __future__ import annotations

import tempfile
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from raftune.device import Device, usable_cores
from raftune.measure.process import WARM_UP_TIMEOUT_S, WorkerProcess, launch
from raftune.measurement import Outcome, Policy, Status
from raftune.workload import Candidate, Workload

# Each holds the frameworks in memory; beyond this measuring is what takes the time.
_MOST = 4
_WAIT_S = 0.01
# Waiting requests beyond this are forgotten, the oldest first: the search has turned elsewhere.
_QUEUE = 32
# Builders that end before they are ready so often in a row will not get ready.
_FALSE_STARTS = 3

_Key = tuple[str, str]


@dataclass(slots=True)
class _Builder:
    core: int
    worker: WorkerProcess | None = None
    ready: bool = False
    busy: bool = False
    key: _Key | None = None
    warm: set[str] = field(default_factory=set)
    deadline: float = 0.0


class Ahead:
    """Keeps what was built in a folder of its own, ``folder``, until :meth:`close`.

    A candidate that crashes, hangs or eats the memory of its builder is not tried a second time: :meth:`take` has the outcome.
    """

    def __init__(self, policy: Policy, device: Device) -> None:
        self._policy = policy
        self._device = device
        self._builders = [_Builder(core) for core in usable_cores()[device.threads :][:_MOST]]
        self._queue: OrderedDict[_Key, tuple[Workload, Candidate]] = OrderedDict()
        self._done: dict[_Key, Outcome | bool] = {}
        self._false_starts = 0
        self._scratch: tempfile.TemporaryDirectory[str] | None = None

    @property
    def folder(self) -> Path | None:
        """Where built kernels are; ``None`` if no core is left to build ahead on."""
        if not self._builders:
            return None
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="raftune-", ignore_cleanup_errors=True)
        return Path(self._scratch.name)

    def close(self) -> None:
        """Stop the builders, and delete what they built."""
        for builder in self._builders:
            self._stop(builder)
        self._queue.clear()
        self._done.clear()
        if self._scratch is not None:
            self._scratch.cleanup()
            self._scratch = None

    def offer(self, workload: Workload, candidates: Sequence[Candidate]) -> None:
        """Build these when a builder is free, in this order, after what was offered before."""
        if not self._builders:
            return
        busy = {builder.key for builder in self._builders}
        for candidate in candidates:
            key = (workload.digest, candidate.digest)
            if key not in self._done and key not in busy:
                self._queue.setdefault(key, (workload, candidate))
        while len(self._queue) > _QUEUE:
            self._queue.popitem(last=False)
        self.pump()

    def take(self, workload: Workload, candidate: Candidate, timeout: float) -> Outcome | bool:
        """Whether the candidate can be loaded from ``folder``, or the outcome if it took its builder down.

        Waits at most ``timeout`` seconds for one that is being built; what still waits for a builder is left to the caller.
        """
        deadline = time.monotonic() + timeout
        key = (workload.digest, candidate.digest)
        self._queue.pop(key, None)
        self.pump()
        while (builder := next((b for b in self._builders if b.key == key), None)) is not None:
            if time.monotonic() > deadline:
                self._died(builder, Status.TIMEOUT, f"not built after {timeout:.3g} s")
                break
            time.sleep(_WAIT_S)
            self.pump()
        return self._done.pop(key, False)

    def pump(self) -> None:
        """Hear what the builders say, stop those that misbehave, and give them something to do."""
        for builder in self._builders:
            self._hear(builder)
            if builder.busy:
                self._watch(builder)
            if self._queue and not builder.busy and self._false_starts < _FALSE_STARTS:
                self._give(builder)

    def _hear(self, builder: _Builder) -> None:
        while builder.worker is not None:
            try:
                message = builder.worker.channel.receive(0.0)
            except EOFError:
                self._died(builder, Status.CRASH, builder.worker.epitaph())
                return
            if message is None:
                return
            match message.get("event"):
                case "ready":
                    builder.ready = True
                    self._false_starts = 0
                case "warming up":
                    builder.deadline = time.monotonic() + WARM_UP_TIMEOUT_S
                case "warm":
                    builder.deadline = time.monotonic() + self._policy.timeout
                case _:
                    if builder.key is not None:
                        self._done[builder.key] = "error" not in message
                    builder.busy, builder.key = False, None

    def _watch(self, builder: _Builder) -> None:
        assert builder.worker is not None
        if builder.worker.resident() > self._policy.memory_limit_mb << 20:
            self._died(builder, Status.OOM, f"more than {self._policy.memory_limit_mb} MB of memory")
        elif time.monotonic() > builder.deadline:
            self._died(builder, Status.TIMEOUT, f"not built after {self._policy.timeout:.3g} s")

    def _give(self, builder: _Builder) -> None:
        if builder.worker is None:
            builder.worker = launch(self._policy, self._device, kernels=self.folder, core=builder.core)
            return
        if not builder.ready:
            return
        key, (workload, candidate) = next(iter(self._queue.items()))
        if candidate.dialect in builder.warm:
            del self._queue[key]
            builder.key = key
            request = {"do": "prepare", "workload": workload.to_json(), "candidate": candidate.to_json()}
        else:  # takes seconds, in which the candidate can be measured without it
            builder.warm.add(candidate.dialect)
            request = {"do": "warm up", "dialect": candidate.dialect}
        builder.worker.trim()
        try:
            builder.worker.channel.send(request)
        except OSError:  # it died while idle, which is no candidate's fault
            self._stop(builder)
            return
        builder.busy, builder.deadline = True, time.monotonic() + self._policy.timeout

    def _died(self, builder: _Builder, status: Status, message: str) -> None:
        if builder.key is not None:
            self._done[builder.key] = Outcome(status, message=message)
        elif not builder.ready:
            self._false_starts += 1
        self._stop(builder)

    def _stop(self, builder: _Builder) -> None:
        if builder.worker is not None:
            builder.worker.stop()
        builder.worker, builder.key, builder.ready, builder.busy = None, None, False, False
        builder.warm.clear()
