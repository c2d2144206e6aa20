"""One kernel to compile: a checked schedule with what follows from the workload. All that is rendered comes from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from raftune.dialects.base import BuildError, Unsupported
from raftune.dialects.cutlass.problem import SIZES, ConvolutionProblem, GemmProblem, Matrix, channel_alignment, in_layout
from raftune.dialects.cutlass.schema import Schedule, Sm80Convolution, Sm80Gemm, Sm90Gemm, to_config
from raftune.workload import TensorSpec, canonical_json, digest_text


@dataclass(frozen=True)
class KernelSpec:
    """``layouts`` and ``alignments`` are those of the two operands, the last alignment that of the result.

    ``problem`` is ``gemm`` or the pass of a convolution (``forward``, ``input``, ``weight``); ``strided`` says that the
    convolution has a stride.
    """

    schedule: Schedule
    dtype: str
    problem: str
    layouts: tuple[str, str]
    alignments: tuple[int, int, int]
    op: str
    source: str
    strided: bool = False

    @cached_property
    def canonical(self) -> str:
        """Canonical JSON of everything that the compiled kernel depends on, beside the templates and the device."""
        return canonical_json(
            {
                "config": to_config(self.schedule),
                "dtype": self.dtype,
                "problem": self.problem,
                "layouts": list(self.layouts),
                "alignments": list(self.alignments),
                "op": self.op,
                "source": self.source,
                "strided": self.strided,
            }
        )

    @cached_property
    def symbol(self) -> str:
        """What the functions of the kernel are called in its library, before what each of them does."""
        return f"raftune_{digest_text(self.canonical)}"


def gemm_spec(problem: GemmProblem, schedule: Schedule, specs: tuple[TensorSpec, ...]) -> tuple[KernelSpec, Matrix, Matrix]:
    """The kernel, and its operands as it takes them. Raises :class:`BuildError` if the schedule is for something else."""
    if isinstance(schedule, Sm80Convolution):
        raise BuildError(f"config kernel={schedule.kernel!r} is for convolutions, the workload is a matrix product")
    _check_math(problem.dtype, schedule.math)
    a, b = problem.a, problem.b
    if isinstance(schedule, Sm90Gemm) and problem.dtype == "float32":
        # wgmma reads tf32 along the depth only.
        a, b = in_layout(a, specs[a.at], "row"), in_layout(b, specs[b.at], "column")
    alignments = (a.alignment, b.alignment, problem.alignment)
    if isinstance(schedule, Sm90Gemm):
        if min(alignments) * SIZES[problem.dtype] < 16:
            raise Unsupported(f"TMA needs rows of a multiple of 16 bytes; elements that can be read at once: {alignments}")
    else:
        _check_sm80(problem, schedule, alignments)
    if isinstance(schedule, Sm80Gemm) and schedule.math == "simt":
        alignments = (1, 1, 1)
    spec = KernelSpec(schedule, problem.dtype, "gemm", (a.layout, b.layout), alignments, problem.op, problem.source)
    return spec, a, b


def convolution_spec(problem: ConvolutionProblem, schedule: Schedule, which: str) -> KernelSpec:
    """The kernel of one pass. Raises :class:`BuildError` if the schedule is for something else."""
    if not isinstance(schedule, Sm80Convolution):
        raise BuildError(f"config kernel={schedule.kernel!r} is for matrix products, the workload is a convolution")
    _check_math(problem.dtype, schedule.math)
    image, result = channel_alignment(problem)
    strided = any(n != 1 for n in problem.convolution.stride)
    alignments = {
        "forward": (image, image, result),
        "input": (result, image, image),
        "weight": (result, image, image),
    }[which]
    if which == "input" and strided and schedule.slices > 1:
        raise Unsupported("the input gradient of a strided convolution cannot be split")
    last = which == problem.passes[-1] and which == "forward"
    op, source = (problem.op, problem.source) if last else ("Identity", "none")
    return KernelSpec(schedule, problem.dtype, which, ("nhwc", "nhwc"), alignments, op, source, strided)


def _check_math(dtype: str, math: str) -> None:
    allowed = ("tf32", "3xtf32", "simt") if dtype == "float32" else ("tensor",)
    if math not in allowed:
        raise BuildError(f"config math={math!r} with {dtype}: expected one of {', '.join(map(repr, allowed))}")


def _check_sm80(problem: GemmProblem, schedule: Sm80Gemm, alignments: tuple[int, int, int]) -> None:
    if schedule.slices > 1 and (problem.batch > 1 or problem.op.endswith("Backward")):
        raise Unsupported("k is split only for single products whose result is added up before anything is done to it")
    # Asynchronous copies move at least four bytes.
    if schedule.math != "simt" and schedule.stages > 2 and min(alignments[:2]) * SIZES[problem.dtype] < 4:
        raise Unsupported(f"more than two stages need pairs of elements; that can be read at once: {alignments}")
