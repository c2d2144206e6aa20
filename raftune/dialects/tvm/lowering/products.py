"""Matrix products: ``mm``, ``bmm`` and their forms with an addend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raftune.dialects.tvm.lowering.registry import lowers

if TYPE_CHECKING:
    from raftune.dialects.tvm.lowering.builder import Builder, Scalar, Tensor


@lowers("aten.mm.default", "aten.bmm.default")
def product(b: Builder, left: Tensor, right: Tensor) -> Tensor:
    return b.matmul(left, right)


@lowers("aten.addmm.default", "aten.baddbmm.default")
def product_with_addend(
    b: Builder, addend: Tensor, left: Tensor, right: Tensor, *, beta: Scalar = 1, alpha: Scalar = 1
) -> Tensor:
    def combine(value: Any, bias: Any) -> Any:
        if alpha != 1:
            value = value * alpha
        if beta == 0:
            return value
        return value + (bias if beta == 1 else bias * beta)

    return b.pointwise(combine, b.matmul(left, right), addend)
