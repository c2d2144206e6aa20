"""What a measurement is true for: the processor, its usable cores and vector units, and the thread setting."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from raftune.workload import canonical_json, digest_text

# Vector extensions that change which kernel a library picks; the rest of the flags are noise in a key.
_VECTOR_FLAGS = (
    "avx",
    "avx2",
    "fma",
    "avx512f",
    "avx512bw",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "sve",
)


# OpenMP, told to pin, binds the main thread to one core when it is loaded: what a child may use is told by its parent.
_CORES_VARIABLE = "RAFTUNE_CORES"
_CORES = (
    sorted(map(int, os.environ[_CORES_VARIABLE].split(",")))
    if _CORES_VARIABLE in os.environ
    else sorted(os.sched_getaffinity(0))
)


@dataclass(frozen=True, slots=True)
class Device:
    """A key, not a description: fields that do not change a timing are left out (host name, memory size, kernel version).

    ``cores`` counts the processors this process may use; ``threads`` is the intra-op thread setting of the timed process.
    On a CUDA device (``kind`` is ``cuda``) ``cores`` counts its multiprocessors, 0 if that is not known, and ``vector`` holds
    its architecture (``sm_90``) and ``tf32`` where PyTorch may round the factors of a float32 product to it.
    """

    kind: str
    model: str
    cores: int
    vector: tuple[str, ...]
    threads: int

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def digest(self) -> str:
        return digest_text(canonical_json(self.to_json()))

    @property
    def capability(self) -> int | None:
        """Of a CUDA device, ten times its major plus its minor compute capability; ``None`` for any other device."""
        names = [name for name in self.vector if name.startswith("sm_")] if self.kind == "cuda" else []
        return int(names[0].removeprefix("sm_")) if names else None

    def __str__(self) -> str:
        if self.kind == "cuda":
            return f"{self.model} ({', '.join(self.vector)})"
        plural = "" if self.threads == 1 else "s"
        return f"{self.model}, {self.cores} cores, {self.threads} thread{plural}"


def current_device(threads: int) -> Device:
    """The CPU of this process with ``threads`` intra-op threads."""
    model, flags = _cpuinfo()
    return Device("cpu", model, len(_CORES), tuple(f for f in _VECTOR_FLAGS if f in flags), threads)


_target: ContextVar[Device | None] = ContextVar("raftune_target", default=None)


class UnknownDevice(ValueError):
    """A device was named that raftune does not know."""


def cuda_architecture(name: str) -> Device:
    """A CUDA device of which only the architecture is known: ``cuda:sm_90``. Raises :class:`UnknownDevice`."""
    found = re.fullmatch(r"cuda:(sm_[1-9][0-9]{1,2})", name)
    if found is None:
        raise UnknownDevice(f"unknown device {name!r}: expected cuda:sm_NN, as in cuda:sm_90")
    return Device("cuda", found[1], 0, (found[1],), 0)


def target() -> Device:
    """What candidates are enumerated and built for now: this process's CPU, unless :func:`targeting` says otherwise."""
    return _target.get() or current_device(1)


@contextmanager
def targeting(device: Device) -> Iterator[None]:
    """Enumerate and build for ``device`` within the block, whether it is here or not."""
    token = _target.set(device)
    try:
        yield
    finally:
        _target.reset(token)


def usable_cores() -> tuple[int, ...]:
    """The cores that this process may use, the first of them for what is measured (:func:`thread_environment`)."""
    return tuple(_CORES)


def processor_features() -> str:
    """Everything that the processor says it can do: what machine code compiled for it may rely on."""
    model, flags = _cpuinfo()
    return " ".join([platform.machine(), model, *sorted(flags)])


def thread_environment(threads: int, *, pinned: bool) -> dict[str, str]:
    """Environment variables that make OpenMP, MKL and TVM use ``threads`` threads; they act if set before torch is imported.

    Pinning gives every thread its own core from those the process may use: unpinned threads of a virtual machine are seen to
    share one core for a whole scheduler tick.
    """
    count = str(threads)
    variables = {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "TVM_NUM_THREADS": count}
    variables[_CORES_VARIABLE] = ",".join(map(str, _CORES))
    if pinned:
        cores = _CORES[:threads]
        variables |= {"OMP_PROC_BIND": "true", "OMP_PLACES": ",".join(f"{{{core}}}" for core in cores)}
    return variables


@cache
def _cpuinfo() -> tuple[str, frozenset[str]]:
    model, flags = "", frozenset[str]()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and not model:
            model = value.strip()
        elif name.strip() in ("flags", "Features") and not flags:
            flags = frozenset(value.split())
    return model or platform.processor() or platform.machine(), flags
