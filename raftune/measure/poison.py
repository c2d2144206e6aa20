"""Uninitialised memory made recognisable, so that a kernel that leaves part of its result unwritten cannot pass by luck."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_M_PERTURB = -6  # glibc's malloc.h
# glibc fills what it hands out with the complement of the lowest byte, and what it takes back with that byte. Small blocks
# come back from a per-thread cache without the first filling, hence two patterns: all ones (NaN in every floating-point
# format, -1 in integers) in fresh memory, or in recycled memory.
FRESH, RECYCLED = 0x100, 0xFF


@contextmanager
def poisoned_memory(pattern: int = FRESH) -> Iterator[None]:
    """Within the block, memory that the C library allocates is filled; this reaches allocations inside kernels as well.

    With another allocator only tensors that PyTorch's own ``empty`` makes are filled.
    """
    if _mallopt(pattern):
        try:
            yield
        finally:
            _mallopt(0)
        return
    settings: Any = torch.utils.deterministic
    mode, fill = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    # Filling is a part of deterministic mode, which may make some operators run another algorithm than the timed one.
    torch.set_deterministic_debug_mode("warn")
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        settings.fill_uninitialized_memory = fill


def _mallopt(pattern: int) -> bool:
    """Set glibc's fill pattern; ``False`` where that has no effect on PyTorch's memory."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or mallopt(_M_PERTURB, pattern) != 1:
        return False
    if pattern == FRESH and not torch.empty(4096).isnan().all():
        mallopt(_M_PERTURB, 0)
        return False
    return True
