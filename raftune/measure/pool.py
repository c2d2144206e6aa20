"""The parent's side of measuring: one worker process, watched, and replaced whenever a candidate takes it down."""

from __future__ import annotations

import dataclasses
import os
import time
import warnings
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from raftune.device import Device
from raftune.measure.ahead import Ahead
from raftune.measure.process import WARM_UP_TIMEOUT_S, WorkerProcess, start
from raftune.measure.protocol import Message
from raftune.measurement import Outcome, Policy, Rematch, Status
from raftune.workload import Candidate, Workload

_POLL_S = 0.05
# A worker that holds this share of its memory limit between candidates is replaced before it fails an innocent one.
_FULL_SHARE = 0.75


class _Died(Exception):
    """The worker is gone, or had to be stopped; ``index`` is the candidate of a rematch that it was busy with."""

    def __init__(self, status: Status, message: str, index: int = -1) -> None:
        super().__init__(message)
        self.status, self.message, self.index = status, message, index


class Measurer:
    """Measures candidates in a worker process under ``policy``, with the threads of ``device``; a context manager.

    The worker starts with the first request and imports each backend once. A candidate that crashes, hangs or eats its memory
    costs its own outcome and a new worker, nothing else. The worker dies with the thread that started it: keep a measurer in
    one thread. Every method raises :class:`WorkerUnavailable` if no worker can be started, nothing for what a candidate does.
    """

    def __init__(self, policy: Policy, device: Device) -> None:
        self._policy = policy
        self._device = device
        self._worker: WorkerProcess | None = None
        self._ahead = Ahead(policy, device)
        self._reference_ns: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop all processes. The measurer can be used again; it then starts others."""
        self._ahead.close()
        self._stop_worker()

    def prepare(self, workload: Workload, candidates: Sequence[Candidate]) -> None:
        """These will be measured soon: where a core is idle, what takes long of building them is done meanwhile."""
        self._ahead.offer(workload, candidates)

    def measure(
        self,
        workload: Workload,
        candidate: Candidate,
        *,
        default: tuple[Candidate, float] | None = None,
        timeout: float | None = None,
    ) -> Outcome:
        """Build, check and time one candidate.

        With ``default`` (a candidate and its time in microseconds), both are timed in turns and the outcome's times are the
        ratio on the default's scale: a machine that is slower now than it was then slows both. ``timeout`` (seconds) may only
        shorten the policy's, when a budget ends.
        """
        begun = time.perf_counter()
        limit = self._policy.timeout if timeout is None else min(timeout, self._policy.timeout)
        built = self._ahead.take(workload, candidate, limit)
        if isinstance(built, Outcome):
            return dataclasses.replace(built, cost_s=time.perf_counter() - begun)
        try:
            request = {"do": "measure", **self._common(workload), "candidate": candidate.to_json(), "built": built}
            if default is not None:
                request |= {"default": default[0].to_json(), "default_us": default[1]}
            reply = self._ask(request, limit - (time.perf_counter() - begun))
            outcome = _outcome(reply["outcome"])
        except _Died as died:
            outcome = Outcome(died.status, message=died.message)
        return dataclasses.replace(outcome, cost_s=time.perf_counter() - begun)

    def rematch(self, workload: Workload, candidates: Sequence[Candidate], default: Candidate) -> list[Rematch]:
        """Race ``candidates`` against ``default``, interleaved in one process; one result each, in order.

        One that fails is taken out and the others race without it. If the default fails, all of them get its status.
        """
        begun = time.perf_counter()
        results: dict[Candidate, Rematch] = {}
        racing = list(dict.fromkeys(candidates))
        while racing:
            try:
                reply = self._ask(
                    {
                        "do": "rematch",
                        **self._common(workload),
                        "candidates": [candidate.to_json() for candidate in racing],
                        "default": default.to_json(),
                    }
                )
            except _Died as died:
                reply = {"failed": died.index, "status": died.status, "message": died.message}
            if "failed" not in reply:
                for candidate, value in zip(racing, reply["rematches"], strict=True):
                    results[candidate] = Rematch(**(value | {"status": Status(value["status"])}))
                break
            status, message = Status(reply["status"]), str(reply["message"])
            if reply["failed"] < 0:
                results |= dict.fromkeys(racing, Rematch(status, message=f"the default failed: {message}"))
                break
            results[racing.pop(reply["failed"])] = Rematch(status, message=message)
        cost = (time.perf_counter() - begun) / max(len(results), 1)
        return [dataclasses.replace(results[candidate], cost_s=cost) for candidate in candidates]

    def sample(
        self,
        workload: Workload,
        dialect_name: str,
        count: int,
        seed: int,
        *,
        parents: Sequence[Candidate] = (),
        timeout: float | None = None,
    ) -> list[Candidate]:
        """Up to ``count`` candidates from the dialect's sampled space, near ``parents`` if there are any.

        They are proposed in the worker; failing warns and gives none.
        """
        request = {"do": "sample", **self._common(workload), "dialect": dialect_name, "count": count, "seed": seed}
        request["parents"] = [dict(parent.config) for parent in parents]
        try:
            reply = self._ask(request, timeout)
        except _Died as died:
            reply = {"error": died.message}
        if "error" in reply:
            warnings.warn(f"dialect {dialect_name} proposed nothing for {workload.op}: {reply['error']}", stacklevel=2)
            return []
        return [Candidate(c["dialect"], c["version"], c["config"]) for c in reply["candidates"]]

    def _common(self, workload: Workload) -> Message:
        policy = dataclasses.asdict(self._policy)
        return {"workload": workload.to_json(), "policy": policy, "reference_ns": self._reference_ns}

    def _ask(self, request: Message, timeout: float | None = None) -> Message:
        """The worker's reply, or :class:`_Died`. Each event from the worker grants the time once more."""
        limit = self._policy.timeout if timeout is None else min(timeout, self._policy.timeout)
        worker = self._running()
        try:
            try:
                worker.channel.send(request)
            except OSError:  # it died while idle, which is no candidate's fault
                self._stop_worker()
                worker = self._running()
                worker.channel.send(request)
            return self._reply(worker, limit)
        except BaseException:  # also an interrupt: the worker may still be busy with a request that nobody waits for
            self._stop_worker()
            raise
        finally:
            if self._worker is not None and self._worker.resident() > _FULL_SHARE * self._memory_limit:
                self._stop_worker()

    def _reply(self, worker: WorkerProcess, limit: float) -> Message:
        index = -1
        deadline = time.monotonic() + limit
        while True:
            try:
                message = worker.channel.receive(_POLL_S)
            except EOFError:
                raise _Died(Status.CRASH, worker.epitaph(), index) from None
            self._ahead.pump()
            if message is not None and "event" not in message:
                self._reference_ns = message["reference_ns"]
                return message
            if message is not None:
                index = int(message.get("index", index))
                granted = WARM_UP_TIMEOUT_S if message["event"] == "warming up" else limit
                deadline = time.monotonic() + granted
            elif worker.process.poll() is not None:  # something that it started may still hold the connection open
                raise _Died(Status.CRASH, worker.epitaph(), index)
            if worker.resident() > self._memory_limit:
                raise _Died(Status.OOM, f"more than {self._policy.memory_limit_mb} MB of memory", index)
            if time.monotonic() > deadline:
                raise _Died(Status.TIMEOUT, f"not finished after {limit:.3g} s", index)
            worker.trim()

    @property
    def _memory_limit(self) -> int:
        return self._policy.memory_limit_mb << 20

    def _stop_worker(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def _running(self) -> WorkerProcess:
        if self._worker is not None and self._worker.process.poll() is not None:
            self._stop_worker()
        if self._worker is None:
            self._worker = start(self._policy, self._device, kernels=self._ahead.folder)
        os.ftruncate(self._worker.output, 0)
        return self._worker


def _outcome(value: dict[str, Any]) -> Outcome:
    return Outcome(**(value | {"status": Status(value["status"])}))
