"""Workloads for CUTLASS's templates."""

from __future__ import annotations

import torch

from raftune.graph.workloads import workload_from_call
from raftune.workload import Workload

aten = torch.ops.aten


def product(m: int, n: int, k: int, dtype: torch.dtype = torch.float16, *, transposed: bool = False) -> Workload:
    """``transposed`` gives the second matrix as a linear layer does."""
    right = torch.empty(n, k, dtype=dtype).t() if transposed else torch.empty(k, n, dtype=dtype)
    return workload_from_call(aten.mm.default, (torch.empty(m, k, dtype=dtype), right))


def convolution(
    channels: int = 64, filters: int = 128, size: int = 3, stride: int = 1, dtype: torch.dtype = torch.float16
) -> Workload:
    last = torch.channels_last
    x = torch.empty(8, channels, 16, 16, dtype=dtype).to(memory_format=last)
    w = torch.empty(filters, channels, size, size, dtype=dtype).to(memory_format=last)
    rest = ([stride, stride], [size // 2, size // 2], [1, 1], False, [0, 0], 1)
    return workload_from_call(aten.convolution.default, (x, w, None, *rest))


def convolution_backward(stride: int = 1, mask: tuple[bool, bool] = (True, True)) -> Workload:
    last, half = torch.channels_last, torch.float16
    x = torch.empty(8, 64, 16, 16, dtype=half).to(memory_format=last)
    w = torch.empty(128, 64, 3, 3, dtype=half).to(memory_format=last)
    rest = ([stride, stride], [1, 1], [1, 1], False, [0, 0], 1)
    go = torch.empty(8, 128, 16 // stride, 16 // stride, dtype=half).to(memory_format=last)
    used = [i for i in range(2) if mask[i]]
    return workload_from_call(aten.convolution_backward.default, (go, x, w, None, *rest, [*mask, False]), used=used)
