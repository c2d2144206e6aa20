"""Calling compiled kernels with torch's tensors on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raftune.dialects.base import Kernel, Unsupported
from raftune.dialects.calls import conform
from raftune.dialects.convolutions import Convolution as Layer
from raftune.dialects.convolutions import gradients, to_layout
from raftune.dialects.cutlass.library import Convolution, Gemm, Library
from raftune.dialects.cutlass.problem import SIZES, ConvolutionProblem, GemmProblem, Matrix
from raftune.dialects.products import relayout
from raftune.workload import Workload

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Operands:
    """Of a product, as the kernel takes them."""

    a: Matrix
    b: Matrix


def gemm_problem(problem: GemmProblem, operands: Operands, slices: int, processors: int) -> Gemm:
    """The struct of a product, without addresses."""
    a, b, addend = operands.a, operands.b, problem.addend
    return Gemm(
        m=problem.m,
        n=problem.n,
        k=problem.k,
        batch=problem.batch,
        lda=a.leading,
        ldb=b.leading,
        lds=0 if addend is None else addend.leading,
        ldo=problem.n,
        batch_a=a.batch,
        batch_b=b.batch,
        batch_source=0 if addend is None else addend.batch,
        batch_out=problem.m * problem.n if problem.batch > 1 else 0,
        alpha=problem.alpha,
        beta=problem.beta,
        splits=slices,
        processors=processors,
    )


def convolution_problem(problem: ConvolutionProblem, slices: int, *, adds: bool) -> Convolution:
    """The struct of one pass, without addresses."""
    c = problem.convolution
    n, channels, height, width = c.x.shape
    rows, columns = c.output_spatial
    return Convolution(
        n=n,
        h=height,
        w=width,
        c=channels,
        k=c.w.shape[0],
        r=c.kernel[0],
        s=c.kernel[1],
        p=rows,
        q=columns,
        pad_h=c.padding[0],
        pad_w=c.padding[1],
        stride_h=c.stride[0],
        stride_w=c.stride[1],
        dilation_h=c.dilation[0],
        dilation_w=c.dilation[1],
        splits=slices,
        alpha=1.0,
        beta=1.0 if adds else 0.0,
    )


def gemm_kernel(workload: Workload, problem: GemmProblem, operands: Operands, library: Library, slices: int) -> Kernel:
    """Raises :class:`Unsupported` if the kernel refuses the problem."""
    import torch

    a, b, addend = operands.a, operands.b, problem.addend
    prepare_a, prepare_b = _prepare(workload, a), _prepare(workload, b)
    shape = (problem.batch, problem.m, problem.n) if problem.batch > 1 else (problem.m, problem.n)
    fixed = gemm_problem(problem, operands, slices, 0)
    _check(library, fixed)

    def multiply(*inputs: Tensor) -> Tensor:
        left, right = prepare_a(inputs[a.at]), prepare_b(inputs[b.at])
        out = torch.empty(shape, dtype=left.dtype, device=left.device)
        call = Gemm.from_buffer_copy(fixed)
        call.processors = torch.cuda.get_device_properties(left.device).multi_processor_count
        call.a, call.b, call.out = left.data_ptr(), right.data_ptr(), out.data_ptr()
        if addend is not None:
            source = _aligned(inputs[addend.at])
            call.source = source.data_ptr()
        _launch(library, call, left.device)
        return out

    if problem.rest is not None:
        return problem.rest.after(multiply)
    fix, result = conform(problem.result), problem.result.shape
    return lambda *inputs: fix(multiply(*inputs).view(result))


def convolution_kernel(workload: Workload, problem: ConvolutionProblem, passes: dict[str, tuple[Library, int]]) -> Kernel:
    """From the libraries of its passes with their slices. Raises :class:`Unsupported` if one of them refuses the problem."""
    layer = problem.convolution
    calls = {name: _pass(problem, library, slices, name) for name, (library, slices) in passes.items()}
    if layer.is_backward:
        # The gradients of the result, the image and the filter, in the order in which the kernels read them.
        return gradients(
            layer,
            (lambda go, x, w: calls["input"](go, w, None)) if "input" in calls else None,
            (lambda go, x, w: calls["weight"](go, x, None)) if "weight" in calls else None,
        )
    forward, x_at, w_at, bias_at = calls["forward"], layer.input, layer.weight, problem.addend
    assert problem.rest is not None
    return problem.rest.after(lambda *inputs: forward(inputs[x_at], inputs[w_at], None if bias_at is None else inputs[bias_at]))


def _pass(
    problem: ConvolutionProblem, library: Library, slices: int, name: str
) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    import torch

    layer, convert = problem.convolution, to_layout(2, "channels_last")
    fixed = convolution_problem(problem, slices, adds=name == "forward" and problem.source == "row")
    _check(library, fixed)
    shape = _result_shape(layer, name)

    def compute(first: Tensor, second: Tensor, source: Tensor | None) -> Tensor:
        a, b = _aligned(convert(first)), _aligned(convert(second))
        out = torch.empty(shape, dtype=a.dtype, device=a.device, memory_format=torch.channels_last)
        call = Convolution.from_buffer_copy(fixed)
        call.a, call.b, call.out = a.data_ptr(), b.data_ptr(), out.data_ptr()
        if source is not None:
            source = _aligned(source)
            call.source = source.data_ptr()
        _launch(library, call, a.device)
        return out

    return compute


def _result_shape(layer: Layer, name: str) -> tuple[int, ...]:
    if name == "forward":
        return (layer.x.shape[0], layer.w.shape[0], *layer.output_spatial)
    return layer.x.shape if name == "input" else layer.w.shape


def _launch(library: Library, call: Gemm | Convolution, device: object) -> None:
    import torch

    size = library.workspace(call)
    scratch = torch.empty(size, dtype=torch.uint8, device=device) if size else None  # type: ignore[call-overload]
    library.run(call, None if scratch is None else scratch.data_ptr(), torch.cuda.current_stream(device).cuda_stream)  # type: ignore[arg-type]


def _check(library: Library, problem: Gemm | Convolution) -> None:
    if (refusal := library.refusal(problem)) is not None:
        raise Unsupported(f"CUTLASS's kernel cannot compute this problem: {refusal}")


def _prepare(workload: Workload, matrix: Matrix) -> Callable[[Tensor], Tensor]:
    change = relayout(workload.inputs[matrix.at], matrix.layout)
    return _aligned if change is None else change


def _aligned(tensor: Tensor) -> Tensor:
    """A view into the middle of memory may start where 16 bytes cannot be read at once: it is copied."""
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def alignment_bytes(problem: GemmProblem) -> int:
    """What is read at once, in bytes, of the operand that is read in the smallest parts."""
    return min(problem.a.alignment, problem.b.alignment, problem.alignment) * SIZES[problem.dtype]
