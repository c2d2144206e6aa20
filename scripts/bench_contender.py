"""The process of one contender: makes its training step, then runs it when told to. See ``bench_process`` for the other end."""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from raftune.lifetime import die_with
from raftune.measure.protocol import Channel, Message

SEED = 20
LOSSES = 50
_SELF = Path("/proc/self")


def main(name: str, case: str, threads: int, log: str, parent: int, descriptor: int) -> int:
    """Answers ``{"do": ...}`` messages on the socket with this descriptor, in this order, until one says ``end``:

    ``prepare``: makes the step and runs it once; ``compile_s``, seconds from the begin of compiling to that step's end.
    ``losses``: of the first steps from the fresh model, that first one included, and ``step_ms`` of the later ones.
    ``step``: runs one step, then ``count`` timed ones; ``ns``, nanoseconds of each.
    ``memory``: see :class:`Memory`.

    What cannot be done is answered with ``failed``, the reason in one line.
    """
    die_with(parent)
    channel = Channel(socket.socket(fileno=descriptor))
    served = Served(name, case, threads, Path(log) if log else None)
    while (message := channel.receive(None)) is not None and message["do"] != "end":
        try:
            answer = getattr(served, message.pop("do"))(**message)
        except Exception as error:  # a contender that cannot run a model is a finding, whatever it raises
            answer = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
        channel.send(answer)
    return 0


class Served:
    """One contender with one model; a method for each message."""

    def __init__(self, name: str, case: str, threads: int, log: Path | None) -> None:
        self._name, self._case, self._threads, self._log = name, case, threads, log
        self._losses: list[float] = []

    def prepare(self) -> Message:
        import torch
        from bench_peers import CONTENDERS, Task

        from raftune.targets import load_target

        torch.set_num_threads(self._threads)
        contender = CONTENDERS[self._name]
        if contender.own_threads:
            _keep_to(self._threads)
        contender.load()
        target = load_target(f"{Path(__file__).with_name('bench_models.py')}:{self._case}")
        self._memory = Memory()
        start = time.perf_counter()
        self._step = contender.make(Task(self._case.removesuffix("_small"), target, self._log))
        torch.manual_seed(SEED)  # here: tracing has drawn random numbers
        self._losses = [float(self._step())]
        seconds = time.perf_counter() - start
        self._memory.compiled()
        return {"compile_s": seconds}

    def losses(self) -> Message:
        times = []
        while len(self._losses) < LOSSES:
            start = time.perf_counter_ns()
            loss = self._step()
            times.append(time.perf_counter_ns() - start)
            self._losses.append(float(loss))
        return {"losses": self._losses, "step_ms": statistics.median(times[len(times) // 2 :]) / 1e6}

    def step(self, count: int) -> Message:
        step = self._step
        step()
        times = []
        for _ in range(count):
            start = time.perf_counter_ns()
            step()
            times.append(time.perf_counter_ns() - start)
        return {"ns": times}

    def memory(self) -> Message:
        return self._memory.report()


class Memory:
    """Resident megabytes of this process: ``peak_mb`` is the most of its life, compiling included.

    ``step_mb`` is the most since it was compiled, over what imports, model and batch had taken before that: gradients,
    optimizer state, activations, and what compiling left.
    """

    def __init__(self) -> None:
        self._loaded = _status("VmRSS")
        self._peak = 0.0

    def compiled(self) -> None:
        """Compiling is over: the peak of the steps counts from here."""
        self._peak = _status("VmHWM")
        (_SELF / "clear_refs").write_text("5")  # proc(5): the peak becomes what is resident now

    def report(self) -> Message:
        steps = _status("VmHWM")
        return {"peak_mb": max(self._peak, steps), "step_mb": steps - self._loaded, "loaded_mb": self._loaded}


def _status(field: str) -> float:
    lines = (_SELF / "status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024


def _keep_to(threads: int) -> None:
    """Leave this process as many cores as threads: a library then starts no more threads than that, and they stay there."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def _arguments(words: list[str]) -> dict[str, Any]:
    name, case, threads, log, parent, descriptor = words
    return {
        "name": name,
        "case": case,
        "threads": int(threads),
        "log": log,
        "parent": int(parent),
        "descriptor": int(descriptor),
    }


if __name__ == "__main__":
    sys.exit(main(**_arguments(sys.argv[1:])))
