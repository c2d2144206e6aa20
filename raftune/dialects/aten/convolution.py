"""Formulations of a convolution and of its backward: memory format, matrix products, and each gradient by its own operator."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import TYPE_CHECKING

from raftune.dialects.aten import unfolded
from raftune.dialects.aten.unfolded import Forward
from raftune.dialects.base import BuildError, Kernel
from raftune.dialects.calls import check_keys, choice, conform_all
from raftune.dialects.convolutions import LAYOUTS, Convolution, Gradient, gradients, to_layout
from raftune.workload import Config, Workload

if TYPE_CHECKING:
    from torch import Tensor

_TAPS_LIMIT = 25
_CONVOLVED = ("backward", "transposed", "convolution")


def configs(workload: Workload) -> list[Config]:
    convolution = Convolution.of(workload)
    if convolution is None:
        return []
    if convolution.is_backward:
        return _separate_configs(convolution)
    found: list[Config] = [{"formulation": name} for name in _ordered(convolution, _FORWARD_APPLIES)]
    return found


def build(workload: Workload, config: Config) -> Kernel:
    convolution = Convolution.of(workload)
    if convolution is None:
        raise BuildError(f"config formulation={config['formulation']!r} is for convolutions, not {workload.op}")
    if config["formulation"] == "separate":
        return _build_separate(convolution, config)
    check_keys(config, ("formulation",))
    name = choice(config, "formulation", tuple(_FORWARD_APPLIES))
    if convolution.is_backward or not _FORWARD_APPLIES[name](convolution):
        raise BuildError(f"config formulation={name!r} does not apply to this {workload.op}")
    forward = _FORWARD[name](convolution)
    x_at, w_at, bias_at = convolution.input, convolution.weight, convolution.bias
    if bias_at is None:
        return conform_all(workload, lambda *inputs: forward(inputs[x_at], inputs[w_at], None))
    return conform_all(workload, lambda *inputs: forward(inputs[x_at], inputs[w_at], inputs[bias_at]))


_FORWARD_APPLIES: dict[str, Callable[[Convolution], bool]] = {
    "bias_after": lambda c: c.bias is not None,
    "matmul_channels_last": lambda c: c.is_pointwise and c.rank == 2,
    "im2col": unfolded.applies,
    "im2col_at_once": unfolded.at_once_applies,
    "slow": lambda c: c.is_plain and c.rank == 2 and all(d == 1 for d in c.dilation),
    "taps": lambda c: c.is_depthwise and c.rank == 2 and c.kernel[0] * c.kernel[1] <= _TAPS_LIMIT,
}


def _bias_after(c: Convolution) -> Forward:
    import torch

    convolve = torch.convolution
    rest = (list(c.stride), list(c.padding), list(c.dilation), c.transposed, list(c.output_padding), c.groups)

    def forward(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return unfolded.add_bias(convolve(x, w, None, *rest), bias)

    return forward


def _matmul_channels_last(c: Convolution) -> Forward:
    import torch

    n, channels, height, width = c.x.shape
    out_channels = c.w.shape[0]

    def forward(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.permute(0, 2, 3, 1).reshape(n * height * width, channels)
        matrix = w.view(out_channels, channels).t()
        out = torch.mm(rows, matrix) if bias is None else torch.addmm(bias, rows, matrix)
        return out.view(n, height, width, out_channels).permute(0, 3, 1, 2)

    return forward


def _slow(c: Convolution) -> Forward:
    import torch

    convolve = torch.ops.aten._slow_conv2d_forward.default
    kernel, stride, padding = list(c.kernel), list(c.stride), list(c.padding)
    return lambda x, w, bias: convolve(x, w, kernel, bias, stride, padding)


def _taps(c: Convolution) -> Forward:
    """One multiply-add of the shifted input for each tap of a depthwise kernel."""
    import torch

    (rows, columns), (pad_y, pad_x) = c.kernel, c.padding
    (out_y, out_x), (stride_y, stride_x), (step_y, step_x) = c.output_spatial, c.stride, c.dilation
    windows = [
        (
            slice(i * step_y, i * step_y + (out_y - 1) * stride_y + 1, stride_y),
            slice(j * step_x, j * step_x + (out_x - 1) * stride_x + 1, stride_x),
        )
        for i in range(rows)
        for j in range(columns)
    ]

    def forward(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        padded = torch.constant_pad_nd(x, [pad_x, pad_x, pad_y, pad_y]) if pad_x or pad_y else x
        scales = w.reshape(1, w.shape[0], 1, 1, -1).unbind(-1)
        out = padded[:, :, windows[0][0], windows[0][1]] * scales[0]
        for (down, across), scale in zip(windows[1:], scales[1:], strict=True):
            out.addcmul_(padded[:, :, down, across], scale)
        return unfolded.add_bias(out, bias)

    return forward


_FORWARD: dict[str, Callable[[Convolution], Forward]] = {
    "bias_after": _bias_after,
    "matmul_channels_last": _matmul_channels_last,
    "im2col": unfolded.forward_by_sample,
    "im2col_at_once": unfolded.forward_at_once,
    "slow": _slow,
    "taps": _taps,
}


def _ordered(c: Convolution, applies: dict[str, Callable[[Convolution], bool]]) -> list[str]:
    """The formulations that apply, most promising first."""
    found = [name for name, fits in applies.items() if fits(c)]
    return sorted(found, key=lambda name: name != "im2col_at_once") if unfolded.one_product_first(c) else found


def _separate_configs(c: Convolution) -> list[Config]:
    of_input: list[str | None] = [*_ordered(c, _INPUT_APPLIES)] if c.mask[0] else [None]
    of_weight: list[str | None] = [*_ordered(c, _WEIGHT_APPLIES)] if c.mask[1] else [None]
    found: list[Config] = []
    for first, second in product(of_input, of_weight):
        for layout in (c.layout, c.other_layout):
            if layout != c.layout and (c.rank != 2 or not {first, second} <= {*_CONVOLVED, None}):
                continue
            if layout == c.layout and {first, second} <= {"backward", None}:
                continue  # the default, taken apart
            parts = {"input": first, "weight": second}
            found.append({"formulation": "separate", "layout": layout, **{k: v for k, v in parts.items() if v is not None}})
    return found


def _build_separate(c: Convolution, config: Config) -> Kernel:
    if not c.is_backward:
        raise BuildError("config formulation='separate' is for a convolution's backward")
    wanted = [name for name, used in zip(("input", "weight"), c.mask[:2], strict=True) if used]
    check_keys(config, ("formulation", "layout", *wanted))
    layout = choice(config, "layout", LAYOUTS)
    if layout == "channels_last" and c.rank == 1:
        raise BuildError("config layout='channels_last' needs a convolution over 2 or 3 dimensions")
    of_input = _part(c, config, "input", _INPUT_APPLIES, _INPUT, layout) if c.mask[0] else None
    of_weight = _part(c, config, "weight", _WEIGHT_APPLIES, _WEIGHT, layout) if c.mask[1] else None
    return gradients(c, of_input, of_weight)


def _part(
    c: Convolution,
    config: Config,
    key: str,
    applies: dict[str, Callable[[Convolution], bool]],
    makers: dict[str, Callable[[Convolution], Gradient]],
    layout: str,
) -> Gradient:
    name = choice(config, key, tuple(applies))
    if not applies[name](c):
        raise BuildError(f"config {key}={name!r} does not apply to this {c.workload.op}")
    gradient = makers[name](c)
    if layout == c.layout or name not in _CONVOLVED:
        return gradient
    convert = to_layout(c.rank, layout)
    return lambda go, x, w: gradient(convert(go), convert(x), convert(w))


_INPUT_APPLIES: dict[str, Callable[[Convolution], bool]] = {
    "backward": lambda c: True,
    "transposed": lambda c: not c.transposed,
    "im2col": unfolded.applies,
    "im2col_at_once": unfolded.at_once_applies,
    "matmul_channels_last": lambda c: c.is_pointwise and c.rank == 2,
}
_WEIGHT_APPLIES: dict[str, Callable[[Convolution], bool]] = {
    "backward": lambda c: True,
    "convolution": lambda c: c.is_plain,
    "im2col": unfolded.applies,
    "im2col_at_once": unfolded.at_once_applies,
    "matmul_channels_last": lambda c: c.is_pointwise and c.rank == 2,
}


def _masked_backward(c: Convolution, which: int) -> Gradient:
    import torch

    backward = torch.ops.aten.convolution_backward.default
    rest = (None, list(c.stride), list(c.padding), list(c.dilation), c.transposed, list(c.output_padding), c.groups)
    mask = [i == which for i in range(3)]
    return lambda go, x, w: backward(go, x, w, *rest, mask)[which]


def _input_transposed(c: Convolution) -> Gradient:
    import torch

    convolve = torch.convolution
    rest = (list(c.stride), list(c.padding), list(c.dilation), True, list(c.input_output_padding), c.groups)
    return lambda go, x, w: convolve(go, w, None, *rest)


def _input_matmul_channels_last(c: Convolution) -> Gradient:
    import torch

    n, channels, height, width = c.x.shape
    out_channels = c.w.shape[0]

    def gradient(go: Tensor, x: Tensor, w: Tensor) -> Tensor:
        rows = go.permute(0, 2, 3, 1).reshape(n * height * width, out_channels)
        return torch.mm(rows, w.view(out_channels, channels)).view(n, height, width, channels).permute(0, 3, 1, 2)

    return gradient


def _weight_convolution(c: Convolution) -> Gradient:
    """The input convolved with the gradient, channels taken as samples; stride and dilation change places."""
    import torch

    convolve = torch.convolution
    rest = (list(c.dilation), list(c.padding), list(c.stride), False, [0] * c.rank, 1)
    crop = (slice(None), slice(None), *(slice(0, k) for k in c.kernel))
    return lambda go, x, w: convolve(x.transpose(0, 1), go.transpose(0, 1), None, *rest).transpose(0, 1)[crop]


def _weight_matmul_channels_last(c: Convolution) -> Gradient:
    import torch

    n, channels, height, width = c.x.shape
    out_channels, rows, shape = c.w.shape[0], n * height * width, c.w.shape

    def gradient(go: Tensor, x: Tensor, w: Tensor) -> Tensor:
        left = go.permute(0, 2, 3, 1).reshape(rows, out_channels)
        return torch.mm(left.t(), x.permute(0, 2, 3, 1).reshape(rows, channels)).view(shape)

    return gradient


_INPUT: dict[str, Callable[[Convolution], Gradient]] = {
    "backward": lambda c: _masked_backward(c, 0),
    "transposed": _input_transposed,
    "im2col": unfolded.input_by_sample,
    "im2col_at_once": unfolded.input_at_once,
    "matmul_channels_last": _input_matmul_channels_last,
}
_WEIGHT: dict[str, Callable[[Convolution], Gradient]] = {
    "backward": lambda c: _masked_backward(c, 1),
    "convolution": _weight_convolution,
    "im2col": unfolded.weight_by_sample,
    "im2col_at_once": unfolded.weight_at_once,
    "matmul_channels_last": _weight_matmul_channels_last,
}
