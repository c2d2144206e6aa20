"""The hand schedule: register-tiled products, row-wise reductions in vectors, fused and vectorized element-wise loops.

Every step that TVM refuses for a shape (``ScheduleError``) is left out: the function stays right, that part is only slower.
"""

from __future__ import annotations

import math
from contextlib import suppress
from itertools import pairwise
from typing import Any

from tvm import s_tir
from tvm.s_tir import ScheduleError

from raftune.dialects.tvm.lowering.builder import Stage
from raftune.dialects.tvm.lowering.contraction import Contraction
from raftune.dialects.tvm.lowering.lower import Lowered

Schedule = Any
Loop = Any

_VECTORS_PER_STEP = 4
_SHORT = 7


def hand_schedule(lowered: Lowered, *, lanes: int, threads: int) -> Schedule:
    """Schedule a function that was lowered in the vector style for vectors of ``lanes`` elements."""
    sch = s_tir.Schedule(lowered.function)
    stages = _inline(sch, lowered)
    for part in _parts(stages):
        if any(stage.kind == "tile" for stage in part):
            _tile(sch, part, threads)
            continue
        rows = next((i for i, stage in enumerate(part) if stage.kind in ("lanes", "reduce")), None)
        anchored = _gather_rows(sch, part[rows:], lanes, threads) if rows is not None else set()
        for stage in part:
            if stage.name not in anchored:
                _standalone(sch, stage, lanes, threads)
    return sch


def _inline(sch: Schedule, lowered: Lowered) -> list[Stage]:
    """Inline what is computed from single elements; what remains, in order of computation."""
    remaining = []
    stages = lowered.builder.stages
    for stage in stages:
        inlined = False
        if (stage.kind == "map" or (stage.kind == "untile" and _keeps_rows(stages))) and stage.name not in lowered.outputs:
            with suppress(ScheduleError):
                sch.compute_inline(stage.name)
                inlined = True
        if not inlined:
            remaining.append(stage)
    return remaining


def _keeps_rows(stages: list[Stage]) -> bool:
    """Whether no tile of rows of a product alone lies across the end of a dimension that its rows are stored in."""
    tilings = [stage.tiling for stage in stages if stage.tiling is not None]
    product = next(stage.tensor.shape for stage in stages if stage.kind == "untile")
    stored = stages[-1].tensor.shape
    if any(stage.contraction is not None and stage.contraction.shared for stage in stages):
        return [int(n) for n in stored] == [int(n) for n in product]  # a convolution is stored in its own order or not at all
    return len(tilings) > 1 or len(stored) == len(product) or int(stored[-2]) % tilings[0].tile_m == 0


def _parts(stages: list[Stage]) -> list[list[Stage]]:
    """The stages in order, divided into tiled products (packing, tiles, what stores them) and what lies between those."""
    kinds = [stage.kind for stage in stages]
    if kinds.count("tile") == 1 and "untile" not in kinds:
        # A product alone ends with what is computed of it, which may be several stages.
        start = kinds.index("pack") if "pack" in kinds else kinds.index("tile")
        return [part for part in (stages[:start], stages[start:]) if part]
    cuts = {0, len(stages)}
    for index, stage in enumerate(stages):
        if stage.kind == "tile":
            packed = index > 0 and stages[index - 1].kind == "pack"
            cuts |= {index - packed, min(index + 2, len(stages))}
    return [stages[start:end] for start, end in pairwise(sorted(cuts))]


def _standalone(sch: Schedule, stage: Stage, lanes: int, threads: int) -> None:
    """A block with a loop nest of its own."""
    block = sch.get_sblock(stage.name)
    loops = sch.get_loops(block)
    spatial = len(stage.tensor.shape)
    if spatial == 0 or not loops:
        return
    spatial_loops, reduce_loops = loops[:spatial], loops[spatial:]
    if reduce_loops:
        inner = spatial_loops[-1]
        extent = _extent(sch, inner)
        width = next((lanes * n for n in (8, 4, 2, 1) if extent % (lanes * n) == 0), 0)
        if stage.kind == "lanes":
            sch.reorder(*spatial_loops[:-1], *reduce_loops, inner)
            sch.vectorize(inner)
            spatial_loops = spatial_loops[:-1]
        elif width:
            outer, vector = sch.split(inner, [None, width])
            sch.reorder(*spatial_loops[:-1], outer, *reduce_loops, vector)
            sch.vectorize(vector)
            spatial_loops = [*spatial_loops[:-1], outer]
        elif extent > 1:
            sch.reorder(*spatial_loops[:-1], *reduce_loops, inner)
            spatial_loops = spatial_loops[:-1]
        if spatial_loops:
            _parallel(sch, spatial_loops[0], threads)
            sch.decompose_reduction(block, reduce_loops[0])
        return
    if stage.kind == "frame":  # its conditions differ from lane to lane: LLVM masks the loads
        _parallel(sch, sch.fuse(*spatial_loops[:2]), threads)
        return
    _vectorize_map(sch, spatial_loops, lanes, threads)


def _vectorize_map(sch: Schedule, loops: list[Loop], lanes: int, threads: int) -> None:
    extent = _extent(sch, loops[-1])
    if extent % lanes and math.prod(_extent(sch, loop) for loop in loops) % lanes == 0:
        loops = [sch.fuse(*loops)]
        extent = _extent(sch, loops[-1])
    outer = loops
    if extent % lanes == 0:
        main, vector = sch.split(loops[-1], [None, lanes])
        sch.vectorize(vector)
        outer = [*loops[:-1], main]
        if threads == 1 and _extent(sch, main) % _VECTORS_PER_STEP == 0:
            _, unrolled = sch.split(main, [None, _VECTORS_PER_STEP])
            sch.unroll(unrolled)
            return
    elif len(loops) > 1:
        outer = loops[:-1]  # the innermost is left to LLVM's own vectorizer
    if threads > 1:
        _parallel(sch, sch.fuse(*outer), threads)


def _gather_rows(sch: Schedule, stages: list[Stage], lanes: int, threads: int) -> set[str]:
    """Run all stages of one row before the next row, so that a row is read from memory once. Returns the stages it moved.

    Rows are the leading dimensions that the first stage keeps; stages without them (a sum over the rows) stay by themselves.
    """
    first = stages[0].tensor.shape
    rows = len(first) - (1 if stages[0].kind == "lanes" else 0)
    prefix = [int(n) for n in first[:rows]]
    # The function's own order follows its outputs: nothing may lie between these, as it may read what they write.
    blocks = [sch.get(block).name_hint for block in sch.get_child_blocks(sch.get_sblock("root"))]
    start = blocks.index(stages[0].name)
    together = []
    for stage, block in zip(stages, blocks[start:], strict=False):
        if stage.name != block or [int(n) for n in stage.tensor.shape[:rows]] != prefix:
            break
        together.append(stage)
    if rows == 0 or len(together) < 2:
        return set()
    row_loops = []
    for stage in together:
        loops = sch.get_loops(stage.name)
        row_loops.append(sch.fuse(*loops[:rows]))
    try:
        row = sch.merge(*row_loops)
    except ScheduleError:
        return set()
    _parallel(sch, row, threads)  # before reductions are split in two, after which TVM no longer sees that rows are independent
    for stage in together:
        _inside_row(sch, stage, 1, lanes)
    return {stage.name for stage in together}


def _inside_row(sch: Schedule, stage: Stage, rows: int, lanes: int) -> None:
    block = sch.get_sblock(stage.name)
    loops = sch.get_loops(block)
    own = loops[rows:]
    if stage.kind == "lanes":
        vector = own[0]
        sch.reorder(*own[1:], vector)
        sch.vectorize(vector)
        sch.decompose_reduction(block, own[1])
        return
    if stage.kind in ("map", "keep", "fold", "untile") and own:
        inner = own[-1]
        extent = _extent(sch, inner)
        if extent > 1 and extent % lanes == 0:
            _, vector = sch.split(inner, [None, lanes])
            sch.vectorize(vector)


def _tile(sch: Schedule, stages: list[Stage], threads: int) -> None:
    """A register tile of the product per step; its panel of the right operand is packed before the first step that needs it."""
    tile = next(s for s in stages if s.kind == "tile")
    last, tiling, contraction = stages[-1], tile.tiling, tile.contraction
    assert tiling is not None
    assert contraction is not None
    block = sch.get_sblock(last.name)
    group, batch, i, j = _divided(sch, block, contraction)
    exact_n = contraction.columns % tiling.tile_n == 0
    io, ii = sch.split(i, [None, tiling.tile_m])
    jo, ji = sch.split(j, [None, tiling.tile_n])
    # Vectors of columns are stored as such where columns are the innermost axis of what is stored.
    vectors = contraction.column == len(contraction.shape) - 1
    inner = [ii, ji] if vectors else [ji, ii]
    panels_first = [jo, *batch, io] if contraction.shared else [*batch, jo, io]
    outer = [*batch, io, jo] if tiling.order == "mn" else panels_first
    sch.reorder(*group, *outer, *inner)
    if exact_n and vectors:
        sch.vectorize(ji)
    sch.compute_at(tile.name, outer[-1], preserve_unit_loops=True)
    tile_block = sch.get_sblock(tile.name)
    depth = len(tile.tensor.op.reduce_axis)
    *_, mi, ni = sch.get_loops(tile_block)[:-depth]
    *steps, k = sch.get_loops(tile_block)[-depth:]
    ko, ki = sch.split(k, [None, _unrolled(_extent(sch, k), tiling.unroll_k, depth)])
    sch.reorder(*steps, ko, ki, mi, ni)
    sch.vectorize(ni)
    sch.unroll(mi)
    sch.unroll(ki)
    pack = next((s for s in stages if s.kind == "pack"), None)
    if pack is not None:
        if tiling.order == "nm":
            sch.compute_at(pack.name, jo, preserve_unit_loops=True)
        elif threads > 1:
            _parallel(sch, sch.fuse(*sch.get_loops(pack.name)[:-2]), threads)
        sch.vectorize(sch.get_loops(pack.name)[-1])
    if threads > 1:
        shared = outer.index(jo) if tiling.order == "nm" else len(outer) - 2
        _parallel(sch, sch.fuse(*group, *outer[: shared + 1]), threads)
    sch.decompose_reduction(tile_block, [*steps, ko][0])


def _divided(sch: Schedule, block: Any, contraction: Contraction) -> tuple[list[Loop], list[Loop], Loop, Loop]:
    """The loops over what is stored: groups of columns, all others, rows, and columns."""
    loops = list(sch.get_loops(block))
    more = len(loops) - len(contraction.shape)
    if more > 0:  # the rows of the product are several dimensions of what is stored
        rows = loops[contraction.row : contraction.row + more + 1]
        loops[contraction.row : contraction.row + more + 1] = [sch.fuse(*rows)]
    row, column = loops[contraction.row], loops[contraction.column]
    group: list[Loop] = []
    if contraction.groups > 1:
        outer, column = sch.split(column, [contraction.groups, None])
        group = [outer]
    return group, [loops[a] for a in contraction.batch], row, column


def _unrolled(extent: int, wanted: int, depth: int) -> int:
    """Steps of the innermost sum that are written out: all of a short one within others, such as a kernel's width."""
    if extent % wanted == 0:
        return wanted
    return extent if depth > 1 and extent <= _SHORT else 1


def _parallel(sch: Schedule, loop: Loop, threads: int) -> None:
    if threads > 1:
        sch.parallel(loop)


def _extent(sch: Schedule, loop: Loop) -> int:
    return int(sch.get(loop).extent)
