"""How PyTorch's strided tensors are handed to TVM, which wants dense row-major ones, without copying.

A tensor's dimensions split into broadcast ones (stride 0) and the rest. If the rest is a permutation of a dense tensor, TVM
gets that dense tensor; else it gets the span of memory that the tensor lies in as one dimension and computes the offsets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raftune.workload import TensorSpec

_MAX_ELEMENTS = 2**31 - 1  # index arithmetic in the generated code is 32 bits wide


@dataclass(frozen=True, slots=True)
class DenseView:
    """The dense tensor behind a strided one. ``shape`` and ``stride`` are those of the view that is passed.

    ``axes[d]`` is the tensor's dimension that dimension ``d`` of the view runs over; ``strides`` is set, and ``axes`` unused,
    for a flat view, whose only index is the sum of index times stride.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    axes: tuple[int, ...]
    strides: tuple[int, ...] | None
    is_whole: bool

    def index(self, indices: Sequence[Any]) -> list[Any]:
        """Indices into the view for indices into the tensor."""
        if self.strides is None:
            return [indices[a] for a in self.axes]
        return [sum((i * s for i, s in zip(indices, self.strides, strict=True) if s != 0), 0)]


def dense_view(spec: TensorSpec) -> DenseView:
    """The view to pass for a tensor of ``spec``; a contiguous tensor is passed as it is (``is_whole``)."""
    if spec.is_contiguous:
        return DenseView(spec.shape, spec.stride, tuple(range(len(spec.shape))), None, is_whole=True)
    axes = dense_order(spec)
    shape = tuple(spec.shape[a] for a in axes)
    stride = tuple(spec.stride[a] for a in axes)
    if TensorSpec(spec.dtype, shape, stride).is_contiguous:
        return DenseView(shape, stride, axes, None, is_whole=False)
    strides = tuple(0 if n == 1 else s for n, s in zip(spec.shape, spec.stride, strict=True))
    return DenseView((span(spec),), (1,), (), strides, is_whole=False)


def dense_order(spec: TensorSpec) -> tuple[int, ...]:
    """The dimensions that move in memory, slowest first."""
    moving = [d for d in range(len(spec.shape)) if spec.stride[d] != 0 and spec.shape[d] != 1]
    return tuple(sorted(moving, key=lambda d: -spec.stride[d]))


def stored_axes(spec: TensorSpec) -> tuple[int, ...] | None:
    """How a result is stored: ``None`` in its own shape, else its dimensions in memory order."""
    return None if spec.is_contiguous else dense_order(spec)


def span(spec: TensorSpec) -> int:
    """Elements from the first to the last that the tensor touches."""
    return 1 + sum((n - 1) * s for n, s in zip(spec.shape, spec.stride, strict=True))


def is_permuted_dense(spec: TensorSpec) -> bool:
    """Whether every element has its own place and there are no gaps: what a fresh output looks like."""
    return span(spec) == spec.numel and math.prod(spec.shape[d] for d in dense_order(spec)) == spec.numel


def fits(spec: TensorSpec) -> bool:
    """Whether the tensor is non-empty and can be indexed with 32 bits."""
    return 0 < spec.numel <= _MAX_ELEMENTS and 0 < span(spec) <= _MAX_ELEMENTS
