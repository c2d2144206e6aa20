"""Operators that look elements up: embedding and negative log-likelihood."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raftune.dialects.tvm.lowering.registry import argument, lowers
from raftune.workload import In, Operator, Workload

if TYPE_CHECKING:
    from raftune.dialects.tvm.lowering.builder import Builder, Expr, Tensor

_MEAN, _SUM = 1, 2


@lowers("aten.embedding.default")
def embedding(
    b: Builder,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    del padding_idx, scale_grad_by_freq, sparse  # these only matter for the gradient
    columns = b.broadcast(weight)[1]
    return b.compute((*b.broadcast(indices), columns), lambda *i: weight(b.index(indices(*i[:-1])), i[-1]))


def _plain_batch(workload: Workload, operator: Operator) -> bool:
    """A row of class scores for each target, without class weights; the scores may be another operator's."""
    target_at, weight_at = _TARGET_AND_WEIGHT[operator.op]
    target = operator.args[target_at]
    return (
        argument(operator, weight_at, "weight") is None
        and isinstance(target, In)
        and len(workload.inputs[target.index].shape) == 1
    )


_TARGET_AND_WEIGHT = {"aten.nll_loss_forward.default": (1, 2), "aten.nll_loss_backward.default": (2, 3)}


def _counted(b: Builder, target: Tensor, ignore_index: int, dtype: str) -> Tensor:
    """How many targets are not to be ignored, as a float."""
    return b.reduce(
        target,
        [0],
        lambda i: b.select(target(i) == b.like(ignore_index, target(i)), b.constant(0, dtype), b.constant(1, dtype)),
    )


@lowers("aten.nll_loss_forward.default", check=_plain_batch)
def nll_loss(
    b: Builder, scores: Tensor, target: Tensor, weight: None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    del weight
    dtype = b.dtype(scores)
    zero = b.constant(0, dtype)

    def loss(i: Expr) -> Expr:
        ignored = target(i) == b.like(ignore_index, target(i))
        return b.guarded(ignored, zero, -scores(i, b.index(target(i))))

    count = _counted(b, target, ignore_index, dtype)
    if reduction not in (_MEAN, _SUM):
        return b.compute(b.broadcast(target), loss), b.compute((), lambda: zero)
    total = b.reduce(target, [0], loss)
    return (b.pointwise(lambda s, n: s / n, total, count) if reduction == _MEAN else total), count


@lowers("aten.nll_loss_backward.default", check=_plain_batch)
def nll_loss_backward(
    b: Builder,
    grad_output: Tensor,
    scores: Tensor,
    target: Tensor,
    weight: None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    del weight
    zero = b.constant(0, b.dtype(scores))

    def element(i: Expr, j: Expr) -> Expr:
        grad = b.at(grad_output, (i,))
        if reduction == _MEAN:
            grad = grad / total_weight()
        label = target(i)
        hit = b.both(label != b.like(ignore_index, label), b.index(label) == j)
        return b.select(hit, -grad, zero)

    return b.compute(b.broadcast(scores), element)
