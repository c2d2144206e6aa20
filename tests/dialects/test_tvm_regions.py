"""Regions with views, concatenations and slices between their operators, lowered to TVM as one function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from raftune.dialects.tvm import TvmDialect
from raftune.graph import fused_region
from raftune.graph.fusion import propose
from raftune.pattern import Declared

aten = torch.ops.aten
DIALECT = TvmDialect()
GENERATOR = torch.Generator().manual_seed(3)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR)


def check(function: Callable[..., Any], *inputs: torch.Tensor) -> None:
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    region = fused_region([n for n in graph.nodes if n.op == "call_function"])
    assert region is not None
    assert DIALECT.supports(region.workload), region.workload.op
    kernel = DIALECT.build(region.workload, {"schedule": "default"})
    values = dict(zip([n.name for n in graph.nodes if n.op == "placeholder"], inputs, strict=True))
    found, wanted = kernel(*(values[n.name] for n in region.inputs)), function(*inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    pairs = [(found, wanted)] if isinstance(found, torch.Tensor) else zip(found, wanted, strict=True)
    assert all(a.stride() == b.stride() for a, b in pairs)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.exp().view(12, 10).tanh(),
        lambda x: x.exp().view(-1).tanh(),
        lambda x: x.exp().view(2, 1, 3, 2, 2, 5, 1).tanh(),
        lambda x: x.exp().view(3, 8, 5).tanh(),
        lambda x: x.exp().unsqueeze(-1).unsqueeze(0).tanh(),
        lambda x: x.exp().permute(2, 0, 3, 1).tanh(),
        lambda x: x.exp().transpose(-1, 1).tanh().clone(),
        lambda x: aten.squeeze.dim(x[:, :1].exp(), 1).tanh(),
        lambda x: x.exp()[:, 1:, :, ::2].tanh(),
        lambda x: x.exp()[:, -2].tanh(),
        lambda x: x.exp().view(6, 20)[0].expand(4, -1).tanh(),
        lambda x: torch.cat((x.exp(), -x[:, 1:], x.tanh()), 1),
        lambda x: torch.stack((x.exp(), -x, x.tanh()), -2),
        lambda x: aten.slice_backward(x.exp(), [2, 3, 4, 9], 3, 2, 7, 1),
        lambda x: aten.slice_backward(x.exp(), [2, 3, 9, 5], 2, 1, 9, 2),
        lambda x: aten.select_backward(x.exp(), [2, 3, 7, 4, 5], 2, -3),
        lambda x: (x.exp().view(6, 20).sum(0), x.exp().sum((0, 1))),
    ],
)
def test_views_between_operators(function: Callable[..., Any]) -> None:
    check(function, rand(2, 3, 4, 5))


def test_views_of_tensors_with_no_and_one_element_in_a_dimension() -> None:
    check(lambda x: x.exp().view(1, 1, 6, 1).tanh(), rand(6, 1))
    check(lambda x: x.exp().view(()).tanh(), rand(1, 1))
    check(lambda x: x.exp().view(1, 1).tanh(), rand())


@pytest.mark.parametrize("batch", [1, 3])
def test_a_rotary_embedding_and_an_rms_norm(batch: int) -> None:
    def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y = x * cos
        rotated = torch.cat((-x[..., 8:], x[..., :8]), -1)
        return (y + rotated * sin).transpose(1, 2).clone()

    def rms_norm(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
        return scale, x * scale * w

    check(rotary, rand(batch, 4, 12, 16), rand(12, 16), rand(12, 16))
    check(rms_norm, rand(batch, 12, 64), rand(64))


def epilogue(name: str) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    x, w, bias = rand(24, 20), rand(20, 48), rand(48)
    match name:
        case "residual":
            return lambda x, w, b, r: aten.addmm(b, x, w).view(2, 12, 48) + r, (x, w, bias, rand(2, 12, 48))
        case "gelu":
            return lambda x, w, b: aten.gelu(aten.addmm(b, x, w) * 0.5), (x, w, bias)
        case "gelu_backward":
            return lambda x, w, p: aten.gelu_backward(aten.mm(x, w).view(1, 24, 48), p), (x, w, rand(1, 24, 48))
        case "threshold_backward":
            return lambda x, w, p: aten.threshold_backward(aten.mm(x, w), p, 0), (x, w, rand(24, 48))
        case "batched":
            return lambda x, w: aten.silu(aten.bmm(x, w)), (rand(3, 7, 16), rand(3, 16, 33))
    raise AssertionError(name)


@pytest.mark.parametrize("name", ["residual", "gelu", "gelu_backward", "threshold_backward", "batched"])
def test_what_is_done_to_a_product_is_done_as_it_is_stored(name: str) -> None:
    function, inputs = epilogue(name)
    check(function, *inputs)
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    (region,) = propose(graph, [Declared(pattern, DIALECT.supports) for pattern in DIALECT.patterns()], lambda _: False)
    assert [c["schedule"] for c in DIALECT.candidates(region.workload)][:2] == ["default", "tiled"]
    values = dict(zip([n.name for n in graph.nodes if n.op == "placeholder"], inputs, strict=True))
    for config in DIALECT.candidates(region.workload)[1:6]:
        found = DIALECT.build(region.workload, config)(*(values[n.name] for n in region.inputs))
        torch.testing.assert_close(found, function(*inputs), rtol=1e-4, atol=1e-4)


def test_other_regions_with_a_product_are_left_to_others() -> None:
    def supports(function: Callable[..., Any], *inputs: torch.Tensor) -> bool:
        graph = make_fx(function, tracing_mode="fake")(*inputs).graph
        region = fused_region([n for n in graph.nodes if n.op == "call_function"])
        assert region is not None
        return DIALECT.supports(region.workload)

    x, w = rand(8, 8), rand(8, 8)
    assert not supports(lambda x, w: x.mm(w).mm(x), x, w)
    assert not supports(lambda x, w: x.exp().mm(w), x, w)
    assert not supports(lambda x, w: x.mm(w).sum(0), x, w)
    assert not supports(lambda x, w: (y := x.mm(w), y.relu()), x, w)
    assert not supports(lambda x, w, z: x.mm(w) + z, rand(1, 8), w, rand(5, 8))
