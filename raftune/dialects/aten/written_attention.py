"""Attention that a model writes out (products, scale, mask, softmax), given to PyTorch's fused operator."""

from __future__ import annotations

import math
from dataclasses import dataclass

from raftune.dialects.base import BuildError, Kernel
from raftune.dialects.calls import FLOATS, check_keys, choice, conform
from raftune.dialects.chains import RESHAPES, SCALES, Chains, Shape, factor_of
from raftune.pattern import ANY, NUMBER, Either, Op, Pattern, either, op
from raftune.workload import Arg, Config, In, Operator, Out, Workload

_PRODUCT, _COPY = "aten.bmm.default", "aten.clone.default"


def _copied(value: Op | None = None) -> Either:
    """A value, or the copy that tracing makes of one whose dimensions cannot be merged."""
    return either(op(_COPY)(value or ANY), value or ANY)


def _pattern() -> Pattern:
    scores = op(_PRODUCT)(_copied(), _copied())
    scaled = either(op(*SCALES)(scores, NUMBER), scores)
    masked = either(op("aten.add.Tensor", commutative=True)(scaled, ANY), scaled)
    weights = op("aten._softmax.default")(masked)
    return Pattern(op(_PRODUCT)(_copied(weights), _copied()))


PATTERNS = (_pattern(),)


def configs(workload: Workload) -> list[Config]:
    return [{"formulation": "sdpa"}] if _Written.of(workload) else []


def build(workload: Workload, config: Config) -> Kernel:
    import torch

    check_keys(config, ("formulation",))
    name = choice(config, "formulation", ("sdpa",))
    found = _Written.of(workload)
    if found is None:
        raise BuildError(f"config formulation={name!r} is for attention that is written out, not {workload.op}")
    attend, fix = torch.nn.functional.scaled_dot_product_attention, conform(workload.results[0])
    lead, result, scale = found.heads(), workload.results[0].shape, found.scale
    query, key, value = found.query, found.key, found.value
    shapes = [(*lead, *workload.inputs[i].shape[-2:]) for i in (query, key, value)]
    if found.mask is None:
        return lambda *inputs: fix(
            attend(
                inputs[query].reshape(shapes[0]),
                inputs[key].reshape(shapes[1]).mT,
                inputs[value].reshape(shapes[2]),
                scale=scale,
            ).reshape(result)
        )
    mask, mask_shape = found.mask, found.mask_shape()
    return lambda *inputs: fix(
        attend(
            inputs[query].reshape(shapes[0]),
            inputs[key].reshape(shapes[1]).mT,
            inputs[value].reshape(shapes[2]),
            attn_mask=inputs[mask].reshape(mask_shape),
            scale=scale,
        ).reshape(result)
    )


@dataclass(frozen=True, slots=True)
class _Written:
    """``softmax(scale * query @ key + mask) @ value``: input numbers, ``key`` as the right matrix of the product.

    ``lead`` are the dimensions of the scores before rows and columns: heads, or batch entries and heads.
    """

    workload: Workload
    query: int
    key: int
    value: int
    mask: int | None
    scale: float
    lead: Shape

    @staticmethod
    def of(workload: Workload) -> _Written | None:
        """``None`` unless the region is this and nothing else, over rows of floats, and only its last result is needed."""
        if any(s.dtype not in FLOATS or s.dtype != workload.inputs[0].dtype or not s.numel for s in workload.inputs):
            return None
        return _Reader(workload).written()

    def heads(self) -> Shape:
        """The two dimensions before rows and columns that the fused operator is given.

        Its result lies in memory as (batch, rows, heads, columns). With all heads as batch entries that is PyTorch's order.
        """
        merged = self.mask is None and all(len(self.workload.inputs[i].shape) == 3 for i in (self.query, self.key, self.value))
        return (math.prod(self.lead), 1) if merged or len(self.lead) == 1 else self.lead

    def mask_shape(self) -> Shape:
        assert self.mask is not None
        shape = self.workload.inputs[self.mask].shape
        if len(shape) == 3 and len(self.lead) == 1:
            return (shape[0], 1, *shape[1:])
        return (1,) * (4 - len(shape)) + shape


class _Reader:
    """Walks back from the last product of a region to its inputs."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.chains = Chains(workload)
        self.calls = sum(o.op not in RESHAPES for o in workload.operators)

    def written(self) -> _Written | None:
        last = len(self.workload.operators) - 1
        if self.workload.outputs != (Out(last, 0),):
            return None
        attended = self._call(Out(last, 0), _PRODUCT)
        weights = None if attended is None else self._call(self._uncopied(attended.args[0]), "aten._softmax.default")
        if attended is None or weights is None:
            return None
        scores = weights.args[0]
        shape = self.chains.shape(scores)
        if (
            shape is None
            or len(shape) not in (3, 4)
            or weights.args[1] not in (-1, len(shape) - 1)
            or weights.args[2:] != (False,)
        ):
            return None
        mask, scores = self._mask(scores, shape)
        scale = 1.0
        scaling = self.chains.operator(self.chains.behind(scores))
        if scaling is not None and (factor := factor_of(scaling)) is not None:
            scale, scores = factor, scaling.args[0]
            self.calls -= 1
        product = self._call(scores, _PRODUCT)
        matrices = (self.chains.shape(self.chains.behind(scores)), self.chains.shape(attended.args[0]))
        if product is None or any(matrix is None or matrix[-2:] != shape[-2:] for matrix in matrices):
            return None
        operands = [self._input(arg) for arg in (*product.args, attended.args[1])]
        if self.calls or None in operands:
            return None
        query, key, value = (i for i in operands if i is not None)
        return _Written(self.workload, query, key, value, mask, scale, shape[:-2])

    def _call(self, value: Arg, name: str) -> Operator | None:
        call = self.chains.operator(self.chains.behind(value))
        if call is None or call.op != name:
            return None
        self.calls -= 1
        return call

    def _uncopied(self, value: Arg) -> Arg:
        """``value`` before the copy made of it, which changes no element's place in row-major order."""
        call = self.chains.operator(self.chains.behind(value))
        if call is None or call.op != _COPY:
            return value
        self.calls -= 1
        return self.chains.behind(call.args[0])

    def _mask(self, value: Arg, shape: Shape) -> tuple[int | None, Arg]:
        """The input that is added to the scores, and the scores before."""
        call = self.chains.operator(self.chains.behind(value))
        if call is None or call.op != "aten.add.Tensor" or call.kwargs:
            return None, value
        for mask, scores in (call.args, call.args[::-1]):
            if isinstance(mask, In) and not isinstance(scores, In):
                spec = self.workload.inputs[mask.index]
                if len(spec.shape) <= len(shape) and self.chains.shape(scores) == shape:
                    self.calls -= 1
                    return mask.index, scores
        return None, value

    def _input(self, value: Arg) -> int | None:
        """The input behind an operand whose leading dimensions were merged, with its matrices as they are."""
        found = self.chains.behind(self._uncopied(value))
        before, after = self.chains.shape(found), self.chains.shape(value)
        if not isinstance(found, In) or before is None or after is None or before[-2:] != after[-2:]:
            return None
        return found.index
