"""Tensor expressions with PyTorch's rules (broadcasting, type promotion): what lowering rules are written in.

A builder has a *style*. The plain one says only what is computed and leaves every decision to a schedule search. The vector
one lays reductions and products out for vector units, and labels its stages so that the hand schedule can find them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tvm import te, tirx

from raftune.dialects.base import BuildError
from raftune.dialects.torch_ops import dtype_of
from raftune.dialects.tvm.lowering import vector_math
from raftune.dialects.tvm.lowering.contraction import Contraction, Factor, Tiling, contract
from raftune.dialects.tvm.schedule.config import MatmulTiling

Tensor = Any  # te.Tensor
Expr = Any  # tirx.PrimExpr
Scalar = bool | int | float
Operand = Any  # a tensor or a Python number

_TERM_LIMIT = 16


@dataclass(frozen=True, slots=True)
class Stage:
    """One block of the function: its name, what it does, and how many of its leading loops run over rows.

    ``kind`` is ``map`` (element-wise or indexing), ``keep`` (element-wise, too dear to compute twice), ``frame`` (a copy with
    zeros around), ``lanes`` (reduction
    whose last spatial loop is one vector), ``fold`` (sum of those lanes), ``reduce`` (any other reduction), or the three parts
    of a tiled product: ``pack``, ``tile``, ``untile``. ``tiling`` and ``contraction`` are those of a ``tile``.
    """

    name: str
    kind: str
    tensor: Tensor
    tiling: MatmulTiling | None = None
    contraction: Contraction | None = None


@dataclass
class Builder:
    """Builds TE stages. ``lanes``: vector width in float32 elements, 0 for the plain style.

    ``tiling`` says how a product of so many rows and columns is tiled; without it a product is a plain reduction.
    ``columns`` says which of a convolution's axes is in vectors, ``channels`` or ``pixels``; by default what suits its size.
    """

    lanes: int = 0
    tiling: Tiling | None = None
    columns: str | None = None
    stages: list[Stage] = field(default_factory=list)

    def compute(
        self,
        shape: Sequence[int],
        fcompute: Callable[..., Expr],
        kind: str = "map",
        tiling: MatmulTiling | None = None,
        contraction: Contraction | None = None,
    ) -> Tensor:
        """A stage of ``shape`` whose element at the given indices is ``fcompute(*indices)``."""
        name = f"{kind}_{len(self.stages)}"
        tensor = te.compute(tuple(shape), fcompute, name=name)
        self.stages.append(Stage(name, kind, tensor, tiling, contraction))
        return tensor

    def pointwise(
        self,
        function: Callable[..., Expr],
        *operands: Operand,
        floating: bool = False,
        dtype: str | None = None,
        kind: str = "map",
    ) -> Tensor:
        """``function`` over broadcast operands, which it gets converted to their common type.

        ``floating`` computes integers as float32 (as ``exp`` does); ``dtype`` converts the result.
        """
        common = self.result_type(*operands)
        if floating and not is_float(common):
            common = "float32"
        shape = self.broadcast(*operands)

        def element(*indices: Expr) -> Expr:
            value = function(*(self.at(operand, indices, common) for operand in operands))
            return self.cast(value, dtype) if dtype else value

        return self.compute(shape, element, kind)

    def at(self, operand: Operand, indices: Sequence[Expr], dtype: str | None = None) -> Expr:
        """The element of an operand that meets ``indices`` under broadcasting, converted to ``dtype``."""
        if not isinstance(operand, te.Tensor):
            return constant(operand, dtype or scalar_type(operand))
        shape = shape_of(operand)
        own = indices[len(indices) - len(shape) :]
        value = operand(*(0 if n == 1 else i for n, i in zip(shape, own, strict=True)))
        return self.cast(value, dtype) if dtype else value

    def cast(self, value: Expr, dtype: str) -> Expr:
        if dtype_name(value) == dtype:
            return value
        if dtype == "bool":
            return value != constant(0, dtype_name(value))
        return value.astype(dtype)

    def result_type(self, *operands: Operand) -> str:
        """PyTorch's common type of tensors and Python numbers."""
        stand_ins = [
            torch.empty((1,) * len(o.shape), dtype=dtype_of(dtype_name(o))) if isinstance(o, te.Tensor) else o for o in operands
        ]
        # The operand of the highest rank first: lower kinds (0-d tensors, numbers) do not widen what it says.
        first, *others = sorted(stand_ins, key=lambda o: -1 if not isinstance(o, torch.Tensor) else o.dim(), reverse=True)
        for other in others:
            first = torch.empty(first.shape, dtype=torch.result_type(first, other))
        return str(first.dtype).removeprefix("torch.")

    def broadcast(self, *operands: Operand) -> tuple[int, ...]:
        """The common shape of the tensors among the operands."""
        shapes = [shape_of(o) for o in operands if isinstance(o, te.Tensor)]
        return tuple(int(n) for n in torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]

    def sum_type(self, x: Tensor) -> str | None:
        """The type that PyTorch sums ``x`` in, where it is not its own."""
        return None if is_float(dtype_name(x)) else "int64"

    # Reductions.

    def reduce(
        self,
        source: Tensor,
        axes: Sequence[int],
        element: Callable[..., Expr] | None = None,
        *,
        op: str = "sum",
        dtype: str | None = None,
    ) -> Tensor:
        """Sum (or another of the reductions) over ``axes`` of ``element(*indices)``, by default the source's own elements.

        ``max`` and ``min`` are the machine's, which lose NaN; ``amax`` and ``amin`` are PyTorch's. The reduced axes are dropped
        from the shape. ``indices`` run over the source's shape.
        """
        shape = shape_of(source)
        reduced = sorted(a % len(shape) for a in axes)
        kept = [a for a in range(len(shape)) if a not in reduced]
        body: Callable[..., Expr] = element or source
        if dtype is not None:
            inner = body
            body = lambda *indices: self.cast(inner(*indices), dtype)  # noqa: E731
        reducer, combine = _REDUCERS[op]

        def full(spatial: Sequence[Expr], other: Sequence[Expr]) -> list[Expr]:
            indices: list[Expr] = [0] * len(shape)
            for axis, index in zip(kept, spatial, strict=True):
                indices[axis] = index
            for axis, index in zip(reduced, other, strict=True):
                indices[axis] = index
            return indices

        last = len(shape) - 1
        lanes = self._reduction_lanes(shape[last]) if reduced and reduced[-1] == last else 0
        if not lanes:
            if math.prod(shape[a] for a in reduced) == 1:
                return self.compute([shape[a] for a in kept], lambda *s: body(*full(s, [0] * len(reduced))))
            axes_vars = [te.reduce_axis((0, shape[a]), name=f"k{a}") for a in reduced]
            return self.compute(
                [shape[a] for a in kept],
                lambda *s: reducer(body(*full(s, axes_vars)), axis=axes_vars),
                "reduce",
            )
        return self._lane_reduce(shape, reduced, kept, lanes, body, full, reducer, combine)

    def over(
        self, shape: Sequence[int], extents: Sequence[int], element: Callable[[Any, Any], Expr], *, op: str = "sum"
    ) -> Tensor:
        """The reduction, one after another, of ``element(indices of the result, indices within the extents)``."""
        axes = [te.reduce_axis((0, extent), name=f"k{number}") for number, extent in enumerate(extents)]
        reducer, _ = _REDUCERS[op]
        return self.compute(shape, lambda *i: reducer(element(i, axes), axis=axes), "reduce")

    def _reduction_lanes(self, extent: int) -> int:
        """Elements of the last axis that are accumulated side by side; 0 to reduce one after another."""
        if not self.lanes or extent < self.lanes:
            return 0
        return next((n for n in (self.lanes * 4, self.lanes * 2) if extent % n == 0 and extent > n), self.lanes)

    def _lane_reduce(
        self,
        shape: tuple[int, ...],
        reduced: Sequence[int],
        kept: Sequence[int],
        lanes: int,
        body: Callable[..., Expr],
        full: Callable[[Sequence[Expr], Sequence[Expr]], list[Expr]],
        reducer: Callable[..., Expr],
        combine: Callable[[Expr, Expr], Expr],
    ) -> Tensor:
        """Accumulate whole vectors, then combine their lanes as a tree; the rest of the last axis is a second reduction."""
        extent = shape[-1]
        outer = [te.reduce_axis((0, shape[a]), name=f"k{a}") for a in reduced[:-1]]
        blocks = te.reduce_axis((0, extent // lanes), name="ko")
        kept_shape = [shape[a] for a in kept]
        partial = self.compute(
            [*kept_shape, lanes],
            lambda *s: reducer(body(*full(s[:-1], [*outer, blocks * lanes + s[-1]])), axis=[*outer, blocks]),
            "lanes",
        )
        rest = None
        if extent % lanes:
            outer_rest = [te.reduce_axis((0, shape[a]), name=f"k{a}") for a in reduced[:-1]]
            tail = te.reduce_axis((0, extent % lanes), name="kt")
            start = extent // lanes * lanes
            rest = self.compute(
                kept_shape, lambda *s: reducer(body(*full(s, [*outer_rest, start + tail])), axis=[*outer_rest, tail]), "reduce"
            )
        # Halve while a half is still a vector, so that the last tree of scalar terms stays small.
        width = lanes
        while width > _TERM_LIMIT:
            width //= 2
            partial = self._halve(partial, kept_shape, width, combine)

        def total(*s: Expr) -> Expr:
            terms = [partial(*s, lane) for lane in range(width)]
            if rest is not None:
                terms.append(rest(*s))
            return tree(combine, terms)

        return self.compute(kept_shape, total, "fold")

    def _halve(self, wide: Tensor, kept: Sequence[int], half: int, combine: Callable[[Expr, Expr], Expr]) -> Tensor:
        return self.compute([*kept, half], lambda *s: combine(wide(*s), wide(*s[:-1], s[-1] + half)), "fold")

    # Products.

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        """``left[..., m, k] @ right[..., k, n]`` with equal leading dimensions."""
        *batch, m, k = shape_of(left)
        nb = len(batch)
        return self.contract(
            Contraction((*batch, m, shape_of(right)[-1]), (k,), nb, nb + 1, dtype_name(left)),
            lambda i, k: left(*i[: nb + 1], *k),
            lambda i, k: right(*i[:nb], *k, i[nb + 1]),
        )

    def contract(self, contraction: Contraction, left: Factor, right: Factor) -> Tensor:
        """The sum over the contraction's depth of ``left(i, k) * right(i, k)``, for the indices ``i`` of each result.

        ``left`` must not look at the column within its group, ``right`` not at the row nor, if it is ``shared``, at the others.
        """
        return contract(self, contraction, left, right)

    # Scalar functions on expressions; float32 ones are polynomials that vectorize, others are the library's.

    def exp(self, x: Expr) -> Expr:
        return vector_math.exp(x)

    def log(self, x: Expr) -> Expr:
        return vector_math.log(x)

    def tanh(self, x: Expr) -> Expr:
        return vector_math.tanh(x)

    def erf(self, x: Expr) -> Expr:
        return vector_math.erf(x)

    def sigmoid(self, x: Expr) -> Expr:
        one = constant(1, dtype_name(x))
        return one / (one + vector_math.exp(-x))

    def sqrt(self, x: Expr) -> Expr:
        return tirx.sqrt(x)

    def let(self, value: Expr, body: Callable[[Expr], Expr]) -> Expr:
        """``body`` of the value, which is computed once: use it wherever a function's result is used twice."""
        return vector_math.let(value, body)

    def like(self, value: Scalar, sample: Expr) -> Expr:
        """A constant of the type of ``sample``."""
        return constant(value, dtype_name(sample))

    def constant(self, value: Scalar, dtype: str) -> Expr:
        return constant(value, dtype)

    def dtype(self, tensor: Tensor) -> str:
        return dtype_name(tensor)

    def index(self, value: Expr) -> Expr:
        """A loaded integer as an index; views and embeddings are within 32 bits."""
        return value.astype("int32")

    def compare(self, kind: str, a: Expr, c: Expr) -> Expr:
        """Equality of the values (``==`` on expressions may compare the expressions)."""
        if dtype_name(a) == dtype_name(c) == "bool":  # TVM's code for LLVM compares these as if they were floats
            a, c = a.astype("int8"), c.astype("int8")
        return tirx.EQ(a, c) if kind == "eq" else tirx.NE(a, c)

    def both(self, a: Expr, c: Expr) -> Expr:
        return tirx.all(a, c)

    def is_nan(self, x: Expr) -> Expr:
        return tirx.isnan(x)

    def guarded(self, condition: Expr, yes: Expr, no: Expr) -> Expr:
        """Like :meth:`select`, but only the chosen side is evaluated: an index on the other one may be out of bounds."""
        return tirx.if_then_else(condition, yes, no)

    def select(self, condition: Expr, yes: Expr, no: Expr) -> Expr:
        return tirx.Select(condition, yes, no)

    def maximum(self, a: Expr, b: Expr) -> Expr:
        return once(maximum)(a, b)

    def minimum(self, a: Expr, b: Expr) -> Expr:
        return once(minimum)(a, b)


def maximum(a: Expr, b: Expr) -> Expr:
    """The larger; NaN if either is."""
    return tirx.Select(_decides(a, a > b), a, b)


def minimum(a: Expr, b: Expr) -> Expr:
    """The smaller; NaN if either is."""
    return tirx.Select(_decides(a, a < b), a, b)


def _decides(a: Expr, wins: Expr) -> Expr:
    # Not by comparing both ways: TVM takes one comparison for the negation of the other.
    return tirx.Or(wins, tirx.isnan(a)) if is_float(dtype_name(a)) else wins


def once(combine: Callable[[Expr, Expr], Expr]) -> Callable[[Expr, Expr], Expr]:
    """``combine`` with its operands computed once: a tree of what names them several times grows with a power of its height."""
    return lambda a, b: vector_math.let(a, lambda a: vector_math.let(b, lambda b: combine(a, b)))


def constant(value: Scalar, dtype: str) -> Expr:
    if dtype == "bool":
        return tirx.const(bool(value), "bool")
    return tirx.const(float(value) if is_float(dtype) else int(value), dtype)


def scalar_type(value: Scalar) -> str:
    if isinstance(value, bool):
        return "bool"
    return "int64" if isinstance(value, int) else "float32"


def is_float(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat"))


def dtype_name(value: Any) -> str:
    return str(value.dtype) if hasattr(value, "dtype") else str(value.ty.dtype)


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    return tuple(int(n) for n in tensor.shape)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def tree(combine: Callable[[Expr, Expr], Expr], terms: Sequence[Expr]) -> Expr:
    """Combine pairwise, so that the additions do not wait for each other."""
    while len(terms) > 1:
        pairs = [combine(a, b) for a, b in zip(terms[::2], terms[1::2], strict=False)]
        terms = pairs if len(terms) % 2 == 0 else [*pairs, terms[-1]]
    if not terms:
        raise BuildError("nothing to combine")
    return terms[0]


def _lowest(dtype: str) -> Expr:
    return constant(-math.inf, dtype) if is_float(dtype) else tirx.min_value(dtype)


def _highest(dtype: str) -> Expr:
    return constant(math.inf, dtype) if is_float(dtype) else tirx.max_value(dtype)


_REDUCERS: dict[str, tuple[Callable[..., Expr], Callable[[Expr, Expr], Expr]]] = {
    "sum": (te.sum, lambda a, b: a + b),
    "max": (te.max, tirx.max),
    "min": (te.min, tirx.min),
    "amax": (te.comm_reducer(maximum, _lowest, name="amax"), once(maximum)),
    "amin": (te.comm_reducer(minimum, _highest, name="amin"), once(minimum)),
}
