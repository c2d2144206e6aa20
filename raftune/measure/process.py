"""A worker process as its parent sees it: started, asked, watched, stopped."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from raftune.device import Device, thread_environment
from raftune.dialects import store
from raftune.measure.protocol import Channel
from raftune.measurement import Policy

# Importing the frameworks on a slow disk takes this long at most.
_START_TIMEOUT_S = 180.0
# What a dialect does once (compiling headers, importing a compiler) before its first candidate.
WARM_UP_TIMEOUT_S = 240.0
_START_ATTEMPTS = 3
_OUTPUT_LIMIT = 16 << 20
_TAIL_BYTES = 4000
_TAIL_CHARACTERS = 800


class WorkerUnavailable(RuntimeError):
    """No worker process could be started: nothing can be measured on this machine until the reason is gone."""


@dataclass(slots=True)
class WorkerProcess:
    """Made by :func:`start`."""

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

    def trim(self) -> None:
        """Forget what it printed, if that is much."""
        if os.fstat(self.output).st_size > _OUTPUT_LIMIT:
            os.ftruncate(self.output, 0)

    def epitaph(self) -> str:
        """How the worker ended, with the end of what it printed."""
        try:
            status = self.process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:  # it closed the connection but lives on; it is killed next
            how = "the worker process stopped answering"
        else:
            how = (
                f"the worker process died of {signal.Signals(-status).name}"
                if status < 0
                else f"the worker exited with {status}"
            )
        tail = self.tail()
        return f"{how}: {tail}" if tail else how


def start(policy: Policy, device: Device, *, kernels: Path | None = None) -> WorkerProcess:
    """A worker that measures and said that it is ready; raises :class:`WorkerUnavailable` after some attempts.

    ``kernels`` is where it looks for what was built ahead.
    """
    reason = ""
    for _ in range(_START_ATTEMPTS):
        worker = launch(policy, device, kernels=kernels)
        try:
            if worker.channel.receive(_START_TIMEOUT_S) is not None:
                return worker
            reason = f"not ready after {_START_TIMEOUT_S:g} s"
        except EOFError:
            reason = worker.epitaph()
        except BaseException:  # an interrupt while waiting must not leave the process behind
            worker.stop()
            raise
        worker.stop()
    raise WorkerUnavailable(f"the measuring process failed to start {_START_ATTEMPTS} times in a row: {reason}")


def launch(policy: Policy, device: Device, *, kernels: Path | None = None, core: int | None = None) -> WorkerProcess:
    """A worker that was only started: its first message says that it is ready. With ``core`` it keeps to that one."""
    ours, theirs = socket.socketpair()
    # The parent's import path, so that dialects installed there are found; -P keeps the current folder from coming first.
    paths = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    pinned = policy.pinned and core is None
    environment = os.environ | thread_environment(device.threads, pinned=pinned) | {"PYTHONPATH": paths}
    if kernels is not None:
        environment[store.FOLDER_VARIABLE] = str(kernels)
    arguments = [theirs.fileno(), os.getpid(), device.threads, policy.memory_limit_mb]
    arguments += [] if core is None else [core]
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
        return WorkerProcess(process, Channel(ours), os.dup(output.fileno()))
