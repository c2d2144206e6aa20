"""Sums of products, which matrix products and convolutions are: plain, or in register tiles for the hand schedule.

A tile is some rows by some columns. Its columns are vectors of the right operand, which is packed into panels of as many
columns; its rows are single elements of the left one, which may lie anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvm import te, tirx

if TYPE_CHECKING:
    from raftune.dialects.tvm.lowering.builder import Builder
    from raftune.dialects.tvm.schedule.config import MatmulTiling

Expr = Any
Factor = Callable[[Sequence[Expr], Sequence[Expr]], Expr]
"""An operand's element for the indices of a result and those of the depth."""

Tiling = Callable[[int, int], "MatmulTiling"]
"""How a product of so many rows and columns is tiled."""


@dataclass(frozen=True, slots=True)
class Contraction:
    """Results of ``shape``, each a sum over ``depth``; axis ``row`` runs over the rows of tiles, axis ``column`` over columns.

    The columns come in ``groups`` of equal size, each with operands of its own. ``shared``: the right operand is the same at
    all indices of the other axes.
    """

    shape: tuple[int, ...]
    depth: tuple[int, ...]
    row: int
    column: int
    dtype: str
    groups: int = 1
    shared: bool = False

    @property
    def batch(self) -> list[int]:
        """The axes other than rows and columns."""
        return [a for a in range(len(self.shape)) if a not in (self.row, self.column)]

    @property
    def rows(self) -> int:
        return self.shape[self.row]

    @property
    def columns(self) -> int:
        """Columns of one group."""
        return self.shape[self.column] // self.groups


def contract(b: Builder, contraction: Contraction, left: Factor, right: Factor) -> Any:
    """The contraction as a plain reduction or, if the builder tiles and there are columns for a vector, as tiles."""
    columns = contraction.columns
    if b.tiling is None or not contraction.dtype.startswith("float") or (contraction.groups > 1 and columns < b.lanes):
        return b.over(contraction.shape, contraction.depth, lambda i, k: left(i, k) * right(i, k))
    return _tiled(b, contraction, b.tiling(contraction.rows, columns), left, right)


def _tiled(b: Builder, contraction: Contraction, tiling: MatmulTiling, left: Factor, right: Factor) -> Any:
    tile_m, tile_n = tiling.tile_m, tiling.tile_n
    rows, columns = contraction.rows, contraction.columns
    batch = contraction.batch
    own = [] if contraction.shared else batch
    groups = [contraction.groups] if contraction.groups > 1 else []

    def result(group: Sequence[Expr], others: Sequence[Expr], row: Expr, column: Expr) -> list[Expr]:
        """The indices of a result."""
        found: list[Expr] = [0] * len(contraction.shape)
        for axis, index in zip(batch, others, strict=True):
            found[axis] = index
        found[contraction.row] = row
        found[contraction.column] = group[0] * columns + column if group else column
        return found

    ng, nb = len(groups), len(batch)
    packed = None
    if tiling.pack or columns % tile_n or contraction.shared:
        kept = [extent for extent in contraction.depth if extent > 1] or [1]
        head = ng + len(own)

        def pack(*s: Expr) -> Expr:
            others = s[ng:head] if own else [0] * nb
            column = s[head] * tile_n + s[-1]
            depth = _spread(contraction, s[head + 1 : -1])
            value = right(result(s[:ng], others, 0, column), depth)
            return (
                value
                if columns % tile_n == 0
                else tirx.if_then_else(column < columns, value, tirx.const(0.0, contraction.dtype))
            )

        shape = (*groups, *(contraction.shape[a] for a in own), -(-columns // tile_n), *kept, tile_n)
        packed = b.compute(shape, pack, "pack")
    axes, at = _depth(contraction)

    def tile(*s: Expr) -> Expr:
        group, others, (mo, no, mi, ni) = s[:ng], s[ng : ng + nb], s[ng + nb :]
        row = mo * tile_m + mi
        # Rows beyond the end repeat the last one and are not stored.
        row = row if rows % tile_m == 0 else tirx.min(row, rows - 1)
        x = left(result(group, others, row, 0), at)
        if packed is not None:
            y = packed(*group, *(others if own else ()), no, *axes, ni)
        else:
            y = right(result(group, others, 0, no * tile_n + ni), at)
        return te.sum(x * y, axis=axes)

    shape = (*groups, *(contraction.shape[a] for a in batch), -(-rows // tile_m), -(-columns // tile_n), tile_m, tile_n)
    tiles = b.compute(shape, tile, "tile", tiling, contraction)

    def untile(*i: Expr) -> Expr:
        row, column = i[contraction.row], i[contraction.column]
        group = [column // columns] if groups else []
        column = column % columns if groups else column
        others = [i[a] for a in batch]
        return tiles(*group, *others, row // tile_m, column // tile_n, row % tile_m, column % tile_n)

    return b.compute(contraction.shape, untile, "untile")


def _depth(contraction: Contraction) -> tuple[list[Expr], list[Expr]]:
    """Fresh reduction axes for what is deeper than one, and the indices into the whole depth."""
    extents = [extent for extent in contraction.depth if extent > 1] or [1]
    axes = [te.reduce_axis((0, extent), name=f"k{number}") for number, extent in enumerate(extents)]
    return axes, _spread(contraction, axes)


def _spread(contraction: Contraction, kept: Sequence[Expr]) -> list[Expr]:
    """Indices into the whole depth from those into what is deeper than one."""
    if math.prod(contraction.depth) == 1:
        return [0] * len(contraction.depth)
    left = iter(kept)
    return [next(left) if extent > 1 else 0 for extent in contraction.depth]
