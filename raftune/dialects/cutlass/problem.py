"""Which workloads CUTLASS's templates compute, read into sizes, operands and what is fused. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from raftune.dialects.chains import PRODUCTS, RESHAPES, Chains
from raftune.dialects.convolutions import Convolution, is_channels_last
from raftune.dialects.epilogue import Epilogue
from raftune.dialects.products import Product, layouts
from raftune.pattern import ANY, Pattern, either, op
from raftune.workload import In, Operator, Out, TensorSpec, Workload

SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of an element, for the types that there are kernels for."""

# What of an activation's name and words the templates compute, by the functor's name there.
_FORWARD = {
    "aten.relu.default": "Relu",
    "aten.silu.default": "Silu",
    "aten.tanh.default": "Tanh",
    "aten.sigmoid.default": "Sigmoid",
}
_BACKWARD = {
    "aten.threshold_backward.default": "ReluBackward",
    "aten.gelu_backward.default": "GeluBackward",
    "aten.silu_backward.default": "SiluBackward",
    "aten.tanh_backward.default": "TanhBackward",
    "aten.sigmoid_backward.default": "SigmoidBackward",
}

BACKWARD_PATTERN = Pattern(either(op(*_BACKWARD)(op(*PRODUCTS)(), ANY)))
"""An activation's backward of a product: the gradient that a layer hands to the activation before it."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Input number ``at``, brought to ``layout`` first if it has not got it. Strides count elements."""

    at: int
    layout: str
    leading: int
    batch: int
    alignment: int


@dataclass(frozen=True, slots=True)
class GemmProblem:
    """``op(alpha * a @ b, beta * source)``; what of the region is left over is done by ``rest`` afterwards.

    ``source`` is ``none``, ``row`` (one number per column) or ``matrix``.
    """

    dtype: str
    batch: int
    m: int
    n: int
    k: int
    a: Matrix
    b: Matrix
    op: str
    source: str
    addend: Matrix | None
    alpha: float
    beta: float
    alignment: int
    rest: Epilogue | None
    result: TensorSpec

    @property
    def kernel_family(self) -> str:
        return "gemm"


@dataclass(frozen=True, slots=True)
class ConvolutionProblem:
    """One or both passes of a plain two-dimensional convolution; ``passes`` are ``forward``, or ``input`` and ``weight``."""

    convolution: Convolution
    dtype: str
    passes: tuple[str, ...]
    op: str
    source: str
    addend: int | None
    rest: Epilogue | None

    @property
    def kernel_family(self) -> str:
        return "convolution"


Problem = GemmProblem | ConvolutionProblem


def problem_of(workload: Workload) -> Problem | None:
    """``None`` for what there is no template for."""
    if not workload.inputs or workload.mutates or any(s.dtype != workload.inputs[0].dtype for s in workload.inputs):
        return None
    if workload.inputs[0].dtype not in SIZES:
        return None
    epilogue = Epilogue.of(workload)
    if epilogue is not None:
        product = Product.of(epilogue.core)
        return _forward_gemm(product, epilogue) if product is not None else _forward_convolution(epilogue)
    convolution = Convolution.of(workload)
    if convolution is not None:
        return _backward_convolution(convolution)
    return _backward_gemm(workload)


def _forward_gemm(product: Product, epilogue: Epilogue) -> GemmProblem | None:
    left, alpha, beta, addend_at, source = epilogue, epilogue.alpha, 1.0, None, "none"
    name: str | None = "Identity"
    if product.bias is not None:
        if epilogue.alpha != 1 or product.beta == 0:
            return None
        alpha, beta, addend_at = product.alpha, product.beta, product.bias
    elif epilogue.addend is not None:
        beta, addend_at, left = epilogue.beta, epilogue.addend, left.without("addend")
    left = left.without("scale")
    addend: Matrix | None = None
    if addend_at is not None:
        found = _source(product, product.workload.inputs[addend_at], addend_at)
        if found is None:
            return None
        source, addend = found
    if left.addend is None and left.activation is not None and (name := _functor(left.activation)) is not None:
        left = left.without("activation")
    return _gemm(product, name or "Identity", source, addend, alpha, beta, left, epilogue.result)


def _backward_gemm(workload: Workload) -> GemmProblem | None:
    operators, chains = workload.operators, Chains(workload)
    last = operators[-1]
    cores = [i for i, o in enumerate(operators) if o.op in PRODUCTS]
    if len(cores) != 1 or last.op not in _BACKWARD or workload.outputs != (Out(len(operators) - 1, 0),):
        return None
    between = [o for i, o in enumerate(operators[:-1]) if i != cores[0]]
    source = chains.behind(last.args[1])
    if any(o.op not in RESHAPES for o in between) or chains.behind(last.args[0]) != Out(cores[0], 0):
        return None
    shape = chains.shape(Out(cores[0], 0))
    name = _functor(last)
    if name is None or not isinstance(source, In) or shape is None:
        return None
    result = _contiguous(workload.inputs[0].dtype, shape)
    product = Product.of(replace(workload, operators=(operators[cores[0]],), outputs=(Out(0, 0),), results=(result,)))
    spec = workload.inputs[source.index]
    if product is None or product.bias is not None or not spec.is_contiguous or spec.numel != result.numel:
        return None
    addend = _matrix(source.index, result, "row")
    return _gemm(product, name, "matrix", addend, 1.0, 0.0, None, workload.results[0])


def _functor(call: Operator) -> str | None:
    """The functor for an activation or its backward; ``None`` if it asks for something that the functor does not do."""
    words = dict(call.kwargs)
    if call.op in ("aten.gelu.default", "aten.gelu_backward.default"):
        names = {"none": "Gelu", "tanh": "GeluTanh"}
        name = names.get(str(words.get("approximate", "none")))
        return None if name is None else name + ("Backward" if "backward" in call.op else "")
    if call.op == "aten.threshold_backward.default" and call.args[2] != 0:
        return None
    return _FORWARD.get(call.op) or _BACKWARD.get(call.op)


def _gemm(
    product: Product,
    name: str,
    source: str,
    addend: Matrix | None,
    alpha: float,
    beta: float,
    rest: Epilogue | None,
    result: TensorSpec,
) -> GemmProblem:
    per_access = 16 // SIZES[product.left.dtype]
    sizes = [product.n] if addend is None or source == "row" else [product.n, addend.leading, addend.batch]
    return GemmProblem(
        dtype=product.left.dtype,
        batch=product.batch or 1,
        m=product.m,
        n=product.n,
        k=product.k,
        a=_matrix(product.a, product.left, layouts(product.left)[0]),
        b=_matrix(product.b, product.right, layouts(product.right)[0]),
        op=name,
        source=source,
        addend=addend,
        alpha=alpha,
        beta=beta,
        alignment=_alignment(sizes, per_access),
        rest=rest,
        result=result,
    )


def in_layout(matrix: Matrix, spec: TensorSpec, layout: str) -> Matrix:
    """``matrix``, of ``spec``, as it is once it has been brought to ``layout``."""
    return matrix if matrix.layout == layout else _matrix(matrix.at, spec, layout)


def _matrix(at: int, spec: TensorSpec, layout: str) -> Matrix:
    """Leading dimension and distance of matrices as they are when the kernel sees them."""
    rows, columns = spec.shape[-2:]
    outer, inner = (rows, columns) if layout == "row" else (columns, rows)
    stride = spec.stride[-2] if layout == "row" else spec.stride[-1]
    batches = math.prod(spec.shape[:-2])
    is_there = _has(spec, layout)
    leading = stride if is_there and outer > 1 else inner
    batch = (spec.stride[0] if is_there else rows * columns) if batches > 1 else 0
    alignment = _alignment([inner, leading, batch], 16 // SIZES[spec.dtype])
    return Matrix(at, layout, leading, batch, alignment)


def _has(spec: TensorSpec, layout: str) -> bool:
    (rows, columns), (row_stride, column_stride) = spec.shape[-2:], spec.stride[-2:]
    if layout == "row":
        return (columns == 1 or column_stride == 1) and (rows == 1 or row_stride >= max(1, columns))
    return (rows == 1 or row_stride == 1) and (columns == 1 or column_stride >= max(1, rows))


def _alignment(sizes: Sequence[int], most: int) -> int:
    """The most elements, a power of two, that can be read at once where all ``sizes`` are distances between reads."""
    alignment = most
    while any(size % alignment for size in sizes):
        alignment //= 2
    return alignment


def _source(product: Product, spec: TensorSpec, at: int) -> tuple[str, Matrix] | None:
    """A summand as the kernel takes it: one number per column, or a whole row-major matrix."""
    batch = product.batch or 1
    if spec.numel == product.n and spec.shape[-1:] == (product.n,) and spec.is_contiguous:
        return "row", Matrix(at, "row", 0, 0, 1)
    whole = batch * product.m * product.n
    if spec.numel == whole and spec.is_contiguous:
        return "matrix", _matrix(at, _contiguous(spec.dtype, (batch, product.m, product.n)), "row")
    return None


def _forward_convolution(epilogue: Epilogue) -> ConvolutionProblem | None:
    convolution = Convolution.of(epilogue.core)
    if convolution is None or not _is_taken(convolution):
        return None
    left, name = epilogue, None
    if left.alpha == 1 and left.addend is None and left.activation is not None:
        name = _functor(left.activation)
        left = left if name is None else left.without("activation")
    source = "none" if convolution.bias is None else "row"
    return ConvolutionProblem(
        convolution, convolution.x.dtype, ("forward",), name or "Identity", source, convolution.bias, left
    )


def _backward_convolution(convolution: Convolution) -> ConvolutionProblem | None:
    if not _is_taken(convolution) or not convolution.is_backward:
        return None
    passes = tuple(name for name, used in zip(("input", "weight"), convolution.mask, strict=False) if used)
    if not passes:
        return None
    return ConvolutionProblem(convolution, convolution.x.dtype, passes, "Identity", "none", None, None)


def _is_taken(convolution: Convolution) -> bool:
    """Two spatial dimensions, one group, channels that are read at least in pairs."""
    if convolution.rank != 2 or not convolution.is_plain:
        return False
    channels = (convolution.x.shape[1], convolution.w.shape[0])
    return all(n % (8 // SIZES[convolution.x.dtype]) == 0 for n in channels)


def channel_alignment(problem: ConvolutionProblem) -> tuple[int, int]:
    """Elements that can be read at once: of the image's channels and of the result's."""
    most = 16 // SIZES[problem.dtype]
    return _alignment([problem.convolution.x.shape[1]], most), _alignment([problem.convolution.w.shape[0]], most)


def rearranged(problem: Problem, specs: Sequence[TensorSpec]) -> int:
    """Elements that are copied into another order before the kernel."""
    if isinstance(problem, GemmProblem):
        matrices = [problem.a, problem.b]
        return sum(specs[m.at].numel for m in matrices if not _has(specs[m.at], m.layout))
    c = problem.convolution
    tensors = [c.input, c.weight, *([] if c.grad_output is None else [c.grad_output])]
    return sum(specs[at].numel for at in tensors if not is_channels_last(specs[at]))


def _contiguous(dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    strides, size = [], 1
    for n in reversed(shape):
        strides.append(size)
        size *= max(n, 1)
    return TensorSpec(dtype, shape, tuple(reversed(strides)))
