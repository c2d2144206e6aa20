"""C++ for kernels: lines that name CUTLASS's types, in which every word is from the tables here, or a checked number."""

from __future__ import annotations

from collections.abc import Sequence

from raftune.dialects.cutlass.schema import Sm80Convolution, Sm80Gemm, Sm90Gemm
from raftune.dialects.cutlass.spec import KernelSpec

_ELEMENTS = {"float32": "float", "float16": "cutlass::half_t", "bfloat16": "cutlass::bfloat16_t"}
_LAYOUTS = {"row": "cutlass::layout::RowMajor", "column": "cutlass::layout::ColumnMajor"}
_SOURCES = {"none": "kNone", "row": "kRow", "matrix": "kMatrix"}
_OPS = {
    name: f"raftune::op::{name}"
    for base in ("Identity", "Relu", "Gelu", "GeluTanh", "Silu", "Tanh", "Sigmoid")
    for name in (base, f"{base}Backward")
    if name != "IdentityBackward"
}
_MATHS = {
    "tensor": "cutlass::arch::OpMultiplyAdd",
    "tf32": "cutlass::arch::OpMultiplyAdd",
    "3xtf32": "cutlass::arch::OpMultiplyAddFastF32",
    "simt": "cutlass::arch::OpMultiplyAdd",
}
_INSTRUCTIONS = {"tensor": (16, 8, 16), "tf32": (16, 8, 8), "3xtf32": (16, 8, 8), "simt": (1, 1, 1)}
_PASSES = {"forward": "kFprop", "input": "kDgrad", "weight": "kWgrad"}
_SCHEDULES = {
    "pingpong": ("KernelTmaWarpSpecializedPingpong", "TmaWarpSpecialized"),
    "cooperative": ("KernelTmaWarpSpecializedCooperative", "TmaWarpSpecializedCooperative"),
}
_SCHEDULERS = {"persistent": "PersistentScheduler", "stream_k": "StreamKScheduler"}


def translation_unit(specs: Sequence[KernelSpec]) -> str:
    """One source file with all of ``specs``: the headers are read once."""
    lines = [f'#include "{header}"' for header in sorted({_header(spec) for spec in specs})]
    for spec in specs:
        structure = "Gemm" if spec.problem == "gemm" else "Convolution"
        text = spec.canonical.replace("\\", "\\\\").replace('"', '\\"')
        lines += [
            "",
            f"using {spec.symbol} = {_type(spec)};",
            f'RAFTUNE_EXPORT({spec.symbol}, {spec.symbol}, {structure}, "{text}")',
        ]
    return "\n".join(lines) + "\n"


def _header(spec: KernelSpec) -> str:
    return {Sm80Gemm: "gemm_sm80.cuh", Sm90Gemm: "gemm_sm90.cuh", Sm80Convolution: "convolution_sm80.cuh"}[type(spec.schedule)]


def _type(spec: KernelSpec) -> str:
    schedule = spec.schedule
    if isinstance(schedule, Sm90Gemm):
        return _sm90_gemm(spec, schedule)
    return _sm80_gemm(spec, schedule) if isinstance(schedule, Sm80Gemm) else _sm80_convolution(spec, schedule)


def _sm80_gemm(spec: KernelSpec, schedule: Sm80Gemm) -> str:
    if schedule.split == "stream":
        swizzle = "cutlass::gemm::threadblock::ThreadblockSwizzleStreamK"
    else:
        swizzle = f"cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<{schedule.swizzle:d}>"
    (a, b), (align_a, align_b, align_out) = spec.layouts, spec.alignments
    arguments = [
        _ELEMENTS[spec.dtype],
        *(_LAYOUTS[a], f"{align_a:d}", _LAYOUTS[b], f"{align_b:d}", f"{align_out:d}"),
        *_blocks(schedule),
        f"{schedule.stages:d}",
        swizzle,
        *_epilogue(spec),
    ]
    return f"raftune::GemmSm80<{', '.join(arguments)}>"


def _sm80_convolution(spec: KernelSpec, schedule: Sm80Convolution) -> str:
    namespace = "cutlass::conv"
    strided_gradient = spec.problem == "input" and spec.strided
    if strided_gradient:
        swizzle = f"{namespace}::threadblock::StridedDgradIdentityThreadblockSwizzle<{schedule.swizzle:d}>"
    else:
        swizzle = f"cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<{schedule.swizzle:d}>"
    align_a, align_b, align_out = spec.alignments
    unit = spec.problem == "input" and not spec.strided
    arguments = [
        f"{namespace}::Operator::{_PASSES[spec.problem]}",
        _ELEMENTS[spec.dtype],
        *(f"{align_a:d}", f"{align_b:d}", f"{align_out:d}"),
        *_blocks(schedule),
        f"{schedule.stages:d}",
        swizzle,
        f"{namespace}::IteratorAlgorithm::kOptimized",
        f"{namespace}::StrideSupport::{'kUnity' if unit else 'kStrided'}",
        *_epilogue(spec),
    ]
    return f"raftune::ConvolutionSm80<{', '.join(arguments)}>"


def _blocks(schedule: Sm80Gemm | Sm80Convolution) -> list[str]:
    """Class of the mathematics, the tile, the warp's share of it, and the instruction."""
    rows, columns, depth = schedule.tile
    warp_rows, warp_columns = schedule.warp
    return [
        f"cutlass::arch::{'OpClassSimt' if schedule.math == 'simt' else 'OpClassTensorOp'}",
        _MATHS[schedule.math],
        _shape(rows, columns, depth),
        _shape(warp_rows, warp_columns, depth),
        _shape(*_INSTRUCTIONS[schedule.math]),
    ]


def _sm90_gemm(spec: KernelSpec, schedule: Sm90Gemm) -> str:
    (a, b), (align_a, align_b, align_out) = spec.layouts, spec.alignments
    mainloop, epilogue = _SCHEDULES[schedule.schedule]
    arguments = [
        _ELEMENTS[spec.dtype],
        *(_LAYOUTS[a], f"{align_a:d}", _LAYOUTS[b], f"{align_b:d}", f"{align_out:d}"),
        f"cute::Shape<{', '.join(f'cute::_{n:d}' for n in schedule.tile)}>",
        f"cute::Shape<{', '.join(f'cute::_{n:d}' for n in (*schedule.cluster, 1))}>",
        f"cutlass::gemm::{mainloop}",
        f"cutlass::epilogue::{epilogue}",
        f"cutlass::gemm::{_SCHEDULERS[schedule.scheduler]}",
        *_epilogue(spec),
    ]
    return f"raftune::GemmSm90<{', '.join(arguments)}>"


def _epilogue(spec: KernelSpec) -> tuple[str, str]:
    return _OPS[spec.op], f"raftune::Source::{_SOURCES[spec.source]}"


def _shape(rows: int, columns: int, depth: int) -> str:
    return f"cutlass::gemm::GemmShape<{rows:d}, {columns:d}, {depth:d}>"
