"""What the cost model learns of a trace: its tiles, where its blocks are computed, and its marks. Needs no TVM."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

# Blocks whose tiles are described one by one, those with the most iterations first, and the levels of tiles of a spatial axis.
_DESCRIBED = 2
_LEVELS = 4
_MAX_NAME = 24


class _Reading:
    """A trace, read from its first instruction to its last; what is malformed raises whatever it meets, or is not looked at."""

    def __init__(self, trace: Any) -> None:
        instructions, decisions = trace
        self._decided = {int(where): value for where, value in decisions}
        self._names: dict[str, str] = {}
        # Of a loop: its block, and its place among the block's loops. Of a part of a loop: the sizes of all its parts.
        self._owner: dict[str, tuple[str, int]] = {}
        self._parts: dict[str, list[int]] = {}
        self._sizes: dict[str, list[int]] = {}
        self.tiles: dict[str, dict[int, list[int]]] = {}
        self.factored: list[int] = []
        self.locations: dict[str, int] = {}
        self.written_at: dict[str, float] = {}
        self._cached_from: dict[str, str] = {}
        self._order: dict[str, float] = {}
        self.inlined = 0
        self.unroll = self.vectorize = self.parallel = 0.0
        self.length = len(instructions)
        for number, (kind, inputs, attributes, outputs) in enumerate(instructions):
            read = getattr(self, f"_read_{str(kind).lower()}", None)
            if read is not None:
                read(number, inputs, attributes, outputs)

    def _read_getsblock(self, number: int, inputs: Any, attributes: Any, outputs: Any) -> None:
        del number, inputs
        self._names[outputs[0]] = str(attributes[0])[:_MAX_NAME]

    def _read_getproducers(self, number: int, inputs: Any, attributes: Any, outputs: Any) -> None:
        del number, attributes
        for place, output in enumerate(outputs):
            self._names[output] = f"{self._names.get(inputs[0], '')}<{place}"

    def _read_getloops(self, number: int, inputs: Any, attributes: Any, outputs: Any) -> None:
        del number, attributes
        self._owner |= {loop: (inputs[0], place) for place, loop in enumerate(outputs)}

    def _read_sampleperfecttile(self, number: int, inputs: Any, attributes: Any, outputs: Any) -> None:
        del attributes
        sizes = self._decided.get(number)
        if isinstance(sizes, list | tuple) and len(sizes) == len(outputs):
            self._sizes[inputs[0]] = [max(int(size), 1) for size in sizes]

    def _read_split(self, number: int, inputs: Any, attributes: Any, outputs: Any) -> None:
        del number, attributes
        sizes = self._sizes.get(inputs[0])
        if sizes is None:
            return
        self._parts |= dict.fromkeys(outputs, sizes)
        if inputs[0] in self._owner:
            block, place = self._owner[inputs[0]]
            self.tiles.setdefault(block, {})[place] = sizes

    def _read_rfactor(self, number: int, inputs: Any, attributes: Any, outputs: Any) -> None:
        del number, attributes, outputs
        sizes = self._parts.get(inputs[0])
        if sizes is None:
            return
        self.factored.append(sizes[-1])
        # What was split for this is no tile of its block.
        self.tiles = {b: axes for b, axes in self.tiles.items() if not any(axis is sizes for axis in axes.values())}

    def _read_reorder(self, number: int, inputs: Any, attributes: Any, outputs: Any) -> None:
        del number, attributes, outputs
        self._order |= {loop: place / len(inputs) for place, loop in enumerate(inputs)}

    def _read_cachewrite(self, number: int, inputs: Any, attributes: Any, outputs: Any) -> None:
        del number, attributes
        self._cached_from[outputs[0]] = inputs[0]

    def _read_reversecomputeat(self, number: int, inputs: Any, attributes: Any, outputs: Any) -> None:
        del number, attributes, outputs
        if (block := self._cached_from.get(inputs[0])) is not None:
            self.written_at[block] = self._order.get(inputs[1], 0.0)

    def _read_computeinline(self, number: int, inputs: Any, attributes: Any, outputs: Any) -> None:
        del number, inputs, attributes, outputs
        self.inlined += 1

    def _read_samplecomputelocation(self, number: int, inputs: Any, attributes: Any, outputs: Any) -> None:
        del attributes, outputs
        where = self._decided.get(number)
        if isinstance(where, int):
            self.locations[self._names.get(inputs[0], "")] = where

    def _read_samplecategorical(self, number: int, inputs: Any, attributes: Any, outputs: Any) -> None:
        del inputs, outputs
        chosen = self._decided.get(number)
        if isinstance(chosen, int) and attributes and 0 <= chosen < len(attributes[0]):
            self.unroll = max(self.unroll, float(attributes[0][chosen]))

    def _read_annotate(self, number: int, inputs: Any, attributes: Any, outputs: Any) -> None:
        del number, outputs
        if attributes == ["meta_schedule.vectorize"] and isinstance(inputs[1], int):
            self.vectorize = max(self.vectorize, float(inputs[1]))
        elif attributes == ["meta_schedule.parallel"]:
            self.parallel = 1.0


def trace_features(trace: Any) -> dict[str, float]:
    """Sizes as logarithms to base two. A malformed trace raises one of Python's errors.

    Of the blocks with the most iterations, ``tiled0`` and ``tiled1``: the tiles of the last spatial axis (``last``, the one
    that can be vectorized), of the one before (``next``) and of all others together (``rest``), level by level from the
    outside; of the reduction axes together; how many elements the tiles of each level touch, were it a matrix product.
    """
    reading = _Reading(trace)
    where = reading.locations
    found = {
        "trace_length": float(reading.length),
        "unroll_steps": _log(1.0 + reading.unroll),
        "vectorize": reading.vectorize,
        "parallel": reading.parallel,
        "inlined": float(reading.inlined),
        "tiled": float(len(reading.tiles)),
        "factored": float(len(reading.factored)),
        "at_root": float(sum(place == -1 for place in where.values())),
        "at_inline": float(sum(place == -2 for place in where.values())),
        "at_depth": float(sum(place for place in where.values() if place >= 0)),
    }
    if reading.factored:
        found |= {"factor.least": _log(min(reading.factored)), "factor.most": _log(max(reading.factored))}
    found |= {f"at.{name}": float(place) for name, place in where.items()}
    largest = sorted(reading.tiles.items(), key=lambda item: -_iterations(item[1].values()))
    for number, (block, axes) in enumerate(largest[:_DESCRIBED]):
        about = _block_features([axes[place] for place in sorted(axes)])
        about["written_at"] = reading.written_at.get(block, -1.0)
        found |= {f"tiled{number}.{name}": value for name, value in about.items()}
    return found


def _block_features(axes: Sequence[list[int]]) -> dict[str, float]:
    spatial = [sizes for sizes in axes if len(sizes) == _LEVELS]
    reduction = [sizes for sizes in axes if len(sizes) != _LEVELS]
    if not spatial:
        return {}
    before = spatial[-2] if len(spatial) > 1 else [1] * _LEVELS
    rest = [math.prod(sizes[level] for sizes in spatial[:-2]) for level in range(_LEVELS)]
    found = {"last.align": _log(math.gcd(spatial[-1][-1], 64))}
    for name, sizes in (("last", spatial[-1]), ("next", before), ("rest", rest)):
        found |= {f"{name}.{level}": _log(sizes[level]) for level in range(_LEVELS)}
    inner = math.prod(sizes[-1] for sizes in reduction)
    outer = math.prod(math.prod(sizes[:-1]) for sizes in reduction)
    found |= {"reduced.inner": _log(inner), "reduced.outer": _log(outer)}
    if reduction:
        found["reduced.last"] = _log(reduction[-1][-1])
    rows = columns = 1
    for level in reversed(range(_LEVELS)):
        rows *= before[level] * rest[level]
        columns *= spatial[-1][level]
        depth = inner if level >= _LEVELS // 2 else inner * outer
        found[f"elements.{level}"] = _log(rows * columns)
        found[f"touched.{level}"] = _log(rows * columns + depth * (rows + columns))
    return found


def _iterations(axes: Any) -> int:
    return math.prod(math.prod(sizes) for sizes in axes)


def _log(value: float) -> float:
    return math.log2(max(value, 1.0))
