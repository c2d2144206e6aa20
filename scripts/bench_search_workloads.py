"""The operators of the search benchmark: large, skinny and batched products, convolutions with gradients, norms, softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from raftune.graph.workloads import workload_from_call
from raftune.workload import Workload

aten = torch.ops.aten
_SAME = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _gradient(mask: list[bool]) -> tuple[Any, tuple[Any, ...]]:
    gradient, image, kernel = _normal(4, 64, 28, 28), _normal(4, 32, 28, 28), _normal(64, 32, 3, 3)
    return aten.convolution_backward.default, (gradient, image, kernel, None, *_SAME, mask)


def _layer_norm_backward() -> tuple[Any, tuple[Any, ...]]:
    rows = (_normal(512, 768), _normal(512, 768), [768], _normal(512, 1), _normal(512, 1))
    return aten.native_layer_norm_backward.default, (*rows, _normal(768), _normal(768), [True, True, True])


_CALLS: dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]] = {
    "matmul 512x512x512": lambda: (aten.mm.default, (_normal(512, 512), _normal(512, 512))),
    "linear 256x768x3072": lambda: (aten.addmm.default, (_normal(3072), _normal(256, 768), _normal(3072, 768).t())),
    "skinny 8x1024x1024": lambda: (aten.mm.default, (_normal(8, 1024), _normal(1024, 1024))),
    "skinny 1024x512x10": lambda: (aten.mm.default, (_normal(1024, 512), _normal(512, 10))),
    "batched 24x128x64x128": lambda: (aten.bmm.default, (_normal(24, 128, 64), _normal(24, 64, 128))),
    "convolution 3x3": lambda: (aten.convolution.default, (_normal(4, 32, 28, 28), _normal(64, 32, 3, 3), None, *_SAME)),
    "convolution input gradient": lambda: _gradient([True, False, False]),
    "convolution weight gradient": lambda: _gradient([False, True, False]),
    "layer norm": lambda: (aten.native_layer_norm.default, (_normal(512, 768), [768], _normal(768), _normal(768), 1e-5)),
    "layer norm backward": _layer_norm_backward,
    "softmax 1024x512": lambda: (aten._softmax.default, (_normal(1024, 512), -1, False)),
    "log softmax backward": lambda: (
        aten._log_softmax_backward_data.default,
        (_normal(256, 1000), aten._log_softmax(_normal(256, 1000), 1, False), 1, torch.float32),
    ),
}

NAMES = tuple(_CALLS)


def workload(name: str) -> Workload:
    op, arguments = _CALLS[name]()
    return workload_from_call(op, arguments, {})
