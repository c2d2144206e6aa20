"""Floating-point operations and memory traffic of a workload, estimated from its specs alone (torch is not needed).

The counts of products, convolutions and attention are those of PyTorch's ``torch.utils.flop_counter``: a multiply-add is two
operations. Everything else is counted per element with a rough factor, enough to order workloads by size. Shapes inside a
region of several operators are inferred for these operators and taken to be element-wise elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from raftune.workload import Arg, In, Operator, Out, TensorSpec, Workload

Shape = tuple[int, ...]

# Bytes of an element by torch's dtype name; anything unknown counts as four.
_ITEM_BYTES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}

# Position of the first matrix among the arguments.
_PRODUCTS = {"mm": 0, "bmm": 0, "matmul": 0, "addmm": 1, "baddbmm": 1}

# Operations per element for families that are more than one pass of arithmetic.
_PER_ELEMENT = {"norm": 8.0, "softmax": 5.0, "optimizer": 12.0, "activation": 8.0}

FAMILIES = (
    "product",
    "convolution",
    "convolution_backward",
    "attention",
    "attention_backward",
    "norm",
    "softmax",
    "activation",
    "pool",
    "embedding",
    "loss",
    "optimizer",
    "reduction",
    "other",
)
"""Stable list of operator families; the cost model's features name them."""

_WORDS = (
    ("pool", ("pool",)),
    ("optimizer", ("_fused_", "_foreach_")),
    ("norm", ("norm",)),
    ("loss", ("nll_loss", "mse_loss", "cross_entropy", "binary_cross", "huber_loss", "l1_loss")),
    ("softmax", ("softmax",)),
    ("embedding", ("embedding", "index_put", "index_select", "gather", "scatter")),
    ("other", ("relu",)),
    ("activation", ("gelu", "silu", "sigmoid", "tanh", "exp", "erf", "elu", "mish", "softplus")),
    ("reduction", ("sum", "mean", "var", "amax", "amin", "argmax", "argmin", "prod", "cumsum")),
)


def base_name(op: str) -> str:
    """``mm`` of ``aten.mm.default``."""
    parts = op.split(".")
    return parts[1] if len(parts) > 1 else op


def family_of(op: str) -> str:
    """The entry of :data:`FAMILIES` for an overload's full name."""
    name = base_name(op)
    if name in _PRODUCTS or name == "linear":
        return "product"
    backward = "backward" in name
    if "attention" in name:
        return "attention_backward" if backward else "attention"
    if "conv" in name:
        return "convolution_backward" if backward else "convolution"
    return next((family for family, words in _WORDS if any(word in name for word in words)), "other")


def flops(workload: Workload) -> float:
    """Floating-point operations of one call."""
    shapes: list[Shape] = []
    total = 0.0
    for operator in workload.operators:
        count, shape = _operator(operator, workload, shapes)
        total += count
        shapes.append(shape)
    return total


def bytes_moved(workload: Workload) -> float:
    """Bytes read and written by one call if every distinct element moves once; elements of an expanded tensor are one."""
    read = sum(_bytes(spec) for spec in workload.inputs)
    written = sum(_bytes(spec) for spec in workload.results) + sum(_bytes(workload.inputs[i]) for i in workload.mutates)
    return float(read + written)


def item_bytes(dtype: str) -> int:
    return _ITEM_BYTES.get(dtype, 4)


def product_sizes(workload: Workload) -> tuple[int, int, int, int] | None:
    """``(batch, m, n, k)`` of a region's first matrix product whose operands are inputs of the region; ``None`` if none is."""
    for operator in workload.operators:
        sizes = _product(operator, [_shape(a, workload, ()) for a in operator.args])
        if sizes is not None:
            return sizes
    return None


def _operator(operator: Operator, workload: Workload, known: Sequence[Shape]) -> tuple[float, Shape]:
    shapes = [_shape(arg, workload, known) for arg in operator.args]
    family = family_of(operator.op)
    largest = max(_tensor_shapes(operator.args, workload, known), key=math.prod, default=())
    sizes = _product(operator, shapes)
    if sizes is not None:
        batch, m, n, k = sizes
        return 2.0 * batch * m * n * k, (batch, m, n) if batch > 1 else (m, n)
    if family == "convolution" and len(shapes) > 1 and shapes[0] and shapes[1]:
        transposed = _literal(operator.args, 6, default=False) is True
        result = _convolved(operator, shapes[0], shapes[1], transposed=transposed)
        return _convolution(shapes[0] if transposed else result, shapes[0], shapes[1]), result
    if family == "convolution_backward" and len(shapes) > 2 and shapes[0] and shapes[1] and shapes[2]:
        transposed = _literal(operator.args, 7, default=False) is True
        one = _convolution(shapes[1] if transposed else shapes[0], shapes[1], shapes[2])
        mask = _literal(operator.args, 10, default=(True, True, True))
        wanted = sum(m is True for m in mask[:2]) if isinstance(mask, tuple) else 2
        return one * wanted, shapes[1]
    if family in ("attention", "attention_backward"):
        first = 1 if family == "attention_backward" else 0
        query, key, value = (shapes[i] if i < len(shapes) else None for i in range(first, first + 3))
        if query and key and value and min(len(query), len(key), len(value)) >= 2:
            # Forward: scores and weighted sum. Backward: scores again, and the gradients of v, of the scores, of q and of k.
            widths = query[-1] + value[-1] if first == 0 else 3 * query[-1] + 2 * value[-1]
            return 2.0 * math.prod(query[:-1]) * key[-2] * widths, (*query[:-1], value[-1])
    elements = sum(math.prod(s) for s in _tensor_shapes(operator.args, workload, known)) if family == "optimizer" else 0
    # A fused optimizer lists parameters, gradients and two or three states: about four tensors for each parameter.
    count = elements / 4 if elements else math.prod(largest)
    return _PER_ELEMENT.get(family, 1.0) * count, largest


def _product(operator: Operator, shapes: Sequence[Shape | None]) -> tuple[int, int, int, int] | None:
    name = base_name(operator.op)
    if name != "linear" and name not in _PRODUCTS:
        return None
    first = _PRODUCTS.get(name, 0)
    if len(shapes) < first + 2:
        return None
    a, b = shapes[first], shapes[first + 1]
    if a is None or b is None or not a or len(b) < 2:
        return None
    k = a[-1]
    if name == "linear":
        return 1, math.prod(a[:-1]), b[0], k
    return max(1, math.prod(a[:-2])), a[-2] if len(a) > 1 else 1, b[-1], k


def _convolution(positions: Shape, data: Shape, weight: Shape) -> float:
    # Every weight is used once at every position of the output (of the input when transposed) of every image.
    return 2.0 * data[0] * math.prod(positions[2:]) * math.prod(weight)


def _convolved(operator: Operator, data: Shape, weight: Shape, *, transposed: bool) -> Shape:
    spatial = len(data) - 2
    stride, padding, dilation = (_sizes(operator.args, at, spatial, fill) for at, fill in ((3, 1), (4, 0), (5, 1)))
    extra = _sizes(operator.args, 7, spatial, 0)
    groups = _literal(operator.args, 8, default=1)
    sizes = []
    for i, size in enumerate(data[2:]):
        reach = dilation[i] * (weight[2 + i] - 1)
        if transposed:
            sizes.append((size - 1) * stride[i] - 2 * padding[i] + reach + extra[i] + 1)
        else:
            sizes.append((size + 2 * padding[i] - reach - 1) // max(stride[i], 1) + 1)
    channels = weight[1] * groups if transposed and isinstance(groups, int) else weight[0]
    return (data[0], channels, *sizes)


def _sizes(args: Sequence[Arg], at: int, count: int, fill: int) -> list[int]:
    value = _literal(args, at, default=fill)
    found = (
        [v for v in value if isinstance(v, int)] if isinstance(value, tuple) else [value if isinstance(value, int) else fill]
    )
    return (found or [fill]) * count if len(found) < count else found


def _literal(args: Sequence[Arg], at: int, *, default: Arg) -> Arg:
    return args[at] if at < len(args) and args[at] is not None else default


def _shape(arg: Arg, workload: Workload, known: Sequence[Shape]) -> Shape | None:
    match arg:
        case In(index):
            return workload.inputs[index].shape if index < len(workload.inputs) else None
        case Out(node, _):
            return known[node] if node < len(known) else None
    return None


def _tensor_shapes(args: Sequence[Arg], workload: Workload, known: Sequence[Shape]) -> list[Shape]:
    found: list[Shape] = []
    for arg in args:
        if isinstance(arg, tuple):
            found.extend(_tensor_shapes(arg, workload, known))
        elif (shape := _shape(arg, workload, known)) is not None:
            found.append(shape)
    return found


def _bytes(spec: TensorSpec) -> int:
    distinct = math.prod(size for size, stride in zip(spec.shape, spec.stride, strict=True) if stride != 0 or size == 0)
    return distinct * item_bytes(spec.dtype)
