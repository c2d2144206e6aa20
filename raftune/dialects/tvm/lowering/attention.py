"""Scaled dot-product attention without dropout, forward and backward, with the scores of all heads kept whole.

The backward is that of Dao et al., arXiv 2205.14135, appendix B.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from raftune.dialects.tvm.lowering.registry import Check, argument, lowers
from raftune.dialects.tvm.lowering.views import transpose
from raftune.workload import In, Operator, Workload

if TYPE_CHECKING:
    from raftune.dialects.tvm.lowering.builder import Builder, Expr, Tensor

# Elements of the scores: more than this is beyond the caches, which is what blocked attention is made for.
_MOST_SCORES = 1 << 24
# Below any score of finite inputs, and far enough from the end of float32 for a difference.
_MASKED = -1e30


def _plain(first: int, dropout_at: int) -> Check:
    """A check for calls whose query is argument ``first``: the same heads everywhere, no dropout, a mask that is added."""

    def check(workload: Workload, operator: Operator) -> bool:
        arguments = operator.args[first : first + 3]
        if not all(isinstance(a, In) for a in arguments):
            return False
        query, key, value = (workload.inputs[a.index] for a in arguments if isinstance(a, In))
        mask = argument(operator, len(operator.args), "attn_mask")
        return (
            len(query.shape) == 4
            and query.shape == key.shape == value.shape
            and query.dtype in ("float32", "float64")
            and math.prod(query.shape[:3]) * query.shape[2] <= _MOST_SCORES
            and argument(operator, dropout_at, "dropout_p", 0.0) == 0
            and (mask is None or (isinstance(mask, In) and workload.inputs[mask.index].dtype == query.dtype))
        )

    return check


@lowers("aten._scaled_dot_product_flash_attention_for_cpu.default", check=_plain(0, 3))
def attention(
    b: Builder,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    del dropout_p
    product = b.matmul(query, transpose(b, key, -2, -1))
    score = _score(b, product, query, attn_mask, scale)
    scores = b.compute(b.broadcast(product), lambda *i: _visible(b, is_causal, i, score(*i), _MASKED), "keep")
    largest = b.reduce(scores, [3], op="max")
    powers = b.compute(
        b.broadcast(scores),
        lambda *i: _visible(b, is_causal, i, b.exp(scores(*i) - largest(*i[:3])), 0.0),
        "keep",
    )
    total = b.reduce(powers, [3])
    weighted = b.matmul(powers, value)

    def seen(total: Expr, value: Expr) -> Expr:
        """Zero, as PyTorch has it, for a row of which a mask leaves nothing."""
        return value if attn_mask is None else b.select(total > b.like(0, total), value, b.like(0, total))

    # What is read first is computed first: the sum belongs beside the exponentials.
    out = b.compute(
        b.broadcast(weighted),
        lambda *i: seen(total(*i[:3]), b.like(1, total(*i[:3])) / total(*i[:3])) * weighted(*i),
        "keep",
    )
    return out, b.pointwise(lambda s, m: seen(s, b.log(s) + m), total, largest)


@lowers("aten._scaled_dot_product_flash_attention_for_cpu_backward.default", check=_plain(1, 6))
def attention_backward(
    b: Builder,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    normalizer: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    del dropout_p
    rows = b.reduce(grad, [3], lambda *i: grad(*i) * out(*i))
    scores = b.matmul(query, transpose(b, key, -2, -1))
    score = _score(b, scores, query, attn_mask, scale)
    weights = b.compute(
        b.broadcast(scores),
        lambda *i: _visible(b, is_causal, i, b.exp(score(*i) - normalizer(*i[:3])), 0.0),
        "keep",
    )
    factor = _factor(b, query, scale)
    product = b.matmul(grad, transpose(b, value, -2, -1))
    grad_scores = b.compute(
        b.broadcast(scores), lambda *i: (product(*i) - rows(*i[:3])) * weights(*i) * b.like(factor, product(*i)), "keep"
    )
    pairs = ((grad_scores, key), (transpose(b, grad_scores, -2, -1), query), (transpose(b, weights, -2, -1), grad))
    grad_query, grad_key, grad_value = (_kept(b, b.matmul(left, right)) for left, right in pairs)
    return grad_query, grad_key, grad_value


def _score(b: Builder, product: Tensor, query: Tensor, mask: Tensor | None, scale: float | None) -> Callable[..., Expr]:
    """The scaled product at given indices, with the mask added."""
    factor = _factor(b, query, scale)

    def score(*i: Expr) -> Expr:
        scaled = product(*i) * b.like(factor, product(*i))
        return scaled if mask is None else scaled + b.at(mask, i)

    return score


def _visible(b: Builder, is_causal: bool, i: tuple[Expr, ...], value: Expr, otherwise: float) -> Expr:
    return b.select(i[3] <= i[2], value, b.like(otherwise, value)) if is_causal else value


def _factor(b: Builder, query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(b.broadcast(query)[3]) if scale is None else scale


def _kept(b: Builder, x: Tensor) -> Tensor:
    """A product in its own loop order, whatever order its reader wants."""
    return b.compute(b.broadcast(x), x, "keep")
