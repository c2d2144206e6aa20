"""Scaled dot-product attention as its formula, forward and backward, instead of the blocked ("flash") CPU kernel.

The blocked kernel saves memory; where the scores of all heads fit into the caches, plain batched products are faster.
The backward is that of Dao et al., arXiv 2205.14135, appendix B, with the scores kept whole.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from raftune.dialects.base import BuildError, Kernel
from raftune.dialects.calls import FLOATS, Call, check_keys, choice, conform_all, select_outputs
from raftune.workload import Config, In, Workload

if TYPE_CHECKING:
    from torch import Tensor

FORWARD = "aten._scaled_dot_product_flash_attention_for_cpu.default"
BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"

# All heads and batch entries at once, or one batch entry after the other: its scores are a smaller working set.
_NAMES = ("math", "math_by_entry")


def configs(workload: Workload) -> list[Config]:
    return [{"formulation": name} for name in _NAMES] if applies(workload) else []


def build(workload: Workload, config: Config) -> Kernel:
    check_keys(config, ("formulation",))
    name = choice(config, "formulation", _NAMES)
    call = Call.of(workload)
    if call is None or not applies(workload):
        raise BuildError(f"config formulation={name!r} is for attention without dropout, not {workload.op}")
    return _Attention(call, one_by_one=name == "math_by_entry").kernel()


def applies(workload: Workload) -> bool:
    """Attention without dropout whose query, key and value have the same heads."""
    call = Call.of(workload)
    if call is None or call.op not in (FORWARD, BACKWARD):
        return False
    first = 0 if call.op == FORWARD else 1
    query, key, value = (workload.inputs[i] for i in (call.tensor(first + n, "") for n in range(3)) if i is not None)
    dropout = call.number(3 if first == 0 else 6, "dropout_p", 0.0)
    mask = call.arg(len(call.operator.args), "attn_mask")
    return (
        query.dtype in FLOATS
        and dropout == 0
        and query.numel > 0
        and key.numel > 0
        and query.shape[:2] == key.shape[:2] == value.shape[:2]
        and (mask is None or isinstance(mask, In))
    )


class _Attention:
    """One attention call; products and softmax over all heads at once, or over one batch entry after the other."""

    def __init__(self, call: Call, *, one_by_one: bool) -> None:
        self.call = call
        self.one_by_one = one_by_one
        self.first = 0 if call.op == FORWARD else 1
        self.causal = call.flag(self.first + 4 if self.first == 0 else 7, "is_causal")
        mask = call.arg(len(call.operator.args), "attn_mask")
        self.mask_at = mask.index if isinstance(mask, In) else None
        self.boolean_mask = self.mask_at is not None and call.workload.inputs[self.mask_at].dtype == "bool"
        at = call.tensor(self.first, "query")
        assert at is not None
        query = call.workload.inputs[at]
        scale = call.arg(len(call.operator.args), "scale")
        self.scale = float(scale) if isinstance(scale, int | float) else 1 / math.sqrt(query.shape[-1])
        self.low_precision = query.dtype in ("bfloat16", "float16")
        self.batch = query.shape[0]
        self.normalizer_used = any(out.index == 1 for out in call.workload.outputs)

    def kernel(self) -> Kernel:
        import torch

        one = self.forward if self.first == 0 else self.backward
        count = 3 if self.first == 0 else 6
        places = [self.call.tensor(i, "") for i in range(count)]
        indices = [i for i in places if i is not None]
        mask_at, batch = self.mask_at, self.batch

        def whole(*inputs: Tensor) -> tuple[Tensor, ...]:
            return one(*[inputs[i] for i in indices], mask=None if mask_at is None else inputs[mask_at])

        def by_entry(*inputs: Tensor) -> tuple[Tensor, ...]:
            tensors = [inputs[i] for i in indices]
            mask = None if mask_at is None else inputs[mask_at]
            masks = [mask] * batch if mask is None or mask.dim() < 4 or mask.shape[0] == 1 else torch.split(mask, 1)
            parts = [one(*[t[n : n + 1] for t in tensors], mask=masks[n]) for n in range(batch)]
            return tuple(torch.cat(results) for results in zip(*parts, strict=True))

        return conform_all(self.call.workload, select_outputs(self.call.workload, by_entry if self.one_by_one else whole))

    def scores(self, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        """``(batch, heads, queries, keys)``, in float32 at least."""
        import torch

        scores = torch.matmul(query * self.scale, key.mT)
        if self.low_precision:
            scores = scores.float()
        if self.causal:
            scores.add_(torch.full(scores.shape[-2:], -math.inf, dtype=scores.dtype).triu_(1))
        if mask is not None:
            scores = scores.masked_fill_(~mask, -math.inf) if self.boolean_mask else scores.add_(mask)
        return scores

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None) -> tuple[Tensor, ...]:
        import torch

        scores = self.scores(query, key, mask)
        weights = torch.softmax(scores, -1)
        # The softmax of a row's largest score is one over the sum of exponentials, relative to that score.
        normalizer = scores.amax(-1).sub_(weights.amax(-1).log_()) if self.normalizer_used else scores.new_empty(1)
        return torch.matmul(weights.to(value.dtype), value), normalizer

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, normalizer: Tensor, *, mask: Tensor | None
    ) -> tuple[Tensor, ...]:
        import torch

        weights = self.scores(query, key, mask).sub_(normalizer.unsqueeze(-1)).exp_()
        rows = (grad * out).sum(-1, keepdim=True)
        low = weights.to(value.dtype)
        grad_value = torch.matmul(low.mT, grad)
        grad_scores = torch.matmul(grad, value.mT).sub_(rows).mul_(low).mul_(self.scale)
        return torch.matmul(grad_scores, key), torch.matmul(grad_scores.mT, query), grad_value
