"""The parent's side of measuring: one worker process, watched, and replaced whenever a candidate takes it down."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from raftune.device import Device, thread_environment
from raftune.measure.protocol import Channel, Message
from raftune.measurement import Outcome, Policy, Rematch, Status
from raftune.workload import Candidate, Workload

# Importing the frameworks on a slow disk takes this long at most.
_START_TIMEOUT_S = 180.0
_START_ATTEMPTS = 3
# What a dialect does once (compiling headers, importing a compiler) before its first candidate.
_WARM_UP_TIMEOUT_S = 240.0
_POLL_S = 0.05
# A worker that holds this share of its memory limit between candidates is replaced before it fails an innocent one.
_FULL_SHARE = 0.75
_OUTPUT_LIMIT = 16 << 20
_TAIL_BYTES = 4000
_TAIL_CHARACTERS = 800


class WorkerUnavailable(RuntimeError):
    """No worker process could be started: nothing can be measured on this machine until the reason is gone."""


class _Died(Exception):
    """The worker is gone, or had to be stopped; ``index`` is the candidate of a rematch that it was busy with."""

    def __init__(self, status: Status, message: str, index: int = -1) -> None:
        super().__init__(message)
        self.status, self.message, self.index = status, message, index


@dataclass(slots=True)
class _Process:
    process: subprocess.Popen[bytes]
    channel: Channel
    output: int

    def resident(self) -> int:
        """Bytes of memory in use now."""
        try:
            pages = Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()[1]
        except (OSError, IndexError):  # it died: the connection says so next
            return 0
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def tail(self) -> str:
        """The end of what the worker printed, on one line."""
        size = os.fstat(self.output).st_size
        text = os.pread(self.output, _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace")
        return " | ".join(line.strip() for line in text.splitlines() if line.strip())[-_TAIL_CHARACTERS:]

    def stop(self) -> int:
        """Kill the worker with everything that it started (compilers), and return its exit status."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.channel.close()
        os.close(self.output)
        return self.process.wait()


class Measurer:
    """Measures candidates in a worker process under ``policy``, with the threads of ``device``; a context manager.

    The worker starts with the first request and imports each backend once. A candidate that crashes, hangs or eats its memory
    costs its own outcome and a new worker, nothing else. The worker dies with the thread that started it: keep a measurer in
    one thread. Every method raises :class:`WorkerUnavailable` if no worker can be started, nothing for what a candidate does.
    """

    def __init__(self, policy: Policy, device: Device) -> None:
        self._policy = policy
        self._device = device
        self._worker: _Process | None = None
        self._reference_ns: int | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop the worker. The measurer can be used again; it then starts another one."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

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
        start = time.perf_counter()
        try:
            request = {"do": "measure", **self._common(workload), "candidate": _candidate_json(candidate)}
            if default is not None:
                request |= {"default": _candidate_json(default[0]), "default_us": default[1]}
            reply = self._ask(request, timeout)
            outcome = _outcome(reply["outcome"])
        except _Died as died:
            outcome = Outcome(died.status, message=died.message)
        return dataclasses.replace(outcome, cost_s=time.perf_counter() - start)

    def rematch(self, workload: Workload, candidates: Sequence[Candidate], default: Candidate) -> list[Rematch]:
        """Race ``candidates`` against ``default``, interleaved in one process; one result each, in order.

        One that fails is taken out and the others race without it. If the default fails, all of them get its status.
        """
        start = time.perf_counter()
        results: dict[Candidate, Rematch] = {}
        racing = list(dict.fromkeys(candidates))
        while racing:
            try:
                reply = self._ask(
                    {
                        "do": "rematch",
                        **self._common(workload),
                        "candidates": [_candidate_json(candidate) for candidate in racing],
                        "default": _candidate_json(default),
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
        cost = (time.perf_counter() - start) / max(len(results), 1)
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
                self.close()
                worker = self._running()
                worker.channel.send(request)
            return self._reply(worker, limit)
        except BaseException:  # also an interrupt: the worker may still be busy with a request that nobody waits for
            self.close()
            raise
        finally:
            if self._worker is not None and self._worker.resident() > _FULL_SHARE * self._memory_limit:
                self.close()

    def _reply(self, worker: _Process, limit: float) -> Message:
        index = -1
        deadline = time.monotonic() + limit
        while True:
            try:
                message = worker.channel.receive(_POLL_S)
            except EOFError:
                raise _Died(Status.CRASH, self._epitaph(worker), index) from None
            if message is not None and "event" not in message:
                self._reference_ns = message["reference_ns"]
                return message
            if message is not None:
                index = int(message.get("index", index))
                granted = _WARM_UP_TIMEOUT_S if message["event"] == "warming up" else limit
                deadline = time.monotonic() + granted
            elif worker.process.poll() is not None:  # something that it started may still hold the connection open
                raise _Died(Status.CRASH, self._epitaph(worker), index)
            if worker.resident() > self._memory_limit:
                raise _Died(Status.OOM, f"more than {self._policy.memory_limit_mb} MB of memory", index)
            if time.monotonic() > deadline:
                raise _Died(Status.TIMEOUT, f"not finished after {limit:.3g} s", index)
            if os.fstat(worker.output).st_size > _OUTPUT_LIMIT:
                os.ftruncate(worker.output, 0)

    @property
    def _memory_limit(self) -> int:
        return self._policy.memory_limit_mb << 20

    def _running(self) -> _Process:
        if self._worker is not None and self._worker.process.poll() is not None:
            self.close()
        reason = ""
        for _ in range(_START_ATTEMPTS):
            if self._worker is None:
                self._worker, reason = self._start()
            if self._worker is not None:
                os.ftruncate(self._worker.output, 0)
                return self._worker
        raise WorkerUnavailable(f"the measuring process failed to start {_START_ATTEMPTS} times in a row: {reason}")

    def _start(self) -> tuple[_Process | None, str]:
        """A worker that said that it is ready, or why there is none."""
        ours, theirs = socket.socketpair()
        # The parent's import path, so that dialects installed there are found; -P keeps the current folder from coming first.
        paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
        environment = os.environ | thread_environment(self._device.threads, pinned=self._policy.pinned) | {"PYTHONPATH": paths}
        arguments = (theirs.fileno(), os.getpid(), self._device.threads, self._policy.memory_limit_mb)
        with tempfile.TemporaryFile(buffering=0) as output, theirs:
            # Appending keeps the worker's writes at the end when the file is cut.
            fcntl.fcntl(output, fcntl.F_SETFL, fcntl.fcntl(output, fcntl.F_GETFL) | os.O_APPEND)
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "raftune.measure.worker", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )
            worker = _Process(process, Channel(ours), os.dup(output.fileno()))
        try:
            if worker.channel.receive(_START_TIMEOUT_S) is not None:
                return worker, ""
            reason = f"not ready after {_START_TIMEOUT_S:g} s"
        except EOFError:
            reason = self._epitaph(worker)
        except BaseException:  # an interrupt while waiting must not leave the process behind
            worker.stop()
            raise
        worker.stop()
        return None, reason

    def _epitaph(self, worker: _Process) -> str:
        """How the worker ended, with the end of what it printed."""
        try:
            status = worker.process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:  # it closed the connection but lives on; it is killed next
            how = "the worker process stopped answering"
        else:
            how = (
                f"the worker process died of {signal.Signals(-status).name}"
                if status < 0
                else f"the worker exited with {status}"
            )
        tail = worker.tail()
        return f"{how}: {tail}" if tail else how


def _outcome(value: dict[str, Any]) -> Outcome:
    return Outcome(**(value | {"status": Status(value["status"])}))


def _candidate_json(candidate: Candidate) -> Message:
    return {"dialect": candidate.dialect, "version": candidate.version, "config": dict(candidate.config)}
