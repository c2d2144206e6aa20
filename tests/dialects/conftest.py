"""Workloads of every operator family, with sizes and strides that break careless kernels, and the check for kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from raftune.device import cuda_architecture, targeting
from raftune.dialects.base import Kernel
from raftune.dialects.torch_ops import graph_module
from raftune.graph.workloads import workload_from_call
from raftune.measure.inputs import make_inputs
from raftune.workload import Workload

aten = torch.ops.aten


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def _convolutions() -> Iterator[tuple[str, Workload]]:
    cases: dict[str, tuple[Any, ...]] = {  # input, weight, bias, stride, padding, dilation, groups
        "3x3": ((2, 4, 9, 7), (6, 4, 3, 3), True, [1, 1], [1, 1], [1, 1], 1),
        "3x3_strided": ((2, 3, 8, 9), (5, 3, 3, 3), False, [2, 2], [1, 1], [1, 1], 1),
        "5x3_dilated": ((1, 2, 11, 13), (3, 2, 5, 3), True, [1, 2], [2, 0], [2, 1], 1),
        "1x1": ((3, 5, 4, 6), (7, 5, 1, 1), True, [1, 1], [0, 0], [1, 1], 1),
        "1x1_strided": ((2, 4, 7, 7), (3, 4, 1, 1), False, [2, 2], [0, 0], [1, 1], 1),
        "one_pixel": ((1, 1, 1, 1), (1, 1, 1, 1), True, [1, 1], [0, 0], [1, 1], 1),
        "depthwise": ((2, 6, 8, 9), (6, 1, 3, 3), True, [2, 1], [1, 1], [1, 1], 6),
        "grouped": ((2, 6, 5, 5), (4, 3, 3, 3), False, [1, 1], [1, 1], [1, 1], 2),
    }
    for name, (x_shape, w_shape, with_bias, stride, padding, dilation, groups) in cases.items():
        for channels_last in (False, True) if name in ("3x3", "1x1", "depthwise") else (False,):
            x, w = tensor(*x_shape), tensor(*w_shape)
            if channels_last:
                x = x.contiguous(memory_format=torch.channels_last)
            bias = tensor(w_shape[0]) if with_bias else None
            rest = (stride, padding, dilation, False, [0, 0], groups)
            label = f"{name}{'_nhwc' if channels_last else ''}"
            yield f"conv_{label}", workload_from_call(aten.convolution.default, (x, w, bias, *rest))
            go = aten.convolution(x, w, bias, *rest)
            mask = [True, True, with_bias]
            sizes = [w_shape[0]] if with_bias else None
            yield (
                f"conv_backward_{label}",
                workload_from_call(
                    aten.convolution_backward.default, (go, x, w, sizes, *rest, mask), used=[i for i in range(3) if mask[i]]
                ),
            )
    x, w = tensor(2, 3, 9), tensor(4, 3, 3)
    yield "conv_1d", workload_from_call(aten.convolution.default, (x, w, None, [1], [1], [1], False, [0], 1))
    x, w = tensor(2, 4, 5, 6), tensor(4, 3, 3, 3)
    yield (
        "conv_transposed",
        workload_from_call(aten.convolution.default, (x, w, None, [2, 2], [1, 1], [1, 1], True, [1, 1], 1)),
    )
    x, w, go = tensor(2, 3, 6, 6), tensor(4, 3, 3, 3), tensor(2, 4, 6, 6)
    rest = (None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    for which, name in enumerate(("input", "weight")):
        mask = [i == which for i in range(3)]
        yield (
            f"conv_backward_{name}_only",
            workload_from_call(aten.convolution_backward.default, (go, x, w, *rest, mask), used=[which]),
        )


def _products() -> Iterator[tuple[str, Workload]]:
    for m, k, n in ((7, 5, 3), (1, 13, 4), (17, 31, 1), (1, 1, 1), (5, 1, 9), (3, 512, 2), (64, 64, 64)):
        yield f"mm_{m}x{k}x{n}", workload_from_call(aten.mm.default, (tensor(m, k), tensor(k, n)))
    yield "mm_both_transposed", workload_from_call(aten.mm.default, (tensor(5, 7).t(), tensor(3, 5).t()))
    yield "mm_gaps", workload_from_call(aten.mm.default, (tensor(7, 20)[:, ::4], tensor(10, 6)[::2, 1:4]))
    yield "mm_expanded", workload_from_call(aten.mm.default, (tensor(1, 5).expand(7, 5), tensor(5, 1).expand(5, 3)))
    yield "mm_double", workload_from_call(aten.mm.default, (tensor(7, 5).double(), tensor(5, 3).double()))
    square = tensor(6, 6)
    yield "mm_same_tensor", workload_from_call(aten.mm.default, (square, square))
    yield "mm_empty_contraction", workload_from_call(aten.mm.default, (tensor(3, 0), tensor(0, 2)))
    yield "mm_empty_result", workload_from_call(aten.mm.default, (tensor(0, 3), tensor(3, 2)))
    w = tensor(3, 5).t()
    yield "mm_constant", workload_from_call(aten.mm.default, (tensor(7, 5), w), constant=[w])
    yield "addmm_constant", workload_from_call(aten.addmm.default, (tensor(3), tensor(7, 5), w), constant=[w])
    yield "addmm", workload_from_call(aten.addmm.default, (tensor(3), tensor(7, 5), tensor(3, 5).t()))
    yield (
        "addmm_scaled",
        workload_from_call(aten.addmm.default, (tensor(7, 3), tensor(7, 512), tensor(512, 3)), {"beta": 0.5, "alpha": 2}),
    )
    yield "addmm_column", workload_from_call(aten.addmm.default, (tensor(7, 1), tensor(7, 5), tensor(5, 3)))
    yield "addmm_one_row", workload_from_call(aten.addmm.default, (tensor(3), tensor(1, 5), tensor(3, 5).t()))
    yield "bmm", workload_from_call(aten.bmm.default, (tensor(4, 7, 5), tensor(4, 3, 5).mT))
    yield "bmm_one", workload_from_call(aten.bmm.default, (tensor(1, 7, 5), tensor(1, 5, 3)))
    yield "bmm_shared", workload_from_call(aten.bmm.default, (tensor(4, 7, 5), tensor(5, 3).expand(4, 5, 3)))
    yield "bmm_vectors", workload_from_call(aten.bmm.default, (tensor(6, 1, 5), tensor(6, 5, 1)))
    yield (
        "baddbmm",
        workload_from_call(
            aten.baddbmm.default, (tensor(4, 1, 3), tensor(4, 7, 5), tensor(4, 5, 3)), {"beta": 2, "alpha": 0.5}
        ),
    )


def _attention() -> Iterator[tuple[str, Workload]]:
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    q, k, v = tensor(2, 3, 8, 4), tensor(2, 3, 8, 4), tensor(2, 3, 8, 4)
    strided = tensor(2, 8, 3, 4).transpose(1, 2)
    lse = tensor(2, 8, 3).transpose(1, 2)
    for name, args, kwargs in (
        ("plain", (0.0, False), {}),
        ("causal", (0.0, True), {"scale": 0.3}),
        ("masked", (0.0, False), {"attn_mask": tensor(2, 1, 8, 8)}),
    ):
        yield f"sdpa_{name}", workload_from_call(forward, (q, strided, v, *args), kwargs)
        yield f"sdpa_backward_{name}", workload_from_call(backward, (strided, q, k, v, q, lse, *args), kwargs)


def _rest() -> Iterator[tuple[str, Workload]]:
    x = tensor(6, 5, 8)
    yield "add", workload_from_call(aten.add.Tensor, (x, tensor(8)), {"alpha": 2})
    yield "gelu", workload_from_call(aten.gelu.default, (x,), {"approximate": "tanh"})
    yield "cat", workload_from_call(aten.cat.default, ([x, x, tensor(6, 5, 8)], 1))
    yield "where", workload_from_call(aten.where.self, (tensor(6, 5, 8) > 0, x, tensor(1)))
    for dims in ([0], [0, 1], [2], [1, 2], [0, 2], [1]):
        yield f"sum_{dims}", workload_from_call(aten.sum.dim_IntList, (x, dims, len(dims) == 2))
    yield "sum_transposed", workload_from_call(aten.sum.dim_IntList, (x.transpose(0, 2), [0, 1]))
    yield "softmax", workload_from_call(aten._softmax.default, (x, -1, False))
    yield "softmax_transposed", workload_from_call(aten._softmax.default, (x.transpose(0, 1), 1, False))
    yield "log_softmax", workload_from_call(aten._log_softmax.default, (x, 2, False))
    yield "softmax_backward", workload_from_call(aten._softmax_backward_data.default, (x, tensor(6, 5, 8), -1, torch.float32))
    yield "log_softmax_backward", workload_from_call(aten._log_softmax_backward_data.default, (x, x, -1, torch.float32))
    yield "layer_norm", workload_from_call(aten.native_layer_norm.default, (x, [8], tensor(8), tensor(8), 1e-5))
    norm = (x, tensor(6, 5, 8), [8], tensor(6, 5, 1), tensor(6, 5, 1), tensor(8), tensor(8))
    yield "layer_norm_backward", workload_from_call(aten.native_layer_norm_backward.default, (*norm, [True] * 3))
    for padding in (-1, 2):
        index = torch.zeros(3, 7, dtype=torch.int64)
        call = (tensor(3, 7, 4), index, 11, padding, False)
        yield f"embedding_backward_{padding}", workload_from_call(aten.embedding_dense_backward.default, call)
    image = tensor(2, 3, 6, 6)
    pool = ([2, 2], [2, 2])
    yield "max_pool", workload_from_call(aten.max_pool2d_with_indices.default, (image, *pool))
    norm2d = (image, tensor(3), tensor(3), tensor(3), tensor(3), True, 0.1, 1e-5)
    yield "batch_norm", workload_from_call(aten._native_batch_norm_legit_functional.default, norm2d)


def _updates() -> Iterator[tuple[str, Workload]]:
    params = [tensor(3, 4), tensor(5), tensor(1)]

    def like() -> list[Tensor]:
        return [torch.empty_like(p) for p in params]

    for amsgrad in (False, True):
        steps = [torch.tensor(3.0) for _ in params]
        adamw = (params, like(), like(), like(), like() if amsgrad else [], steps)
        options = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.01, "eps": 1e-6, "amsgrad": amsgrad, "maximize": amsgrad}
        yield f"adamw_{amsgrad}", workload_from_call(aten._fused_adamw_.tensor_lr, adamw, {"lr": torch.tensor(0.01), **options})
    for first in (False, True):
        options = {"weight_decay": 0.1, "momentum": 0.9, "dampening": 0.1, "nesterov": first, "maximize": first}
        words = {"lr": torch.tensor(0.01), **options, "is_first_step": first}
        yield f"sgd_{first}", workload_from_call(aten._fused_sgd_.tensor_lr, (params, like(), like()), words)
    plain = {"weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False}
    words = {"lr": torch.tensor(0.01), **plain, "is_first_step": False}
    yield "sgd_plain", workload_from_call(aten._fused_sgd_.tensor_lr, (params[:1], like()[:1], []), words)


def _all() -> dict[str, Workload]:
    return {name: w for family in (_products, _convolutions, _attention, _rest, _updates) for name, w in family()}


@pytest.fixture(scope="session")
def workloads() -> dict[str, Workload]:
    """By name; the name starts with the operator's family."""
    return _all()


def results_of(kernel: Kernel, workload: Workload, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    value = kernel(*inputs)
    if len(workload.outputs) == 1:
        assert isinstance(value, Tensor)
        return (value,)
    assert isinstance(value, tuple | list)
    assert len(value) == len(workload.outputs)
    return tuple(value)


def assert_right(workload: Workload, kernel: Kernel) -> None:
    """Values against PyTorch in float64; shape, strides, dtype; inputs unwritten; results fresh at every call."""
    inputs = make_inputs(workload, seed=1)
    before = [t.clone() for t in inputs]
    wide = [t.double() if t.is_floating_point() else t.clone() for t in inputs]
    expected = graph_module(workload)(*wide)
    expected = () if not workload.outputs else (expected,) if len(workload.outputs) == 1 else expected
    found = results_of(kernel, workload, inputs)
    kept = [t.clone() for t in found]
    for spec, result, reference in zip(workload.results, found, expected, strict=True):
        assert (tuple(result.shape), result.stride(), str(result.dtype)) == (spec.shape, spec.stride, f"torch.{spec.dtype}")
        _assert_close(result, reference)
    for i, (now, then) in enumerate(zip(inputs, before, strict=True)):
        if i in workload.mutates:
            _assert_close(now, wide[i])
        else:
            assert torch.equal(now, then), f"input {i} was written"
    storages = {t.untyped_storage().data_ptr() for t in inputs if t.numel()}
    results_of(kernel, workload, make_inputs(workload, seed=2))
    for result, copy in zip(found, kept, strict=True):
        assert not result.numel() or result.untyped_storage().data_ptr() not in storages, "a result shares an input's memory"
        assert torch.equal(result, copy), "a result was overwritten by the next call"


def _assert_close(result: Tensor, reference: Tensor) -> None:
    if result.is_floating_point():
        scale = float(reference.abs().max()) if reference.numel() else 1.0
        torch.testing.assert_close(result.double(), reference.double(), rtol=1e-4, atol=1e-5 * max(scale, 1e-3))
    else:
        assert torch.equal(result, reference)


@pytest.fixture
def check_kernel() -> Callable[[Workload, Kernel], None]:
    return assert_right


@pytest.fixture
def hopper() -> Iterator[None]:
    with targeting(cuda_architecture("cuda:sm_90")):
        yield


@pytest.fixture
def ampere() -> Iterator[None]:
    with targeting(cuda_architecture("cuda:sm_80")):
        yield
