"""A convolution and its gradients as matrix products over the input's patches ("im2col"), per sample or over all samples.

Chellapilla, Puri and Simard, "High performance convolutional neural networks for document processing", 2006. One product over
all samples pays where each has few positions and the weight is large: it is then read once, not once per sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from raftune.dialects.convolutions import Convolution, Gradient

if TYPE_CHECKING:
    from torch import Tensor

Forward = Callable[["Tensor", "Tensor", "Tensor | None"], "Tensor"]


def applies(c: Convolution) -> bool:
    return c.is_plain and c.rank == 2


def at_once_applies(c: Convolution) -> bool:
    """A pointwise convolution over channels-last rows is the same product, without patches."""
    return applies(c) and not c.is_pointwise


def one_product_first(c: Convolution) -> bool:
    """Whether the matrix of patches has fewer rows (positions of all samples) than columns (channels times taps)."""
    return at_once_applies(c) and c.x.shape[0] * _positions(c) < _contracted(c)


def forward_by_sample(c: Convolution) -> Forward:
    import torch

    unfold, n, out_channels = _columns(c), c.x.shape[0], c.w.shape[0]
    contracted, shape = _contracted(c), (n, out_channels, *c.output_spatial)

    def forward(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        matrix = w.reshape(1, out_channels, contracted).expand(n, out_channels, contracted)
        return add_bias(torch.bmm(matrix, unfold(x)).view(shape), bias)

    return forward


def forward_at_once(c: Convolution) -> Forward:
    import torch

    patches, n, out_channels = _patches(c), c.x.shape[0], c.w.shape[0]
    contracted, (height, width) = _contracted(c), c.output_spatial

    def forward(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        matrix = w.reshape(out_channels, contracted).t()
        out = torch.mm(patches(x), matrix) if bias is None else torch.addmm(bias, patches(x), matrix)
        return out.view(n, height, width, out_channels).permute(0, 3, 1, 2)

    return forward


def input_by_sample(c: Convolution) -> Gradient:
    import torch

    n, out_channels, contracted, fold = c.x.shape[0], c.w.shape[0], _contracted(c), _fold(c)

    def gradient(go: Tensor, x: Tensor, w: Tensor) -> Tensor:
        matrix = w.reshape(out_channels, contracted).t().unsqueeze(0).expand(n, contracted, out_channels)
        return fold(torch.bmm(matrix, go.flatten(2)))

    return gradient


def input_at_once(c: Convolution) -> Gradient:
    import torch

    n, out_channels, contracted, positions, fold = c.x.shape[0], c.w.shape[0], _contracted(c), _positions(c), _fold(c)

    def gradient(go: Tensor, x: Tensor, w: Tensor) -> Tensor:
        patches = torch.mm(_rows(go), w.reshape(out_channels, contracted))
        return fold(patches.view(n, positions, contracted).mT.contiguous())

    return gradient


def weight_by_sample(c: Convolution) -> Gradient:
    import torch

    unfold, shape = _columns(c), c.w.shape
    return lambda go, x, w: torch.bmm(go.flatten(2), unfold(x).mT).sum(0).view(shape)


def weight_at_once(c: Convolution) -> Gradient:
    import torch

    patches, shape = _patches(c), c.w.shape
    return lambda go, x, w: torch.mm(_rows(go).t(), patches(x)).view(shape)


def add_bias(out: Tensor, bias: Tensor | None) -> Tensor:
    """``out`` with a bias per channel added in place."""
    return out if bias is None else out.add_(bias.view(1, -1, *[1] * (out.dim() - 2)))


def _contracted(c: Convolution) -> int:
    """Channels times taps: the elements of one patch."""
    return c.w.numel // c.w.shape[0]


def _positions(c: Convolution) -> int:
    height, width = c.output_spatial
    return height * width


def _rows(go: Tensor) -> Tensor:
    """All positions of all samples by output channels."""
    return go.permute(0, 2, 3, 1).reshape(-1, go.shape[1])


def _columns(c: Convolution) -> Callable[[Tensor], Tensor]:
    """The input as a matrix per sample: channels times taps by output positions."""
    import torch

    if c.is_pointwise:
        return lambda x: x.flatten(2)
    im2col = torch._C._nn.im2col
    kernel, dilation, padding, stride = list(c.kernel), list(c.dilation), list(c.padding), list(c.stride)
    return lambda x: im2col(x, kernel, dilation, padding, stride)


def _patches(c: Convolution) -> Callable[[Tensor], Tensor]:
    """The input as one matrix: all output positions of all samples by channels times taps."""
    columns, shape = _columns(c), (c.x.shape[0] * _positions(c), _contracted(c))
    return lambda x: columns(x).mT.reshape(shape)


def _fold(c: Convolution) -> Callable[[Tensor], Tensor]:
    """The transpose of :func:`_columns`: what each patch gives, summed where patches overlap."""
    import torch

    if c.is_pointwise:
        shape = c.x.shape
        return lambda columns: columns.view(shape)
    col2im, spatial = torch._C._nn.col2im, list(c.x.shape[2:])
    kernel, dilation, padding, stride = list(c.kernel), list(c.dilation), list(c.padding), list(c.stride)
    return lambda columns: col2im(columns, spatial, kernel, dilation, padding, stride)
