"""Every candidate of the default dialect and of oneDNN for the regions that patterns find, against PyTorch in float64."""

import pytest
import torch
import torch.nn.functional as F

from raftune.dialects import BuildError, registry
from raftune.graph.fusion import propose
from raftune.measure.check import Checker
from raftune.measurement import Status

aten = torch.ops.aten
DIALECTS = ("aten", "onednn")


def regions(function, *inputs):
    """The regions that patterns propose in ``function``, traced without decompositions."""
    module = torch.fx.experimental.proxy_tensor.make_fx(function, tracing_mode="fake")(*inputs)
    return [r for r in propose(module.graph, registry.patterns(), lambda workload: False) if len(r.nodes) > 1]


def candidates(workload):
    return [c for c in registry.candidates(workload) if c.dialect in DIALECTS and c != registry.default_candidate(workload)]


def assert_all_right(workload, check_kernel, least):
    checker, found = Checker(workload), candidates(workload)
    for candidate in found:
        verdict = checker.check(registry.build(workload, candidate))
        assert verdict.status is Status.OK, f"{candidate.dialect} {candidate.config}: {verdict.message}"
        if workload.inputs[0].dtype == "float32":
            check_kernel(workload, registry.build(workload, candidate))
    assert len(found) >= least, [c.config for c in found]


def t(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype)


X, W, B, R = t(24, 20), t(12, 20), t(12), t(24, 12)
BX, BY, BR = t(3, 7, 5), t(3, 5, 6), t(3, 7, 6)
IMAGE, KERNEL, CHANNELS, RESULT = t(2, 4, 9, 8), t(6, 4, 3, 3), t(6), t(2, 6, 9, 8)
LAST = torch.channels_last

PRODUCTS = {
    "relu": (lambda x, w, b: F.linear(x, w, b).relu(), (X, W, B)),
    "gelu": (lambda x, w: F.gelu(x @ w.t()), (X, W)),
    "gelu_tanh": (lambda x, w, b: F.gelu(F.linear(x, w, b), approximate="tanh"), (X, W, B)),
    "leaky_relu": (lambda x, w, b: F.leaky_relu(F.linear(x, w, b), 0.2), (X, W, B)),
    "leaky_relu_default": (lambda x, w: F.leaky_relu(x @ w.t()), (X, W)),
    "hardtanh": (lambda x, w, b: F.hardtanh(F.linear(x, w, b), -0.5, 2.0), (X, W, B)),
    "hardtanh_default": (lambda x, w, b: F.hardtanh(F.linear(x, w, b)), (X, W, B)),
    "relu6": (lambda x, w: F.relu6(x @ w.t()), (X, W)),
    "hardswish": (lambda x, w, b: F.hardswish(F.linear(x, w, b)), (X, W, B)),
    "three_dimensions": (lambda x, w, b: F.silu(F.linear(x.view(4, 6, 20), w, b)), (X, W, B)),
    "scaled_bias": (lambda x, w, b: torch.add(x @ w.t(), b, alpha=0.5).relu(), (X, W, B)),
    "bias_times_number": (lambda x, w, b: F.gelu(x @ w.t() + 2 * b), (X, W, B)),
    "bias_first": (lambda x, w, b: torch.tanh(b + x @ w.t()), (X, W, B)),
    "product_second_and_scaled": (lambda x, w, b: torch.add(b, x @ w.t(), alpha=3), (X, W, B)),
    "product_scaled": (lambda x, w, b: torch.sigmoid((x @ w.t()) / 4 + b), (X, W, B)),
    "product_scaled_alone": (lambda x, w: ((x @ w.t()) * 0.5).relu(), (X, W)),
    "bias_in_rows": (lambda x, w, b: (F.linear(x.view(4, 6, 20), w) + b).relu(), (X, W, B)),
    "one_per_row": (lambda x, w, r: (x @ w.t() + r[:, :1]).relu(), (X, W, R)),
    "one_for_all": (lambda x, w, r: x @ w.t() + r, (X, W, t())),
    "residual": (lambda x, w, b, r: r + F.linear(x, w, b), (X, W, B, R)),
    "residual_relu": (lambda x, w, r: (x @ w.t() + r).relu(), (X, W, R)),
    "residual_scaled": (lambda x, w, b, r: torch.add(F.linear(x, w, b), r, alpha=0.5), (X, W, B, R)),
    "residual_three_dimensions": (lambda x, w, b, r: r.view(4, 6, 12) + F.linear(x.view(4, 6, 20), w, b), (X, W, B, R)),
    "residual_broadcast": (lambda x, w, b, r: r[:6] + F.linear(x.view(4, 6, 20), w, b), (X, W, B, R)),
    "residual_strided": (lambda x, w, b, r: r.t() + F.linear(x, w, b), (X, W, B, t(12, 24))),
    "residual_is_the_input": (lambda x, w: (x + x @ w).relu(), (t(9, 9), t(9, 9))),
    "addmm_scaled": (lambda x, w, r: torch.addmm(r, x, w.t(), beta=0.5, alpha=2).relu() , (X, W, R)),
    "addmm_and_residual": (lambda x, w, r, s: torch.addmm(r, x, w.t(), beta=0.5, alpha=2) + s, (X, W, R, t(24, 12))),
    "bmm": (lambda x, y: F.gelu(torch.bmm(x, y)), (BX, BY)),
    "bmm_bias": (lambda x, y, b: (torch.bmm(x, y) + b).relu(), (BX, BY, t(6))),
    "bmm_residual": (lambda x, y, r: torch.bmm(x, y) * 0.5 + r, (BX, BY, BR)),
    "baddbmm": (lambda x, y, r: torch.baddbmm(r, x, y).relu(), (BX, BY, BR)),
    "bfloat16": (lambda x, w, b: F.linear(x, w, b).relu(), [v.bfloat16() for v in (X, W, B)]),
}  # fmt: skip

CONVOLUTIONS = {
    "relu": (lambda x, w, b: F.conv2d(x, w, b, padding=1).relu(), (IMAGE, KERNEL, CHANNELS)),
    "leaky_relu": (lambda x, w: F.leaky_relu(F.conv2d(x, w, padding=1), 0.3), (IMAGE, KERNEL)),
    "residual": (lambda x, w, b, r: r + F.conv2d(x, w, b, padding=1), (IMAGE, KERNEL, CHANNELS, RESULT)),
    "residual_relu": (lambda x, w, r: (F.conv2d(x, w, padding=1) + r).relu(), (IMAGE, KERNEL, RESULT)),
    "residual_gelu": (lambda x, w, r: F.gelu(F.conv2d(x, w, padding=1) + r), (IMAGE, KERNEL, RESULT)),
    "residual_other_layout": (
        lambda x, w, r: (F.conv2d(x, w, padding=1) + r).relu(),
        (IMAGE, KERNEL, RESULT.contiguous(memory_format=LAST)),
    ),
    "residual_channels_last": (
        lambda x, w, b, r: (r + F.conv2d(x, w, b, padding=1)).relu(),
        (IMAGE.contiguous(memory_format=LAST), KERNEL, CHANNELS, RESULT.contiguous(memory_format=LAST)),
    ),
    "channel_bias": (lambda x, w, b: (F.conv2d(x, w, padding=1) + b.view(1, 6, 1, 1)).relu(), (IMAGE, KERNEL, CHANNELS)),
    "scaled": (lambda x, w, r: F.conv2d(x, w, padding=1) * 0.5 + r, (IMAGE, KERNEL, RESULT)),
    "pointwise": (lambda x, w, r: (F.conv2d(x, w) + r).relu(), (IMAGE, t(6, 4, 1, 1), RESULT)),
    "depthwise": (lambda x, w, r: (F.conv2d(x, w, padding=1, groups=4) + r).relu(), (IMAGE, t(4, 1, 3, 3), t(2, 4, 9, 8))),
    "transposed": (lambda x, w: F.conv_transpose2d(x, w).relu(), (IMAGE, t(4, 5, 3, 3))),
    "one_dimension": (lambda x, w, r: (F.conv1d(x, w, padding=1) + r).relu(), (t(2, 3, 9), t(4, 3, 3), t(2, 4, 9))),
}  # fmt: skip


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_an_epilogue(name, check_kernel):
    if name == "bfloat16" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no bfloat16 kernels on this processor")
    (region,) = regions(*_flat(PRODUCTS[name]))
    assert_all_right(region.workload, check_kernel, least=3)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_with_an_epilogue(name, check_kernel):
    (region,) = regions(*_flat(CONVOLUTIONS[name]))
    assert_all_right(region.workload, check_kernel, least=2)


def _flat(case):
    function, inputs = case
    return function, *inputs


def heads(*shape):
    return t(*shape), t(*shape), t(*shape)


ATTENTION = {
    "three_dimensions": (lambda q, k, v: torch.softmax(torch.bmm(q, k.mT) * 0.25, -1).bmm(v), heads(6, 8, 16)),
    "without_scale": (lambda q, k, v: torch.softmax(q @ k.mT, 2) @ v, heads(6, 8, 16)),
    "four_dimensions": (lambda q, k, v: torch.softmax(q @ k.mT / 4, -1) @ v, heads(2, 3, 8, 16)),
    "split_heads": (
        lambda q, k, v: torch.softmax(q.transpose(1, 2) @ k.permute(0, 2, 3, 1) * 0.25, -1) @ v.transpose(1, 2),
        heads(2, 8, 3, 16),
    ),
    "mask": (lambda q, k, v, m: torch.softmax(q @ k.mT / 4 + m, -1) @ v, (*heads(2, 3, 8, 16), t(2, 1, 8, 8))),
    "mask_of_rank_2": (lambda q, k, v, m: torch.softmax(m + q @ k.mT, -1) @ v, (*heads(2, 3, 8, 16), t(8, 8))),
    "mask_of_rank_3": (lambda q, k, v, m: torch.softmax(q @ k.mT + m, -1) @ v, (*heads(2, 3, 8, 16), t(3, 8, 8))),
    "mask_by_entry": (lambda q, k, v, m: torch.softmax(q @ k.mT + m, -1) @ v, (*heads(6, 8, 16), t(6, 1, 8))),
    "other_lengths": (lambda q, k, v: torch.softmax(q @ k.mT, -1) @ v, (t(2, 3, 5, 16), t(2, 3, 9, 16), t(2, 3, 9, 4))),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_that_is_written_out(name, check_kernel):
    (region,) = [r for r in regions(*_flat(ATTENTION[name])) if "_softmax" in r.workload.op]
    assert_all_right(region.workload, check_kernel, least=1)


@pytest.mark.parametrize(
    "function",
    [
        lambda q, k, v: ((w := torch.softmax(q @ k.mT, -1)) @ v, w),
        lambda q, k, v: torch.softmax(q @ k.mT, 1) @ v,
        lambda q, k, v: torch.softmax(q @ k.mT, -1).mT @ v,
        lambda q, k, v: torch.softmax((q @ k.mT).transpose(0, 1), -1) @ v,
        lambda q, k, v: torch.softmax((q @ k.mT).view(8, 2, 32), -1).view(8, 8, 8) @ v,
        lambda q, k, v: torch.softmax(q @ k.mT * v, -1) @ v,
    ],
)
def test_what_looks_like_attention_and_is_not(function):
    assert not [r for r in regions(function, *heads(8, 8, 8)) if "_softmax" in r.workload.op]


def head(*, bias, reduction="mean", ignore_index=-100, shape=None, returned=False):
    """Loss and gradients of a linear layer with cross-entropy."""

    def function(x, w, b, y):
        x, w, b = (v.detach().requires_grad_() for v in (x, w, b))
        logits = F.linear(x if shape is None else x.view(shape), w, b if bias else None)
        loss = F.cross_entropy(logits.flatten(0, -2), y, reduction=reduction, ignore_index=ignore_index)
        found = torch.autograd.grad(loss, [x, w, b] if bias else [x, w], torch.ones(()))
        return (loss, *found, logits) if returned else (loss, *found)

    return function


Y = torch.empty(30, dtype=torch.int64)
HEAD = (t(30, 8), t(11, 8), t(11), Y)
OPTIONS = [
    {"bias": False},
    {"bias": True},
    {"bias": True, "reduction": "sum"},
    {"bias": True, "ignore_index": 3},
    {"bias": True, "shape": (5, 6, 8), "ignore_index": 0},
    {"bias": True, "returned": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_loss_head_with_its_backward(options, check_kernel):
    (region,) = [r for r in regions(head(**options), *HEAD) if "nll_loss_backward" in r.workload.op]
    assert len(region.results) == 3 + options["bias"] + options.get("returned", False)
    assert_all_right(region.workload, check_kernel, least=1)
    for rows in (1, 7, 29):
        check_kernel(region.workload, registry.get("aten").build(region.workload, {"formulation": "row_blocks", "rows": rows}))


@pytest.mark.parametrize("bias", [False, True])
def test_a_loss_head_forward(bias, check_kernel):
    def function(x, w, b, y):
        return F.cross_entropy(F.linear(x, w, b if bias else None), y, ignore_index=2)

    (region,) = regions(function, *HEAD)
    assert_all_right(region.workload, check_kernel, least=1)
    for rows in (7, 16):
        check_kernel(region.workload, registry.get("aten").build(region.workload, {"formulation": "row_blocks", "rows": rows}))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b, y: F.nll_loss(F.log_softmax(x @ w.t(), 0), y),
        lambda x, w, b, y: F.nll_loss(F.log_softmax((x @ w.t()).view(11, 30), 1).view(30, 11), y),
        lambda x, w, b, y: F.nll_loss(F.log_softmax((x @ w.t()).t(), 1).t(), y),
        lambda x, w, b, y: F.cross_entropy(x @ w.t(), y, weight=b),
        lambda x, w, b, y: F.cross_entropy(x @ w.t(), y, reduction="none"),
    ],
)
def test_what_looks_like_a_loss_head_and_is_not(function):
    assert not [r for r in regions(function, *HEAD) if "nll_loss" in r.workload.op]


def test_ignored_targets_have_no_loss_and_no_gradient():
    torch.manual_seed(0)
    x, w, b, y = torch.randn(30, 8), torch.randn(11, 8), torch.randn(11), torch.randint(11, (30,))
    y[::3] = -100
    (region,) = [r for r in regions(head(bias=True), *HEAD) if "nll_loss_backward" in r.workload.op]
    kernel = registry.get("aten").build(region.workload, {"formulation": "row_blocks", "rows": 8})
    values = {"x": x, "w": w.t(), "b": b, "y": y, "one": torch.ones(()), "right": w}
    by_spec = {(tuple(v.shape), v.stride()): v for v in values.values()}
    found = kernel(*[by_spec[spec.shape, spec.stride] for spec in region.workload.inputs])
    x, w, b = (v.requires_grad_() for v in (x, w, b))
    loss = F.cross_entropy(F.linear(x, w, b), y)
    wanted = {g.shape: g for g in torch.autograd.grad(loss, (x, w, b))} | {loss.shape: loss.detach()}
    for value in found:
        torch.testing.assert_close(value.view(-1) if value.shape == (1, 11) else value, wanted[value.squeeze(0).shape])


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (PRODUCTS["relu"], {"formulation": "accumulate"}),
        (PRODUCTS["residual"], {"formulation": "accumulate", "also": 1}),
        (PRODUCTS["residual"], {"formulation": "sdpa"}),
        (PRODUCTS["residual"], {"formulation": "row_blocks", "rows": 4}),
        (ATTENTION["mask"], {"formulation": "in_place"}),
        ((lambda x, w, b, y: F.cross_entropy(F.linear(x, w), y), HEAD), {"formulation": "row_blocks", "rows": 0}),
        ((lambda x, w, b, y: F.cross_entropy(F.linear(x, w), y), HEAD), {"formulation": "row_blocks", "rows": "all"}),
    ],
)
def test_a_config_that_does_not_fit_is_refused(case, config):
    region = max(regions(*_flat(case)), key=lambda r: len(r.nodes))
    with pytest.raises(BuildError, match="config"):
        registry.get("aten").build(region.workload, config)
