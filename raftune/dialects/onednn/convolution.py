"""Convolutions through oneDNN's own operators, forward and backward, with the memory formats that torch does not choose."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING

from raftune.dialects.base import BuildError, Kernel
from raftune.dialects.calls import check_keys, choice
from raftune.dialects.convolutions import LAYOUTS, Convolution, Gradient, gradients, to_layout
from raftune.dialects.epilogue import Epilogue
from raftune.dialects.onednn.packing import choose
from raftune.dialects.onednn.postop import PostOp
from raftune.workload import Config

if TYPE_CHECKING:
    from torch import Tensor

_WEIGHTS = ("plain", "packed", "packed_once")


def configs(c: Convolution) -> list[Config]:
    if c.is_backward:
        return _backward_configs(c)
    layouts = (c.layout, c.other_layout) if c.rank == 2 else (c.layout,)
    if c.transposed:
        return [{"kernel": "transposed", "layout": layout} for layout in layouts]
    found: list[Config] = [
        {"kernel": "convolution", "layout": layout, "weight": weight}
        for weight in _WEIGHTS
        for layout in layouts
        if weight != "packed_once" or c.w.constant
        if weight == "plain" or c.rank == 2
    ]
    if _is_rows(c):
        found += [{"kernel": "linear", "weight": weight} for weight in _WEIGHTS if weight != "packed_once" or c.w.constant]
    return found


def build(c: Convolution, config: Config, epilogue: Epilogue | None) -> Kernel:
    if epilogue is None or c.is_backward:
        return _build_backward(c, config)
    kernels = {"convolution": not c.transposed, "linear": _is_rows(c), "transposed": c.transposed}
    kernel = choice(config, "kernel", tuple(name for name, applies in kernels.items() if applies))
    keys = {"convolution": ("layout", "weight"), "linear": ("weight",), "transposed": ("layout",)}[kernel]
    check_keys(config, ("kernel", *keys))
    if config.get("weight") == "packed_once" and not c.w.constant:
        raise BuildError("config weight='packed_once' needs a constant weight")
    x_at, w_at, bias_at = c.input, c.weight, c.bias
    if kernel == "convolution" and _is_residual(c, epilogue):
        return _with_residual(c, config, epilogue)
    fusible = epilogue.alpha == 1 and epilogue.addend is None
    postop = PostOp.of(epilogue.activation if fusible else None)
    forward = {"convolution": _convolution, "linear": _linear, "transposed": _transposed}[kernel](c, config, postop)
    left = epilogue.without("activation") if fusible else epilogue
    if bias_at is None:
        return left.after(lambda *inputs: forward(inputs[x_at], inputs[w_at], None))
    return left.after(lambda *inputs: forward(inputs[x_at], inputs[w_at], inputs[bias_at]))


def _is_residual(c: Convolution, epilogue: Epilogue) -> bool:
    """The summand is a whole image of the result's shape, and nothing is scaled: oneDNN adds it itself."""
    if epilogue.addend is None or epilogue.alpha != 1 or epilogue.beta != 1:
        return False
    return c.workload.inputs[epilogue.addend].shape == epilogue.shape and c.rank == 2


def _with_residual(c: Convolution, config: Config, epilogue: Epilogue) -> Kernel:
    import torch

    convolve: Callable[..., Tensor] = torch.ops.mkldnn._convolution_pointwise.binary
    x_at, w_at, bias_at, addend = c.input, c.weight, c.bias, epilogue.addend
    assert addend is not None
    # The summand is read in the result's order, so both are given one memory format whatever the summand has.
    convert, prepare = to_layout(c.rank, choice(config, "layout", LAYOUTS)), _weight(c, config)
    rest = (list(c.padding), list(c.stride), list(c.dilation), c.groups, "add", 1.0)
    relu = epilogue.activation is not None and epilogue.activation.op == "aten.relu.default"
    after: tuple[str | None, list[float], None] = ("relu" if relu else None, [], None)

    def kernel(*inputs: Tensor) -> Tensor:
        bias = None if bias_at is None else inputs[bias_at]
        return convolve(convert(inputs[x_at]), convert(inputs[addend]), prepare(inputs[w_at]), bias, *rest, *after)

    return epilogue.without("addend", *(("activation",) if relu else ())).after(kernel)


Forward = Callable[["Tensor", "Tensor", "Tensor | None"], "Tensor"]


def _is_rows(c: Convolution) -> bool:
    return c.is_pointwise and c.rank == 2


def _layout(c: Convolution, config: Config) -> Callable[[Tensor], Tensor]:
    layout = choice(config, "layout", LAYOUTS)
    if layout == "channels_last" and c.rank == 1:
        raise BuildError("config layout='channels_last' needs a convolution over 2 or 3 dimensions")
    return (lambda tensor: tensor) if layout == c.layout else to_layout(c.rank, layout)


def _convolution(c: Convolution, config: Config, postop: PostOp) -> Forward:
    import torch

    convolve: Callable[..., Tensor] = torch.ops.mkldnn._convolution_pointwise.default
    stride, padding, dilation = list(c.stride), list(c.padding), list(c.dilation)
    groups, convert, prepare = c.groups, _layout(c, config), _weight(c, config)
    after = postop.arguments
    return lambda x, w, bias: convolve(convert(x), prepare(w), bias, padding, stride, dilation, groups, *after)


def _weight(c: Convolution, config: Config) -> Callable[[Tensor], Tensor]:
    """How the weight reaches the kernel: in the layout of the config, or packed."""
    import torch

    reorder: Callable[..., Tensor] = torch.ops.mkldnn._reorder_convolution_weight.default
    stride, padding, dilation, shape = list(c.stride), list(c.padding), list(c.dilation), list(c.x.shape)
    weight = choice(config, "weight", _WEIGHTS)
    if weight == "plain":
        return _layout(c, config)
    return choose(lambda w: reorder(w, padding, stride, dilation, c.groups, shape), weight)


def _transposed(c: Convolution, config: Config, postop: PostOp) -> Forward:
    import torch

    convolve: Callable[..., Tensor] = torch.ops.mkldnn._convolution_transpose_pointwise.default
    rest = (list(c.padding), list(c.output_padding), list(c.stride), list(c.dilation), c.groups, *postop.arguments)
    convert = _layout(c, config)
    return lambda x, w, bias: convolve(convert(x), convert(w), bias, *rest)


def _linear(c: Convolution, config: Config, postop: PostOp) -> Forward:
    """A 1x1 convolution as an inner product over the channels of every pixel."""
    import torch

    linear: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
    reorder: Callable[..., Tensor] = torch.ops.mkldnn._reorder_linear_weight.default
    n, channels, height, width = c.x.shape
    out_channels, rows = c.w.shape[0], n * height * width
    matrix = choose(lambda w: reorder(w.view(out_channels, channels), rows), choice(config, "weight", _WEIGHTS))
    packed, after = config["weight"] != "plain", postop.arguments

    def forward(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        pixels = x.permute(0, 2, 3, 1).reshape(rows, channels)
        out = linear(pixels, matrix(w) if packed else w.view(out_channels, channels), bias, *after)
        return out.view(n, height, width, out_channels).permute(0, 3, 1, 2)

    return forward


def _backward_configs(c: Convolution) -> list[Config]:
    of_input = [name for name, applies in _INPUT_APPLIES.items() if applies(c)] if c.mask[0] else [None]
    of_weight = [name for name, applies in _WEIGHT_APPLIES.items() if applies(c)] if c.mask[1] else [None]
    found: list[Config] = []
    for first, second in product(of_input, of_weight):
        parts = {"input": first, "weight": second}
        named = {key: value for key, value in parts.items() if value is not None}
        if set(named.values()) <= {"backward"}:
            continue  # what torch runs
        uses_layout = set(named.values()) != {"linear"} and c.rank == 2
        layouts = (c.layout, c.other_layout) if uses_layout else (c.layout,)
        found += [{"kernel": "gradients", "layout": layout, **named} for layout in layouts]
    return found


def _build_backward(c: Convolution, config: Config) -> Kernel:
    choice(config, "kernel", ("gradients",))
    wanted = [name for name, used in zip(("input", "weight"), c.mask[:2], strict=True) if used]
    check_keys(config, ("kernel", "layout", *wanted))
    of_input = _part(c, config, "input") if c.mask[0] else None
    of_weight = _part(c, config, "weight") if c.mask[1] else None
    return gradients(c, of_input, of_weight)


def _part(c: Convolution, config: Config, key: str) -> Gradient:
    applies = _INPUT_APPLIES if key == "input" else _WEIGHT_APPLIES
    name = choice(config, key, tuple(name for name, holds in applies.items() if holds(c)))
    convert = _layout(c, config)
    if name == "linear":
        return _input_linear(c) if key == "input" else _weight_linear(c)
    if name == "backward":
        gradient = _aten_backward(c, 0 if key == "input" else 1)
    else:
        gradient = _input_flipped(c) if key == "input" else _weight_convolution(c)
    if config["layout"] == c.layout:
        return gradient
    return lambda go, x, w: gradient(convert(go), convert(x), convert(w))


_INPUT_APPLIES: dict[str, Callable[[Convolution], bool]] = {
    "backward": lambda c: True,
    "flipped": lambda c: c.is_plain and all(s == 1 for s in c.stride) and all(p >= 0 for p in _flipped_padding(c)),
    "linear": _is_rows,
}
_WEIGHT_APPLIES: dict[str, Callable[[Convolution], bool]] = {
    "backward": lambda c: True,
    "convolution": lambda c: c.is_plain,
    "linear": _is_rows,
}


def _flipped_padding(c: Convolution) -> list[int]:
    return [d * (k - 1) - p for k, d, p in zip(c.kernel, c.dilation, c.padding, strict=True)]


def _aten_backward(c: Convolution, which: int) -> Gradient:
    import torch

    backward = torch.ops.aten.convolution_backward.default
    rest = (None, list(c.stride), list(c.padding), list(c.dilation), c.transposed, list(c.output_padding), c.groups)
    mask = [i == which for i in range(3)]
    return lambda go, x, w: backward(go, x, w, *rest, mask)[which]


def _input_flipped(c: Convolution) -> Gradient:
    """At stride one the input's gradient is a forward convolution with the kernel turned around."""
    import torch

    convolve: Callable[..., Tensor] = torch.ops.mkldnn._convolution_pointwise.default
    ones, padding, dilation = [1] * c.rank, _flipped_padding(c), list(c.dilation)
    spatial, after = list(range(2, c.rank + 2)), PostOp.of(None).arguments
    return lambda go, x, w: convolve(go, w.transpose(0, 1).flip(spatial), None, padding, ones, dilation, 1, *after)


def _weight_convolution(c: Convolution) -> Gradient:
    """The input convolved with the gradient, channels taken as samples; stride and dilation change places."""
    import torch

    convolve: Callable[..., Tensor] = torch.ops.mkldnn._convolution_pointwise.default
    rest = (None, list(c.padding), list(c.dilation), list(c.stride), 1, *PostOp.of(None).arguments)
    crop = (slice(None), slice(None), *(slice(0, k) for k in c.kernel))
    return lambda go, x, w: convolve(x.transpose(0, 1), go.transpose(0, 1), *rest).transpose(0, 1)[crop]


def _input_linear(c: Convolution) -> Gradient:
    import torch

    linear: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
    plain = PostOp.of(None).arguments
    n, channels, height, width = c.x.shape
    out_channels = c.w.shape[0]

    def gradient(go: Tensor, x: Tensor, w: Tensor) -> Tensor:
        rows = go.permute(0, 2, 3, 1).reshape(-1, out_channels)
        out = linear(rows, w.view(out_channels, channels).t(), None, *plain)
        return out.view(n, height, width, channels).permute(0, 3, 1, 2)

    return gradient


def _weight_linear(c: Convolution) -> Gradient:
    import torch

    linear: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
    plain = PostOp.of(None).arguments
    channels, out_channels, shape = c.x.shape[1], c.w.shape[0], c.w.shape

    def gradient(go: Tensor, x: Tensor, w: Tensor) -> Tensor:
        left = go.transpose(0, 1).reshape(out_channels, -1)
        right = x.transpose(0, 1).reshape(channels, -1)
        return linear(left, right, None, *plain).view(shape)

    return gradient
