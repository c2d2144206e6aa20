"""The closed schema of a config: what may be chosen, checked word by word before anything is rendered or compiled.

A config names a kernel family and its choices; what follows from the workload (types, layouts, alignments, what is fused) is
added by :mod:`raftune.dialects.cutlass.spec`. Sizes are those of CUTLASS: a tile is what one thread block computes, in rows,
columns and depth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from raftune.dialects.base import BuildError
from raftune.dialects.calls import check_keys
from raftune.workload import Config

MATHS = ("tensor", "tf32", "3xtf32", "simt")
"""How products are formed: tensor cores on 16-bit numbers, on float32 cut to tf32, on float32 in three parts; or none."""

_ROWS = (32, 64, 128, 256)
_COLUMNS = (32, 64, 128, 256)
_DEPTHS = (8, 16, 32, 64)
_WARPS = (16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Sm80Gemm:
    """``warp``: rows and columns of the tile that one warp computes. ``swizzle``: how many tile columns are walked together.

    ``split``: ``none``; ``serial``, ``slices`` of the depth that wait for each other; ``stream``, stream-k.
    """

    kernel: ClassVar[str] = "sm80_gemm"

    tile: tuple[int, int, int]
    warp: tuple[int, int]
    stages: int
    swizzle: int
    split: str
    slices: int
    math: str

    @property
    def warps(self) -> int:
        return (self.tile[0] // self.warp[0]) * (self.tile[1] // self.warp[1])


@dataclass(frozen=True, slots=True)
class Sm90Gemm:
    """``cluster``: thread blocks in rows and columns that share what they load. ``schedule`` of the warps that compute."""

    kernel: ClassVar[str] = "sm90_gemm"

    tile: tuple[int, int, int]
    cluster: tuple[int, int]
    schedule: str
    scheduler: str
    math: str


@dataclass(frozen=True, slots=True)
class Sm80Convolution:
    """One pass of a convolution as an implicit matrix product; ``slices`` of its depth wait for each other."""

    kernel: ClassVar[str] = "sm80_convolution"

    tile: tuple[int, int, int]
    warp: tuple[int, int]
    stages: int
    swizzle: int
    slices: int
    math: str

    @property
    def warps(self) -> int:
        return (self.tile[0] // self.warp[0]) * (self.tile[1] // self.warp[1])


Schedule = Sm80Gemm | Sm90Gemm | Sm80Convolution

_FAMILIES: Mapping[str, type[Schedule]] = {family.kernel: family for family in (Sm80Gemm, Sm90Gemm, Sm80Convolution)}
# For every field what it may be: one of these values, or as many numbers as there are tuples of values.
_ALLOWED: Mapping[str, Mapping[str, Any]] = {
    "sm80_gemm": {
        "tile": (_ROWS, _COLUMNS, _DEPTHS),
        "warp": (_WARPS, _WARPS),
        "stages": range(2, 11),
        "swizzle": (1, 2, 4, 8),
        "split": ("none", "serial", "stream"),
        "slices": range(1, 65),
        "math": MATHS,
    },
    "sm90_gemm": {
        "tile": ((64, 128, 256), (16, 32, 64, 96, 128, 160, 192, 224, 256), (32, 64, 128)),
        "cluster": ((1, 2, 4), (1, 2, 4)),
        "schedule": ("pingpong", "cooperative"),
        "scheduler": ("persistent", "stream_k"),
        "math": ("tensor", "tf32"),
    },
    "sm80_convolution": {
        "tile": (_ROWS, _COLUMNS, _DEPTHS),
        "warp": (_WARPS, _WARPS),
        "stages": range(2, 11),
        "swizzle": (1, 2, 4, 8),
        "slices": range(1, 65),
        "math": ("tensor", "tf32", "3xtf32"),
    },
}


def parse(config: Config) -> Schedule:
    """The schedule that a config describes. Raises :class:`BuildError` that names what is wrong with it."""
    name = config.get("kernel")
    family = _FAMILIES.get(name) if isinstance(name, str) else None
    if family is None:
        raise BuildError(f"config kernel={name!r}: expected one of {', '.join(map(repr, _FAMILIES))}")
    allowed = _ALLOWED[family.kernel]
    check_keys(config, ("kernel", *allowed))
    values = {key: _value(key, config.get(key), allowed[key]) for key in allowed}
    schedule = family(**values)
    if isinstance(schedule, Sm80Gemm) and (schedule.split == "serial") != (schedule.slices > 1):
        raise BuildError(f"config slices={schedule.slices!r} with split={schedule.split!r}: more than one means 'serial'")
    if not isinstance(schedule, Sm90Gemm):
        _check_warps(schedule)
    return schedule


def to_config(schedule: Schedule) -> Config:
    """The config of which :func:`parse` makes ``schedule``."""
    values = {field.name: getattr(schedule, field.name) for field in fields(schedule)}
    return {"kernel": schedule.kernel} | {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def _value(key: str, value: Any, allowed: Any) -> Any:
    if isinstance(allowed, tuple) and isinstance(allowed[0], tuple):
        if isinstance(value, list | tuple) and len(value) == len(allowed):
            return tuple(_value(key, part, choices) for part, choices in zip(value, allowed, strict=True))
        raise BuildError(f"config {key}={value!r}: expected {len(allowed)} numbers")
    # The type as well: True is 1 and 1.0 is 1 to Python, and both would be pasted as they are.
    if value in allowed and type(value) is type(allowed[0]):
        return value
    raise BuildError(f"config {key}={value!r}: expected one of {', '.join(map(repr, allowed))}")


def _check_warps(schedule: Sm80Gemm | Sm80Convolution) -> None:
    (rows, columns, _), (warp_rows, warp_columns) = schedule.tile, schedule.warp
    if rows % warp_rows or columns % warp_columns or not 1 <= schedule.warps <= 16:
        raise BuildError(f"config warp={list(schedule.warp)!r} does not divide tile={list(schedule.tile)!r} into 1 to 16 warps")
