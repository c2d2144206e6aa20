"""Matrix products through oneDNN's inner product and convolution, which torch itself only uses for low precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from raftune.dialects.base import BuildError, Kernel
from raftune.dialects.calls import check_keys, choice, conform
from raftune.dialects.epilogue import Epilogue
from raftune.dialects.onednn.packing import choose
from raftune.dialects.onednn.postop import PostOp
from raftune.dialects.products import Product, add_bias
from raftune.workload import Config

if TYPE_CHECKING:
    from torch import Tensor

_RESULTS = ("row", "column")
_WEIGHTS = ("plain", "packed", "packed_once")
_LOOP_LIMIT = 64


def configs(product: Product) -> list[Config]:
    if product.batch is not None:
        found: list[Config] = [{"kernel": "grouped_convolution"}]
        if product.batch <= _LOOP_LIMIT:
            found += [{"kernel": "linear_loop", "result": result} for result in _RESULTS]
        return found
    found = [
        {"kernel": "linear", "result": result, "weight": weight} for weight in _WEIGHTS for result in _results(product, weight)
    ]
    return [*found, {"kernel": "convolution"}]


def build(product: Product, config: Config, epilogue: Epilogue) -> Kernel:
    batched = product.batch is not None
    kernel = choice(config, "kernel", ("grouped_convolution", "linear_loop") if batched else ("linear", "convolution"))
    if kernel == "linear":
        check_keys(config, ("kernel", "result", "weight"))
        return _linear(product, choice(config, "result", _RESULTS), choice(config, "weight", _WEIGHTS), epilogue)
    if kernel == "linear_loop":
        check_keys(config, ("kernel", "result"))
        multiply = _linear_loop(product, choice(config, "result", _RESULTS))
    else:
        check_keys(config, ("kernel",))
        multiply = _grouped_convolution(product) if batched else _convolution(product)
    return epilogue.after(_finished(product, add_bias(product, multiply)))


def _results(product: Product, weight: str) -> tuple[str, ...]:
    """Only a matrix that does not change can be packed once: the right one for a row result, the left for a column."""
    orders = _RESULTS if min(product.m, product.n) > 1 else ("row",)
    if weight != "packed_once":
        return orders
    constant = {"row": product.right.constant, "column": product.left.constant}
    return tuple(order for order in orders if constant[order])


def _finished(product: Product, kernel: Kernel) -> Kernel:
    fix = conform(product.result)
    return lambda *inputs: fix(kernel(*inputs))


def _linear(product: Product, result: str, weight: str, epilogue: Epilogue) -> Kernel:
    import torch

    if weight == "packed_once" and result not in _results(product, weight):
        raise BuildError(f"config weight={weight!r} needs a constant weight")
    linear: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
    reorder: Callable[..., Tensor] = torch.ops.mkldnn._reorder_linear_weight.default
    rows = product.m if result == "row" else product.n
    pack = choose(lambda w: reorder(w, rows), weight)
    if result == "row" and (product.bias is None or _is_vector(product)):
        return _fused_linear(product, pack, epilogue)

    plain = PostOp.of(None).arguments
    fusible = product.bias is None and epilogue.alpha == 1 and epilogue.addend is None
    after = PostOp.of(epilogue.activation if fusible else None).arguments
    left = epilogue.without("activation") if fusible else epilogue

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        return linear(a, pack(b.t()), None, *plain)

    def multiply_swapped(a: Tensor, b: Tensor) -> Tensor:
        return linear(b.t(), pack(a), None, *after).t().contiguous()

    if result == "row":
        return epilogue.after(_finished(product, add_bias(product, multiply)))
    return left.after(_finished(product, add_bias(product, multiply_swapped)))


def _fused_linear(product: Product, pack: Callable[[Tensor], Tensor], epilogue: Epilogue) -> Kernel:
    """A product in row order with what oneDNN can take: one vector per column, then a whole matrix or the activation."""
    import torch

    a_at, b_at, left = product.a, product.b, epilogue
    bias = _bias(product.bias, None, 1.0)
    if product.bias is None and epilogue.alpha == 1 and _is_row(product, epilogue):
        bias, left = _bias(epilogue.addend, product.n, epilogue.beta), epilogue.without("addend")
    addend, shape = left.addend, product.result.shape
    if addend is not None and left.alpha == left.beta == 1 and left.shape == product.workload.inputs[addend].shape:
        binary: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.binary
        return left.without("addend").after(
            lambda *inputs: binary(inputs[a_at], inputs[addend].reshape(shape), pack(inputs[b_at].t()), bias(inputs), "add")
        )
    linear: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
    fusible = left.alpha == 1 and addend is None
    name, scalars, algorithm = PostOp.of(left.activation if fusible else None).arguments
    return (left.without("activation") if fusible else left).after(
        lambda *inputs: linear(inputs[a_at], pack(inputs[b_at].t()), bias(inputs), name, scalars, algorithm)
    )


def _bias(at: int | None, columns: int | None, scale: float) -> Callable[[tuple[Tensor, ...]], Tensor | None]:
    """Where the kernel's bias comes from: input number ``at``, brought to a vector of ``columns`` and scaled."""
    if at is None:
        return lambda inputs: None
    if columns is None:
        return lambda inputs: inputs[at]
    return lambda inputs: inputs[at].reshape(columns) if scale == 1 else inputs[at].reshape(columns) * scale


def _is_vector(product: Product) -> bool:
    """The bias is one number per column and nothing is scaled: the kernel can add it itself."""
    spec = product.workload.inputs[product.bias or 0]
    return product.alpha == 1 and product.beta == 1 and spec.shape == (product.n,) and spec.is_contiguous


def _is_row(product: Product, epilogue: Epilogue) -> bool:
    """There is a summand, and it is one number per column."""
    if epilogue.addend is None:
        return False
    spec = product.workload.inputs[epilogue.addend]
    return spec.numel == product.n and spec.shape[-1:] == epilogue.shape[-1:] == (product.n,)


def _convolution(product: Product) -> Callable[[Tensor, Tensor], Tensor]:
    """Rows as pixels of a channels-last image, columns as output channels of a 1x1 convolution."""
    import torch

    convolve: Callable[..., Tensor] = torch.ops.aten.mkldnn_convolution.default
    m, k, n = product.m, product.k, product.n

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        image = a.contiguous().as_strided((1, k, m, 1), (m * k, 1, k, k))
        return convolve(image, b.t().reshape(n, k, 1, 1), None, [0, 0], [1, 1], [1, 1], 1).view(n, m).t()

    return multiply


def _grouped_convolution(product: Product) -> Callable[[Tensor, Tensor], Tensor]:
    """Every batch entry as one group of a 1x1 convolution: the right matrix is the image, the left one the weight."""
    import torch

    convolve: Callable[..., Tensor] = torch.ops.aten.mkldnn_convolution.default
    batch, m, k, n = product.batch or 1, product.m, product.k, product.n

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        image, weight = b.reshape(1, batch * k, n, 1), a.reshape(batch * m, k, 1, 1)
        return convolve(image, weight, None, [0, 0], [1, 1], [1, 1], batch).reshape(batch, m, n)

    return multiply


def _linear_loop(product: Product, result: str) -> Callable[[Tensor, Tensor], Tensor]:
    import torch

    linear: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
    plain = PostOp.of(None).arguments

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([linear(x, y.t(), None, *plain) for x, y in zip(a.unbind(0), b.unbind(0), strict=True)])

    def multiply_swapped(a: Tensor, b: Tensor) -> Tensor:
        parts = [linear(y.t(), x, None, *plain).t() for x, y in zip(a.unbind(0), b.unbind(0), strict=True)]
        return torch.stack(parts)

    return multiply if result == "row" else multiply_swapped
