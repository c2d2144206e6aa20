"""The parent's end of a contender's process: starts it, asks it, and turns whatever goes wrong into a reason."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from bench_peers import CONTENDERS, RAFTUNE

from raftune.device import thread_environment
from raftune.measure.protocol import Channel, Message

# Making the step ready, or any other single answer, takes at most this many seconds.
PATIENCE_S = 600.0
_GOODBYE_S = 10.0
_REASON_WORDS = 40


class ContenderFailed(Exception):
    """A contender cannot go on; the message is the reason in one line."""


class ContenderProcess:
    """A contender in a process of its own. A context manager: at its end the process is gone."""

    def __init__(self, command: list[str], environment: Mapping[str, str]) -> None:
        """Starts ``command`` with the process id of this process and the descriptor of its socket as further arguments."""
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed in end())
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(os.getpid()), str(theirs.fileno())],
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
            )

    def __enter__(self) -> ContenderProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def ask(self, do: str, patience: float = PATIENCE_S, **arguments: object) -> Message:
        """The answer to one message; :class:`ContenderFailed` if there is none in ``patience`` seconds, or it is a failure."""
        try:
            self._channel.send({"do": do, **arguments})
            answer = self._channel.receive(patience)
        except (EOFError, OSError):
            raise ContenderFailed(self._last_words()) from None
        if answer is None:
            raise ContenderFailed(f"{do} took more than {patience:.0f} s")
        if "failed" in answer:
            raise ContenderFailed(answer["failed"])
        return answer

    def end(self) -> None:
        """Tell the process to end, and see to it. May be called again."""
        try:
            self._channel.send({"do": "end"})
            self._process.wait(_GOODBYE_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._channel.close()
        self._said.close()

    def _last_words(self) -> str:
        """Why the process ended: its status and the end of what it wrote."""
        status = self._process.wait(_GOODBYE_S)
        self._said.seek(0)
        words = self._said.read().decode(errors="replace").split()[-_REASON_WORDS:]
        return " ".join([f"exit status {status}:", *words])


def start(name: str, case: str, threads: int, log: Path | None, cache: Path) -> ContenderProcess:
    """The process of contender ``name`` with model ``case``, its threads pinned before torch is loaded.

    ``cache``: where compilers keep what they have compiled, empty for a compile time that a new user sees.
    """
    contender = CONTENDERS[name]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")}
    threading = thread_environment(threads, pinned=not contender.own_threads)
    caching = {} if name == RAFTUNE else {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    script = Path(__file__).with_name("bench_contender.py")
    return ContenderProcess(
        [sys.executable, str(script), name, case, str(threads), str(log or "")],
        inherited | threading | dict(contender.environment) | caching,
    )
