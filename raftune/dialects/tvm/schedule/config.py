"""The hand schedules' parameters, as they stand in a candidate's config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from raftune.dialects.base import BuildError

# The accumulators of one tile must stay in registers; TVM keeps a buffer on the stack, where LLVM can promote it to
# registers, up to this size only.
MAX_TILE_BYTES = 1024
_MAX_TILE_M = 64
_MAX_TILE_N = 256
# Sums of a convolution up to this depth take about as long as storing their results one by one.
_SHALLOW = 160
ORDERS = ("mn", "nm")
COLUMNS = ("channels", "pixels")
"""What may be in vectors of a convolution: its channels or, which stores whole vectors, the pixels of a line."""


@dataclass(frozen=True, slots=True)
class MatmulTiling:
    """Register tile of ``tile_m`` rows by ``tile_n`` columns; ``pack`` copies the right operand into panels of ``tile_n``.

    ``order``: ``nm`` keeps a panel of columns and runs over the rows, ``mn`` the other way round. ``unroll_k`` steps of the
    inner product are written out.
    """

    tile_m: int
    tile_n: int
    pack: bool
    order: str
    unroll_k: int = 1

    def to_config(self) -> dict[str, Any]:
        return {
            "schedule": "tiled",
            "tile_m": self.tile_m,
            "tile_n": self.tile_n,
            "pack": self.pack,
            "order": self.order,
            "unroll_k": self.unroll_k,
        }

    @staticmethod
    def from_config(config: Mapping[str, Any], itemsize: int) -> MatmulTiling:
        """Check a stranger's config; raises :class:`BuildError` with the value that is wrong."""
        tile_m = _integer(config, "tile_m", _MAX_TILE_M)
        tile_n = _integer(config, "tile_n", _MAX_TILE_N)
        if tile_m * tile_n * itemsize > MAX_TILE_BYTES:
            raise BuildError(f"tile {tile_m} x {tile_n} of {itemsize} bytes is beyond {MAX_TILE_BYTES} bytes of registers")
        if not isinstance(config["pack"], bool):
            raise BuildError(f"pack must be true or false, not {config['pack']!r}")
        if config["order"] not in ORDERS:
            raise BuildError(f"order must be one of {ORDERS}, not {config['order']!r}")
        return MatmulTiling(tile_m, tile_n, config["pack"], config["order"], _integer(config, "unroll_k", 16))

    def fitted(self, m: int, n: int, vector: int, itemsize: int) -> MatmulTiling:
        """The tile of a product of ``m`` by ``n`` in a workload that has several: as wide if it can be, with fitting rows."""
        tile_n = min(self.tile_n, -(-n // vector) * vector)
        return replace(self, tile_n=tile_n, tile_m=best_rows(m, tile_n, vector, itemsize, most=self.tile_m))


def default_tiling(m: int, n: int, vector: int, itemsize: int) -> MatmulTiling:
    """The tile to start from, for ``vector`` elements a register: two registers wide, or one where the product is narrow."""
    tile_n = vector if n <= vector else 2 * vector
    return MatmulTiling(best_rows(m, tile_n, vector, itemsize), tile_n, True, "nm", 4)


def best_rows(m: int, tile_n: int, vector: int, itemsize: int, most: int = _MAX_TILE_M) -> int:
    """Rows of a tile ``tile_n`` wide: as many as registers allow, up to ``most``, with little waste in the last tile."""
    registers = 32 if vector * itemsize == 64 else 16
    columns = -(-tile_n // vector)
    most = max(1, min((registers - columns - 2) // columns, MAX_TILE_BYTES // (tile_n * itemsize), m, most))
    return min(range(max(1, most // 2), most + 1), key=lambda rows: (-(-m // rows) * rows * (1 + 1 / rows), -rows))


def default_columns(line: int, depth: int, vector: int) -> str:
    """Pixels where a line is made of whole vectors and little is computed for each that is stored."""
    return "pixels" if vector and line % vector == 0 and depth <= _SHALLOW else "channels"


def convolution_tilings(line: int, channels: int, vector: int, itemsize: int) -> list[MatmulTiling]:
    """Widths and orders for a convolution of so many pixels a line and channels; rows are fitted when it is lowered."""
    found = []
    for width in (1, 2, 4):
        if width > 1 and width * vector >= max(line, channels) + vector:
            continue
        rows = best_rows(max(line, channels), width * vector, vector, itemsize)
        found += [MatmulTiling(rows, width * vector, True, order, 4) for order in ORDERS]
    return found


def tilings(m: int, n: int, vector: int, itemsize: int) -> list[MatmulTiling]:
    """A short list around the default, which is not repeated in it."""
    default = default_tiling(m, n, vector, itemsize)
    found: list[MatmulTiling] = []
    # A last tile that is cut off costs an order of magnitude: only where no width comes out even.
    for width in [w for w in (1, 2, 3, 4) if n % (w * vector) == 0] or (1, 2, 3, 4):
        tile_n = width * vector
        if width > 1 and tile_n >= n + vector:
            continue
        rows = best_rows(m, tile_n, vector, itemsize)
        for order in ORDERS:
            for pack in (True, False):
                if not pack and n % tile_n:
                    continue
                found += [MatmulTiling(rows, tile_n, pack, order, unroll) for unroll in (1, 4)]
    return [tiling for tiling in dict.fromkeys(found) if tiling != default]


def _integer(config: Mapping[str, Any], key: str, most: int) -> int:
    value = config[key]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise BuildError(f"{key} must be an integer from 1 to {most}, not {value!r}")
    return value
