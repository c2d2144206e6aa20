"""Workloads that are one matrix product, in one form for every dialect that offers its own. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raftune.dialects.calls import FLOATS, Call
from raftune.workload import TensorSpec, Workload

if TYPE_CHECKING:
    from torch import Tensor

# Operator -> position of the bias, of the first matrix, whether batched.
_OPS: dict[str, tuple[int | None, int, bool]] = {
    "aten.mm.default": (None, 0, False),
    "aten.bmm.default": (None, 0, True),
    "aten.addmm.default": (0, 1, False),
    "aten.baddbmm.default": (0, 1, True),
}


@dataclass(frozen=True, slots=True)
class Product:
    """``alpha * (a @ b) + beta * bias``: input numbers of the three, and sizes; ``batch`` is ``None`` for plain matrices."""

    workload: Workload
    a: int
    b: int
    bias: int | None
    alpha: float
    beta: float
    batch: int | None
    m: int
    n: int
    k: int

    @staticmethod
    def of(workload: Workload) -> Product | None:
        """``None`` unless the workload is one floating-point product of which every matrix is an input and none is empty."""
        call = Call.of(workload)
        if call is None or call.op not in _OPS or len(workload.outputs) != 1:
            return None
        bias_at, first, batched = _OPS[call.op]
        a, b = call.tensor(first, ""), call.tensor(first + 1, "")
        bias = None if bias_at is None else call.tensor(bias_at, "")
        if a is None or b is None or (bias_at is not None and bias is None):
            return None
        left, right = workload.inputs[a], workload.inputs[b]
        if left.dtype not in FLOATS or not left.numel or not right.numel:
            return None
        return Product(
            workload=workload,
            a=a,
            b=b,
            bias=bias,
            alpha=call.number(4, "alpha", 1),
            beta=call.number(3, "beta", 1),
            batch=left.shape[0] if batched else None,
            m=left.shape[-2],
            n=right.shape[-1],
            k=left.shape[-1],
        )

    @property
    def left(self) -> TensorSpec:
        return self.workload.inputs[self.a]

    @property
    def right(self) -> TensorSpec:
        return self.workload.inputs[self.b]

    @property
    def result(self) -> TensorSpec:
        return self.workload.results[0]

    @property
    def size(self) -> int:
        """Multiply-adds."""
        return self.m * self.n * self.k * (self.batch or 1)


def layouts(spec: TensorSpec) -> tuple[str, ...]:
    """Orders of the last two dimensions that a kernel could be given, the present one first.

    ``("row",)`` alone if row and column order are the same memory; both if the tensor is neither, and has to be copied anyway.
    """
    (rows, columns), (row_stride, column_stride) = spec.shape[-2:], spec.stride[-2:]
    row = (columns == 1 or column_stride == 1) and (rows == 1 or row_stride >= max(1, columns))
    column = (rows == 1 or row_stride == 1) and (columns == 1 or column_stride >= max(1, rows))
    if row and column:
        return ("row",)
    return ("column", "row") if column else ("row", "column")


def relayout(spec: TensorSpec, layout: str) -> Callable[[Tensor], Tensor] | None:
    """A function that brings a tensor of ``spec`` into ``layout``; ``None`` if nothing has to be done."""
    present = _present(spec)
    if layout in present:
        return None
    if layout == "row":
        return lambda t: t.contiguous()
    return lambda t: t.mT.contiguous().mT


def _present(spec: TensorSpec) -> Sequence[str]:
    (rows, columns), (row_stride, column_stride) = spec.shape[-2:], spec.stride[-2:]
    row = (columns == 1 or column_stride == 1) and (rows == 1 or row_stride >= max(1, columns))
    column = (rows == 1 or row_stride == 1) and (columns == 1 or column_stride >= max(1, rows))
    return [name for name, holds in (("row", row), ("column", column)) if holds]


def add_bias(product: Product, multiply: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """A kernel for the workload from ``multiply``, which returns a fresh product: scale it and add the bias in place."""
    a, b, bias, alpha, beta = product.a, product.b, product.bias, product.alpha, product.beta
    if bias is None:
        return (
            multiply
            if (a, b) == (0, 1) and len(product.workload.inputs) == 2
            else (lambda *inputs: multiply(inputs[a], inputs[b]))
        )
    if alpha == 1 and beta == 1:
        return lambda *inputs: multiply(inputs[a], inputs[b]).add_(inputs[bias])

    def kernel(*inputs: Tensor) -> Tensor:
        out = multiply(inputs[a], inputs[b])
        if alpha != 1:
            out.mul_(alpha)
        return out if beta == 0 else out.add_(inputs[bias], alpha=beta)

    return kernel
