"""Random inputs for a workload: the dtypes, shapes, strides and value ranges that it will meet, never zeros."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from raftune.dialects.torch_ops import dtype_of
from raftune.workload import TensorSpec, Workload


class InputError(ValueError):
    """A workload says too little, or something impossible, about an input to make one."""


def make_inputs(workload: Workload, seed: int) -> list[Tensor]:
    """One tensor per ``workload.inputs``, equal for equal seeds, in memory laid out exactly as the specs say.

    Gaps, transpositions and stride-0 expansions are those of the spec; a gap holds random values as well. Floating-point
    values are uniform in ``[low, high]``, on one side of a single bound, or standard normal; integers need both bounds.
    """
    generator = torch.Generator().manual_seed(seed)
    return [_make(f"input {i} of {workload.op}", spec, generator) for i, spec in enumerate(workload.inputs)]


def memory_of(tensor: Tensor) -> Tensor:
    """All elements that ``tensor`` reaches over, gaps included, once each, as a flat view of the same memory."""
    return tensor.as_strided((_extent(tensor.shape, tensor.stride()),), (1,))


def copy_of(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy in fresh memory with the same strides and gaps (``clone`` would close gaps and unfold expansions)."""
    return memory_of(tensor).to(dtype or tensor.dtype, copy=True).as_strided(tensor.shape, tensor.stride())


def shifted_copy_of(tensor: Tensor) -> Tensor:
    """Like :func:`copy_of`, one element beyond where an allocation starts: aligned to nothing more than the element."""
    memory = memory_of(tensor)
    shifted = memory.new_empty(memory.numel() + 1)[1:].copy_(memory)
    return shifted.as_strided(tensor.shape, tensor.stride())


def _make(what: str, spec: TensorSpec, generator: torch.Generator) -> Tensor:
    if len(spec.shape) != len(spec.stride) or any(n < 0 for n in (*spec.shape, *spec.stride)):
        raise InputError(f"{what}: shape {list(spec.shape)} and stride {list(spec.stride)} do not describe a tensor")
    return _values(what, spec, _extent(spec.shape, spec.stride), generator).as_strided(spec.shape, spec.stride)


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements of storage that a tensor reaches over, gaps included."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))


def _values(what: str, spec: TensorSpec, count: int, generator: torch.Generator) -> Tensor:
    dtype = dtype_of(spec.dtype)
    low, high = spec.low, spec.high
    if low is not None and high is not None and not low <= high:
        raise InputError(f"{what}: low {low} is above high {high}")
    if dtype is torch.bool:
        first, last = int(low or 0), int(1 if high is None else high)
        return torch.randint(first, last + 1, (count,), generator=generator).bool()
    if not (dtype.is_floating_point or dtype.is_complex):
        if low is None or high is None:
            raise InputError(f"{what}: {spec.dtype} values need both bounds, got low={low} high={high}; name them in the spec")
        limits = torch.iinfo(dtype)
        first, last = max(math.ceil(low), limits.min), min(math.floor(high), limits.max)
        if first > last:
            raise InputError(f"{what}: no {spec.dtype} lies in [{low}, {high}]")
        # randint's end is exclusive and must itself be an int64.
        return torch.randint(first, min(last, 2**63 - 2) + 1, (count,), generator=generator).to(dtype)
    # Half and 8-bit formats have no generator of their own everywhere: draw in float32, then round.
    wide: Any = dtype if dtype in (torch.float64, torch.complex64, torch.complex128) else torch.float32
    if low is not None and high is not None:
        return torch.rand(count, generator=generator, dtype=wide).mul_(high - low).add_(low).to(dtype)
    values = torch.randn(count, generator=generator, dtype=wide)
    if low is not None:
        values = values.abs_().add_(low)
    elif high is not None:
        values = values.abs_().neg_().add_(high)
    return values.to(dtype)
