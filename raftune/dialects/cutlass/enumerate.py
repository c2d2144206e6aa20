"""Schedules worth trying for a problem on a device, most promising first: what cannot run or cannot pay is left out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from raftune.dialects.cutlass.problem import SIZES, ConvolutionProblem, GemmProblem, channel_alignment
from raftune.dialects.cutlass.schema import Schedule, Sm80Convolution, Sm80Gemm, Sm90Gemm

# Shared memory that one thread block may have, in bytes: CUDA C++ Programming Guide, technical specifications by capability.
_SHARED_MEMORY = {80: 163 << 10, 86: 99 << 10, 87: 163 << 10, 89: 99 << 10, 90: 227 << 10}
# Multiprocessors where the device does not say: of an A100 and an H100.
_PROCESSORS = {80: 108, 90: 132}

# Tile -> a warp's share, for tensor cores and for none. Accumulators and operands of larger shares do not fit in registers.
_TILES: Mapping[str, Mapping[tuple[int, int], tuple[int, int]]] = {
    "tensor": {
        (256, 128): (64, 64),
        (128, 256): (64, 64),
        (128, 128): (64, 64),
        (256, 64): (64, 64),
        (64, 256): (64, 64),
        (128, 64): (64, 32),
        (64, 128): (32, 64),
        (64, 64): (32, 32),
    },
    "3xtf32": {(128, 128): (64, 32), (128, 64): (32, 32), (64, 128): (32, 32), (64, 64): (32, 32)},
    "simt": {
        (256, 128): (64, 64),
        (128, 256): (64, 64),
        (128, 128): (32, 64),
        (128, 64): (64, 32),
        (64, 128): (32, 64),
        (64, 64): (32, 64),
        (128, 32): (64, 32),
        (32, 128): (32, 64),
    },
}
_DEPTHS = {"tensor": (32, 64), "tf32": (16, 32), "3xtf32": (16, 32), "simt": (8,)}
_STAGES = {"tensor": (3, 4, 5), "tf32": (3, 4, 5), "3xtf32": (3, 4), "simt": (3, 4, 5)}
_SLICES = (2, 4, 8, 16)
_WGMMA_TILES = {"pingpong": ((64, 64), (64, 128), (64, 256)), "cooperative": ((128, 64), (128, 128), (128, 256), (256, 128))}
_CLUSTERS = ((1, 1), (2, 1), (1, 2))


@dataclass(frozen=True, slots=True)
class Gpu:
    """``capability``: ten times the major plus the minor compute capability; ``processors``: multiprocessors, 0 if unknown."""

    capability: int
    processors: int = 0
    tf32: bool = False

    @property
    def multiprocessors(self) -> int:
        return self.processors or _PROCESSORS.get(self.capability, 80)

    @property
    def shared_memory(self) -> int:
        return _SHARED_MEMORY.get(self.capability, 99 << 10)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """A problem as the product that it is computed as."""

    batch: int
    m: int
    n: int
    k: int
    element: int
    alignment: int


def gemm_schedules(problem: GemmProblem, gpu: Gpu) -> list[Schedule]:
    alignment = min(problem.a.alignment, problem.b.alignment)
    sizes = _Sizes(problem.batch, problem.m, problem.n, problem.k, SIZES[problem.dtype], alignment)
    divisible = problem.batch == 1 and not problem.op.endswith("Backward")
    found: list[Schedule] = []
    for name in _maths(problem.dtype, gpu):
        for tile, warp, stages in _multistage(sizes, name, gpu):
            plain = Sm80Gemm(tile, warp, stages, 1, "none", 1, name)
            found += [plain, Sm80Gemm(tile, warp, stages, 4, "none", 1, name)]
            if name != "simt":
                found.append(Sm80Gemm(tile, warp, stages, 1, "stream", 1, name))
            slices = _SLICES if divisible else ()
            found += [Sm80Gemm(tile, warp, stages, 1, "serial", n, name) for n in slices if _pays(sizes, tile, n, gpu)]
    reads = min(alignment, problem.alignment) * sizes.element if problem.dtype != "float32" else problem.alignment * 4
    if gpu.capability == 90 and reads >= 16:
        found += _warp_specialised(sizes, "tf32" if problem.dtype == "float32" else "tensor", gpu)
    return sorted(found, key=lambda schedule: _expected(schedule, sizes, gpu))


def convolution_schedules(problem: ConvolutionProblem, which: str, gpu: Gpu) -> list[Sm80Convolution]:
    """Of the pass ``which``, as the implicit product that it is."""
    c = problem.convolution
    image, result = channel_alignment(problem)
    pixels, filters = c.x.shape[0] * math.prod(c.output_spatial), math.prod(c.kernel)
    m, n, k = {
        "forward": (pixels, c.w.shape[0], filters * c.x.shape[1]),
        "input": (c.x.shape[0] * math.prod(c.x.shape[2:]), c.x.shape[1], filters * c.w.shape[0]),
        "weight": (c.w.shape[0], filters * c.x.shape[1], pixels),
    }[which]
    sizes = _Sizes(1, m, n, k, SIZES[problem.dtype], min(image, result))
    strided = any(s != 1 for s in c.stride)
    found: list[Sm80Convolution] = []
    for name in _maths(problem.dtype, gpu):
        if name == "simt":
            continue
        for tile, warp, stages in _multistage(sizes, name, gpu):
            found += [Sm80Convolution(tile, warp, stages, swizzle, 1, name) for swizzle in (1, 4)]
            slices = () if which == "input" and strided else _SLICES
            found += [Sm80Convolution(tile, warp, stages, 1, n, name) for n in slices if _pays(sizes, tile, n, gpu)]
    return sorted(found, key=lambda schedule: _expected(schedule, sizes, gpu))


def _maths(dtype: str, gpu: Gpu) -> tuple[str, ...]:
    """float32 is cut to tf32 only where the user lets PyTorch do so."""
    if dtype != "float32":
        return ("tensor",)
    return ("tf32", "3xtf32", "simt") if gpu.tf32 else ("3xtf32", "simt")


def _multistage(sizes: _Sizes, name: str, gpu: Gpu) -> Iterator[tuple[tuple[int, int, int], tuple[int, int], int]]:
    for (rows, columns), warp in _TILES["tensor" if name == "tf32" else name].items():
        if not (_fits(rows, sizes.m) and _fits(columns, sizes.n)):
            continue
        for depth in _DEPTHS[name]:
            # Asynchronous copies move at least four bytes: without them there are two stages.
            stages = _STAGES[name] if name == "simt" or sizes.alignment * sizes.element >= 4 else (2,)
            for count in stages:
                if count * (rows + columns) * depth * sizes.element <= gpu.shared_memory:
                    yield (rows, columns, depth), warp, count


def _warp_specialised(sizes: _Sizes, name: str, gpu: Gpu) -> list[Schedule]:
    if name == "tf32" and not gpu.tf32:
        return []
    found: list[Schedule] = []
    depth = 128 // sizes.element
    for schedule, tiles in _WGMMA_TILES.items():
        for rows, columns in tiles:
            if not (_fits(rows, sizes.m) and _fits(columns, sizes.n)):
                continue
            for cluster in _CLUSTERS:
                found.append(Sm90Gemm((rows, columns, depth), cluster, schedule, "persistent", name))
            if schedule == "cooperative":
                found.append(Sm90Gemm((rows, columns, depth), (1, 1), schedule, "stream_k", name))
    return found


def _fits(tile: int, size: int) -> bool:
    """Half of a tile at least has something to do; the smallest tiles are for what is smaller still."""
    return tile <= 64 or tile < 2 * size


def _pays(sizes: _Sizes, tile: tuple[int, int, int], slices: int, gpu: Gpu) -> bool:
    """Slices of the depth fill a device that the tiles alone do not, and have some depth left."""
    tiles = math.ceil(sizes.m / tile[0]) * math.ceil(sizes.n / tile[1])
    return tiles * slices <= 2 * gpu.multiprocessors and sizes.k >= slices * 4 * tile[2]


def _expected(schedule: Schedule, sizes: _Sizes, gpu: Gpu) -> float:
    """A rough time, for the order alone: waves of blocks, each bound by its products or by what it reads."""
    rows, columns, _ = schedule.tile
    slices = 1 if isinstance(schedule, Sm90Gemm) else schedule.slices
    blocks = sizes.batch * math.ceil(sizes.m / rows) * math.ceil(sizes.n / columns) * slices
    streams = isinstance(schedule, Sm80Gemm) and schedule.split == "stream"
    streams = streams or (isinstance(schedule, Sm90Gemm) and schedule.scheduler == "stream_k")
    waves = blocks / gpu.multiprocessors
    waves = max(1.0, waves) if streams else float(math.ceil(waves))
    # A block multiplies rows x columns for each step of depth, and reads rows + columns; reads count for about 64 products.
    step = max(rows * columns, 64 * (rows + columns))
    generation = (
        0.6 if isinstance(schedule, Sm90Gemm) else {"tensor": 1.0, "tf32": 1.0, "3xtf32": 3.0, "simt": 8.0}[schedule.math]
    )
    return waves * step / slices * generation * (1.05 if streams else 1.0)
