"""Workloads that are one convolution or its backward, in one form for every dialect that offers its own. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raftune.dialects.base import Kernel
from raftune.dialects.calls import FLOATS, Call, conform_all, select_outputs
from raftune.workload import TensorSpec, Workload

if TYPE_CHECKING:
    from torch import Tensor

LAYOUTS = ("contiguous", "channels_last")

Gradient = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]
"""Of grad_output, input, weight."""


@dataclass(frozen=True, slots=True)
class Convolution:
    """``aten.convolution`` (``grad_output`` is ``None``) or ``aten.convolution_backward``; tensors are input numbers.

    ``mask`` says for which of input, weight and bias the backward's gradient is used.
    """

    workload: Workload
    input: int
    weight: int
    bias: int | None
    grad_output: int | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    transposed: bool
    output_padding: tuple[int, ...]
    groups: int
    mask: tuple[bool, bool, bool]

    @staticmethod
    def of(workload: Workload) -> Convolution | None:
        """``None`` unless the workload is one floating-point convolution, or its backward, of tensors that are not empty."""
        call = Call.of(workload)
        if call is None or call.op not in ("aten.convolution.default", "aten.convolution_backward.default"):
            return None
        backward = call.op == "aten.convolution_backward.default"
        at = 1 if backward else 0
        input_at, weight_at = call.tensor(at, ""), call.tensor(at + 1, "")
        if input_at is None or weight_at is None:
            return None
        specs = workload.inputs
        if any(s.dtype not in FLOATS or not s.numel for s in specs) or len(specs[input_at].shape) != len(
            specs[weight_at].shape
        ):
            return None
        used = {out.index for out in workload.outputs}
        rank = len(specs[input_at].shape) - 2

        def sizes(position: int) -> tuple[int, ...]:
            values = call.ints(position, "")
            return values * rank if len(values) == 1 else values

        return Convolution(
            workload=workload,
            input=input_at,
            weight=weight_at,
            bias=None if backward else call.tensor(2, ""),
            grad_output=call.tensor(0, "") if backward else None,
            stride=sizes(at + 3),
            padding=sizes(at + 4),
            dilation=sizes(at + 5),
            transposed=call.flag(at + 6, ""),
            output_padding=sizes(at + 7),
            groups=call.ints(at + 8, "")[0],
            mask=(backward and 0 in used, backward and 1 in used, backward and 2 in used),
        )

    @property
    def x(self) -> TensorSpec:
        return self.workload.inputs[self.input]

    @property
    def w(self) -> TensorSpec:
        return self.workload.inputs[self.weight]

    @property
    def is_backward(self) -> bool:
        return self.grad_output is not None

    @property
    def rank(self) -> int:
        """Spatial dimensions."""
        return len(self.x.shape) - 2

    @property
    def kernel(self) -> tuple[int, ...]:
        return self.w.shape[2:]

    @property
    def is_pointwise(self) -> bool:
        """A 1x1 convolution that reads every element once: a matrix product over the channels."""
        return (
            not self.transposed
            and self.groups == 1
            and all(n == 1 for n in (*self.kernel, *self.stride))
            and not any(self.padding)
        )

    @property
    def is_depthwise(self) -> bool:
        return not self.transposed and self.groups == self.x.shape[1] == self.w.shape[0] and self.groups > 1

    @property
    def is_plain(self) -> bool:
        return not self.transposed and self.groups == 1

    @property
    def layout(self) -> str:
        """The memory format in which PyTorch computes."""
        return "channels_last" if is_channels_last(self.x) or is_channels_last(self.w) else "contiguous"

    @property
    def other_layout(self) -> str:
        return LAYOUTS[1 - LAYOUTS.index(self.layout)]

    @property
    def output_spatial(self) -> tuple[int, ...]:
        """Spatial sizes of the result of the forward, for one that is not transposed."""
        sizes = zip(self.x.shape[2:], self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes)

    @property
    def input_output_padding(self) -> tuple[int, ...]:
        """The ``output_padding`` with which the transposed convolution of the gradient has the input's size."""
        sizes = zip(self.x.shape[2:], self.output_spatial, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple(n - ((o - 1) * s - 2 * p + d * (k - 1) + 1) for n, o, k, s, p, d in sizes)

    @property
    def size(self) -> int:
        """Multiply-adds of one pass."""
        return self.x.shape[0] * math.prod(self.output_spatial) * self.w.numel


def is_channels_last(spec: TensorSpec) -> bool:
    """Whether a tensor of rank 4 (5) has its channels innermost, and would not also count as contiguous."""
    if len(spec.shape) not in (4, 5) or spec.is_contiguous:
        return False
    expected = 1
    for dim in (1, *range(len(spec.shape) - 1, 1, -1), 0):
        if spec.shape[dim] != 1 and spec.stride[dim] != expected:
            return False
        expected *= spec.shape[dim]
    return True


def memory_format(rank: int, layout: str) -> Any:
    """torch's memory format for ``rank`` spatial dimensions."""
    import torch

    if layout == "contiguous":
        return torch.contiguous_format
    return torch.channels_last if rank == 2 else torch.channels_last_3d


def to_layout(rank: int, layout: str) -> Callable[[Tensor], Tensor]:
    wanted = memory_format(rank, layout)
    return lambda tensor: tensor.contiguous(memory_format=wanted)


def gradients(convolution: Convolution, of_input: Gradient | None, of_weight: Gradient | None) -> Kernel:
    """A kernel for a backward from its parts, called for those gradients that are used; the bias's is a sum."""
    go_at, x_at, w_at = convolution.grad_output, convolution.input, convolution.weight
    assert go_at is not None
    summed = [0, *range(2, convolution.rank + 2)]
    with_input, with_weight, with_bias = convolution.mask

    def results(*inputs: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        go, x, w = inputs[go_at], inputs[x_at], inputs[w_at]
        return (
            of_input(go, x, w) if with_input and of_input else None,
            of_weight(go, x, w) if with_weight and of_weight else None,
            go.sum(summed) if with_bias else None,
        )

    return conform_all(convolution.workload, select_outputs(convolution.workload, results))
