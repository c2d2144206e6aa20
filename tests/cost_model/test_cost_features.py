"""Estimates of work against PyTorch's own counter, layouts, and the encoding."""

import math

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from raftune.cost_model import flops
from raftune.cost_model.features import Encoder, candidate_features, device_features, layout_of, workload_features
from raftune.device import Device
from raftune.workload import Candidate, In, Literal, Operator, Out, TensorSpec, Workload

aten = torch.ops.aten


def spec_of(tensor):
    return TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(tensor.stride()))


def called(op, *args):
    """A region of one for a call, built here from its arguments alone."""
    inputs = []

    def convert(arg):
        if isinstance(arg, torch.Tensor):
            inputs.append(spec_of(arg))
            return In(len(inputs) - 1)
        return tuple(map(convert, arg)) if isinstance(arg, list) else arg

    converted = tuple(map(convert, args))
    results = op(*args)
    results = [r for r in (results if isinstance(results, tuple) else [results]) if isinstance(r, torch.Tensor)]
    specs = tuple(map(spec_of, results))
    return Workload((Operator(str(op), converted),), tuple(inputs), tuple(Out(0, i) for i in range(len(specs))), specs)


def t(*shape):
    return torch.zeros(shape)


STRIDED = [2, 2], [1, 1], [1, 1], False, [0, 0], 1

CALLS = [
    (aten.mm.default, t(5, 6), t(6, 7)),
    (aten.addmm.default, t(7), t(5, 6), t(6, 7)),
    (aten.bmm.default, t(3, 5, 6), t(3, 6, 7)),
    (aten.baddbmm.default, t(3, 5, 7), t(3, 5, 6), t(3, 6, 7)),
    (aten.convolution.default, t(2, 8, 9, 9), t(6, 4, 3, 3), None, [2, 2], [1, 1], [1, 1], False, [0, 0], 2),
    (aten.convolution.default, t(2, 8, 9), t(6, 8, 3), None, [1], [0], [2], False, [0], 1),
    (aten.convolution.default, t(2, 8, 9, 9), t(8, 4, 3, 3), None, [2, 2], [1, 1], [1, 1], True, [0, 0], 1),
    *(
        (aten.convolution_backward.default, t(2, 6, 5, 5), t(2, 8, 9, 9), t(6, 8, 3, 3), None, *STRIDED, [*mask, False])
        for mask in ([True, True], [True, False], [False, True])
    ),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: str(call[0]))
def test_flops_are_pytorchs(call):
    op, *args = call
    with FlopCounterMode(display=False) as counter:
        op(*args)
    assert flops.flops(called(op, *args)) == counter.get_total_flops() > 0


def test_attention_flops_are_those_of_its_products():
    q, k, v = t(2, 3, 16, 8), t(2, 3, 20, 8), t(2, 3, 20, 8)

    def products(*shapes):
        return sum(2 * 2 * 3 * a * b * c for a, b, c in shapes)

    specs = tuple(map(spec_of, (q, k, v)))
    forward = Operator("aten._scaled_dot_product_flash_attention_for_cpu.default", (In(0), In(1), In(2)))
    workload = Workload((forward,), specs, (Out(0),), (specs[0],))
    assert flops.flops(workload) == products((16, 20, 8), (16, 20, 8))
    backward = Operator(
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default", (In(0), In(1), In(2), In(3), In(0), In(0))
    )
    workload = Workload((backward,), (specs[0], *specs), (Out(0),), (specs[0],))
    assert flops.flops(workload) == products(*[(16, 20, 8)] * 5)


def test_flops_of_a_region_follow_inferred_shapes():
    x, w = TensorSpec("float32", (2, 4, 9, 9), (324, 81, 9, 1)), TensorSpec("float32", (6, 4, 3, 3), (36, 9, 3, 1))
    b = TensorSpec("float32", (5, 7), (7, 1))
    convolution = Operator("aten.convolution.default", (In(0), In(1), None, (2, 2), (1, 1), (1, 1), False, (0, 0), 1))
    activation = Operator("aten.relu.default", (Out(0),))
    product = Operator("aten.matmul.default", (Out(1), In(2)))
    result = TensorSpec("float32", (2, 6, 5, 7), (210, 35, 7, 1))
    workload = Workload((convolution, activation, product), (x, w, b), (Out(2),), (result,))
    elements = 2 * 6 * 5 * 5
    assert flops.flops(workload) == 2 * elements * 4 * 9 + elements + 2 * (2 * 6) * 5 * 5 * 7


def test_bytes_count_distinct_elements():
    a = TensorSpec("float32", (4, 8), (0, 1))  # expanded: eight elements
    b = TensorSpec("bfloat16", (4, 8), (8, 1))
    c = TensorSpec("float64", (4,), (1,))
    add = Operator("aten.add.Tensor", (In(0), In(1)))
    assert flops.bytes_moved(Workload((add,), (a, b), (Out(0),), (b,))) == 8 * 4 + 2 * 32 * 2
    update = Operator("aten._fused_sgd_.default", ((In(0),),))
    assert flops.bytes_moved(Workload((update,), (c,), (), (), mutates=(0,))) == 2 * 4 * 8


@pytest.mark.parametrize(
    ("op", "family"),
    [
        ("aten.addmm.default", "product"),
        ("aten.convolution.default", "convolution"),
        ("aten.convolution_backward.default", "convolution_backward"),
        ("aten._scaled_dot_product_flash_attention_for_cpu_backward.default", "attention_backward"),
        ("aten.native_layer_norm_backward.default", "norm"),
        ("aten._log_softmax_backward_data.default", "softmax"),
        ("aten.max_pool2d_with_indices_backward.default", "pool"),
        ("aten.embedding_dense_backward.default", "embedding"),
        ("aten.nll_loss_forward.default", "loss"),
        ("aten._fused_adamw_.tensor_lr", "optimizer"),
        ("aten.gelu_backward.default", "activation"),
        ("aten.relu.default", "other"),
        ("aten.sum.dim_IntList", "reduction"),
        ("aten.add.Tensor", "other"),
        ("nodots", "other"),
    ],
)
def test_families(op, family):
    assert flops.family_of(op) == family
    assert family in flops.FAMILIES


@pytest.mark.parametrize(
    ("tensor", "layout"),
    [
        (torch.zeros(4, 6), "contiguous"),
        (torch.zeros(4, 6).t(), "transposed"),
        (torch.zeros(2, 4, 6).transpose(1, 2), "transposed"),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), "channels_last"),
        (torch.zeros(1, 6).expand(4, 6), "expanded"),
        (torch.zeros(4, 12)[:, ::2], "other"),
        (torch.zeros(2, 3, 4).permute(1, 0, 2), "other"),
        (torch.tensor(1.0), "contiguous"),
    ],
)
def test_layouts(tensor, layout):
    assert layout_of(spec_of(tensor)) == layout


def test_workload_features_are_finite_and_tell_shapes_apart():
    for op, *args in CALLS:
        features = workload_features(called(op, *args))
        assert all(math.isfinite(value) for value in features.values())
    assert workload_features(called(aten.mm.default, t(5, 6), t(6, 7))) != workload_features(
        called(aten.mm.default, t(5, 6), t(6, 8))
    )
    dtype = Operator("aten.zeros.default", ((), Literal("dtype", "float32")))
    assert workload_features(Workload((dtype,), (), (Out(0),), (TensorSpec("float32", (), ()),)))["log_flops"] == 0.0


def test_candidate_features_are_bounded_and_named_by_dialect():
    config = {"tile": [8, 16], "pack": True, "loop": {"order": "mnk", "deep": [[[[[1]]]]]}, "big": 10**400, "none": None}
    features = candidate_features(Candidate("d", "1", config), {"copied": 5.0, "infinite": math.inf})
    largest = float(np.finfo(np.float32).max)
    assert features == {
        "dialect=d": 1.0,
        "d:tile.0": 8.0,
        "d:tile.1": 16.0,
        "d:pack": 1.0,
        "d:loop.order=mnk": 1.0,
        "d:big": largest,
        "d::copied": 5.0,
        "d::infinite": largest,
    }
    assert len(candidate_features(Candidate("d", "1", {"trace": list(range(10_000))}), {})) <= 65


def test_encoder_keeps_what_tells_rows_apart():
    encoder, matrix = Encoder.learn([{"same": 1.0, "b": 2.0, "a": 1.0}, {"same": 1.0, "a": 3.0}])
    assert encoder.columns == ("a", "b")
    np.testing.assert_array_equal(matrix, np.array([[1, 2], [3, np.nan]], dtype=np.float32))
    np.testing.assert_array_equal(encoder.encode([{"b": 7.0, "new": 1.0}]), np.array([[np.nan, 7]], dtype=np.float32))


def test_device_features():
    assert device_features(Device("cpu", "Some CPU", 4, ("avx2", "fma"), 2)) == {
        "device.cores": 4.0,
        "device.threads": 2.0,
        "device.avx2": 1.0,
        "device.fma": 1.0,
    }
