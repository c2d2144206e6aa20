"""Each lowered operator against PyTorch in float64: values, and the dtypes, shapes and strides of what it returns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raftune.dialects.torch_ops import graph_module
from raftune.dialects.tvm import TvmDialect
from raftune.dialects.tvm.lowering import registry
from raftune.graph.workloads import workload_from_call
from raftune.workload import In, Operator, Out, TensorSpec, Workload

aten = torch.ops.aten
DIALECT = TvmDialect()


def rand(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, generator=generator)


def mask(*shape: int) -> torch.Tensor:
    return rand(*shape) > 0


def log_probabilities() -> torch.Tensor:
    return rand(11, 7).log_softmax(-1)


LABELS = torch.tensor([0, 3, -100, 6, 1, 2, 3, 4, 5, 6, 0])


def norm_statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    _, mean, rstd = aten.native_layer_norm.default(x, [x.shape[-1]], None, None, 1e-5)
    return mean, rstd


PRODUCTS: list[tuple[Any, ...]] = [
    (aten.mm.default, (rand(37, 53), rand(53, 29))),
    (aten.mm.default, (rand(1, 1), rand(1, 1))),
    (aten.mm.default, (rand(64, 48), rand(10, 48).t())),
    (aten.mm.default, (rand(48, 64).t(), rand(10, 48).t())),
    (aten.mm.default, (rand(17, 40)[:, 3:20], rand(17, 32))),
    (aten.mm.default, (rand(1, 19).expand(5, 19), rand(19, 1).expand(19, 33))),
    (aten.addmm.default, (rand(32), rand(8, 16), rand(32, 16).t())),
    (aten.addmm.default, (rand(8, 32), rand(8, 16), rand(16, 32)), {"beta": 0.5, "alpha": 2}),
    (aten.bmm.default, (rand(3, 9, 16), rand(3, 20, 16).transpose(1, 2))),
    (aten.bmm.default, (rand(2, 5, 3, 8).transpose(1, 2).reshape(6, 5, 8), rand(6, 8, 17))),
    (aten.baddbmm.default, (rand(1, 32), rand(3, 9, 16), rand(3, 16, 32))),
    (aten.mm.default, (rand(6, 20).double(), rand(20, 24).double())),
]

POINTWISE: list[tuple[Any, ...]] = [
    *(
        (op.default, (rand(5, 13) * 10,))
        for op in (aten.exp, aten.tanh, aten.sigmoid, aten.silu, aten.relu, aten.neg, aten.abs)
    ),
    (aten.exp.default, (rand(16, 16) * 10,)),
    (aten.gelu.default, (rand(8, 32) * 2,)),
    (aten.gelu.default, (rand(8, 32) * 2,), {"approximate": "tanh"}),
    (aten.erf.default, (rand(97) * 2,)),
    (aten.log.default, (rand(64).abs() + 1e-6,)),
    (aten.rsqrt.default, (rand(64).abs() + 0.1,)),
    (aten.gelu_backward.default, (rand(4, 16), rand(4, 16) * 2)),
    (aten.gelu_backward.default, (rand(4, 16), rand(4, 16) * 2), {"approximate": "tanh"}),
    (aten.silu_backward.default, (rand(3, 7), rand(3, 7))),
    (aten.tanh_backward.default, (rand(3, 7), rand(3, 7).tanh())),
    (aten.sigmoid_backward.default, (rand(3, 7), rand(3, 7).sigmoid())),
    (aten.threshold_backward.default, (rand(32, 16), rand(32, 16), 0)),
    (aten.native_dropout_backward.default, (rand(4, 16), mask(4, 16), 1.25)),
    (aten.bitwise_not.default, (mask(4, 17),)),
    (aten.eq.Tensor, (mask(4, 17), mask(4, 1))),
    (aten.ne.Tensor, (mask(4, 17), mask(17))),
    (aten.bitwise_not.default, (torch.arange(-5, 6),)),
    (aten.logical_not.default, (mask(4, 17),)),
    (aten.logical_not.default, (rand(33).relu(),)),
    (aten.add.Tensor, (rand(5, 1, 7), rand(3, 1)), {"alpha": 2}),
    (aten.add.Tensor, (rand(16, 8).t(), rand(16, 8).t())),
    (aten.add.Tensor, (rand(8, 12, 4)[:, 2:7], rand(5, 1))),
    (aten.sub.Tensor, (rand(4, 6), rand(6, 4).t())),
    (aten.mul.Tensor, (rand(4, 1).expand(4, 6), rand(6))),
    (aten.mul.Tensor, (rand(4, 6), rand())),
    (aten.mul.Tensor, (torch.arange(6), 2.5)),
    (aten.div.Tensor, (torch.arange(6), 4)),
    (aten.add.Tensor, (torch.arange(6), 4)),
    (aten.pow.Tensor_Scalar, (rand(3, 5), 3)),
    (aten.where.self, (mask(4, 1), rand(4, 6), rand(6))),
    (aten.eq.Scalar, (torch.arange(12) % 3, 1)),
    (aten.le.Tensor, (rand(4, 6), rand(6))),
    (aten._to_copy.default, (mask(7, 5),), {"dtype": torch.float32}),
    (aten.clone.default, (rand(4, 6).t(),), {"memory_format": torch.contiguous_format}),
    (aten.mul.Tensor, (rand(2, 3, 4, 5).to(memory_format=torch.channels_last), 2.0)),
]

REDUCTIONS: list[tuple[Any, ...]] = [
    (aten.sum.dim_IntList, (rand(12, 64), [1])),
    (aten.sum.dim_IntList, (rand(12, 64), [0], True)),
    (aten.sum.dim_IntList, (rand(7, 13, 37), [-1])),
    (aten.sum.dim_IntList, (rand(7, 13, 37), [0, 2], True)),
    (aten.sum.dim_IntList, (rand(4, 3, 16, 16), [0, 2, 3])),
    (aten.sum.dim_IntList, (rand(5, 1, 3), [1])),
    (aten.sum.dim_IntList, (rand(64, 12).t(), [1])),
    (aten.sum.default, (rand(1000),)),
    (aten.sum.default, (mask(100),)),
    (aten.mean.dim, (rand(6, 50), [-1], True)),
    (aten.mean.default, (rand(6, 50),)),
    (aten.amax.default, (rand(6, 50), [1])),
    (aten.var.correction, (rand(6, 50), [1]), {"correction": 1}),
    (aten._softmax.default, (rand(33, 37) * 5, -1, False)),
    (aten._softmax.default, (rand(4, 64) * 5, 1, False)),
    (aten._softmax.default, (rand(3, 8, 9), 1, False)),
    (aten._log_softmax.default, (rand(9, 48) * 5, -1, False)),
    (aten._log_softmax.default, (rand(2, 3, 5), -1, False)),
    (aten._softmax_backward_data.default, (rand(5, 48), rand(5, 48).softmax(-1), -1, torch.float32)),
    (aten._log_softmax_backward_data.default, (rand(5, 31), rand(5, 31).log_softmax(-1), -1, torch.float32)),
    (aten.native_layer_norm.default, (rand(6, 5, 64), [64], rand(64), rand(64), 1e-5)),
    (aten.native_layer_norm.default, (rand(9, 29), [29], None, None, 1e-5)),
    (
        aten.native_layer_norm_backward.default,
        (rand(6, 32), rand(6, 32) * 2, [32], *norm_statistics(rand(6, 32) * 2), rand(32), rand(32), [True, True, True]),
    ),
    (
        aten.native_layer_norm_backward.default,
        (rand(7, 29), rand(7, 29) * 2, [29], *norm_statistics(rand(7, 29) * 2), rand(29), rand(29), [True, False, False]),
    ),
]

INDEXING: list[tuple[Any, ...]] = [
    (aten.embedding.default, (rand(50, 24), torch.arange(30).reshape(5, 6) % 50)),
    (aten.nll_loss_forward.default, (log_probabilities(), LABELS, None, 1, -100)),
    (aten.nll_loss_forward.default, (log_probabilities(), LABELS, None, 2, -100)),
    (aten.nll_loss_backward.default, (rand(), log_probabilities(), LABELS, None, 1, -100, torch.tensor(10.0))),
]


def heads(batch: int, count: int, length: int, width: int) -> tuple[torch.Tensor, ...]:
    """Query, key and value as a model makes them: transposed views of one product."""
    return tuple(x.transpose(1, 2) for x in rand(batch, length, 3, count, width).unbind(2))


def hidden(*shape: int) -> torch.Tensor:
    """A mask that hides some keys, and from the second query all of them."""
    hides = rand(*shape) > 0.5
    if shape[-2] > 1:
        hides[..., 1, :] = True
    return torch.zeros(shape).masked_fill(hides, -torch.inf)


def attention_backward(
    batch: int, count: int, length: int, width: int, causal: bool, mask: torch.Tensor | None = None
) -> tuple[Any, ...]:
    query, key, value = heads(batch, count, length, width)
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    out, normalizer = forward(query, key, value, 0.0, causal, attn_mask=mask)
    return rand(batch, count, length, width), query, key, value, out, normalizer, 0.0, causal


ATTENTION: list[tuple[Any, ...]] = [
    (aten._scaled_dot_product_flash_attention_for_cpu.default, (*heads(2, 3, 37, 16), 0.0, True)),
    (aten._scaled_dot_product_flash_attention_for_cpu.default, (*heads(1, 2, 64, 32), 0.0, False), {"scale": 0.3}),
    (aten._scaled_dot_product_flash_attention_for_cpu.default, (rand(2, 1, 5, 8), rand(2, 1, 5, 8) * 9, rand(2, 1, 5, 8))),
    (aten._scaled_dot_product_flash_attention_for_cpu_backward.default, attention_backward(2, 3, 37, 16, True)),
    (aten._scaled_dot_product_flash_attention_for_cpu_backward.default, attention_backward(2, 2, 64, 32, False)),
    *(
        case
        for mask in (
            hidden(2, 1, 1, 37),
            hidden(1, 1, 37, 37),
            hidden(2, 3, 37, 37),
            rand(37, 37),
            hidden(2, 1, 1, 37).clamp(min=-3e38),
        )
        for case in (
            (aten._scaled_dot_product_flash_attention_for_cpu.default, heads(2, 3, 37, 16), {"attn_mask": mask}),
            (
                aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
                attention_backward(2, 3, 37, 16, False, mask),
                {"attn_mask": mask},
            ),
        )
    ),
]


def convolution(n: int, c: int, h: int, out: int, k: int, stride: int, pad: int, dilation: int, groups: int) -> tuple[Any, ...]:
    x, weight = rand(n, c, h, h + 1), rand(out, c // groups, k, k)
    return x, weight, rand(out), [stride] * 2, [pad] * 2, [dilation] * 2, False, [0, 0], groups


def convolution_backward(*sizes: int, wanted: tuple[bool, bool, bool]) -> tuple[Any, ...]:
    x, weight, bias, *rest = convolution(*sizes)
    grad = torch.randn_like(aten.convolution.default(x, weight, bias, *rest))
    return grad, x, weight, [sizes[3]], *rest, list(wanted)


CONVOLUTION_SIZES = [
    (2, 3, 9, 5, 3, 1, 1, 1, 1),
    (1, 4, 8, 8, 3, 2, 1, 1, 2),
    (2, 6, 11, 6, 3, 1, 2, 2, 6),
    (1, 8, 7, 16, 1, 2, 0, 1, 1),
    (2, 16, 15, 32, 1, 1, 0, 1, 1),
    (1, 32, 15, 17, 3, 1, 1, 1, 1),
    (1, 1, 1, 1, 1, 1, 0, 1, 1),
    (1, 3, 13, 4, 5, 3, 1, 1, 1),
    (3, 16, 16, 16, 3, 1, 1, 1, 16),
    (1, 2, 6, 3, 1, 1, 1, 1, 1),
]
CONVOLUTIONS: list[tuple[Any, ...]] = [
    *((aten.convolution.default, convolution(*sizes)) for sizes in CONVOLUTION_SIZES),
    *(
        (aten.convolution_backward.default, convolution_backward(*sizes, wanted=(True, True, number % 2 == 0)))
        for number, sizes in enumerate(CONVOLUTION_SIZES)
    ),
    (aten.convolution_backward.default, convolution_backward(2, 3, 9, 5, 3, 1, 1, 1, 1, wanted=(False, True, False))),
    (aten.convolution.default, (rand(2, 5, 20), rand(7, 5, 4), None, [2], [1], [1], False, [0], 1)),
    (aten.convolution.default, (rand(1, 2, 5, 6, 7), rand(3, 2, 3, 3, 3), None, [1], [1], [1], False, [0], 1)),
    (
        aten.convolution.default,
        (rand(2, 8, 6, 6).to(memory_format=torch.channels_last), rand(6, 8, 3, 3), None, [1], [1], [1], False, [0], 1),
    ),
    (aten.convolution.default, (rand(1, 2, 6, 6).double(), rand(3, 2, 3, 3).double(), None, [1], [1], [1], False, [0], 1)),
]


def max_pool_backward(x: torch.Tensor, *arguments: Any) -> tuple[Any, ...]:
    values, indices = aten.max_pool2d_with_indices.default(x, *arguments)
    return torch.randn_like(values), x, *arguments, indices


def ties(*shape: int) -> torch.Tensor:
    return (rand(*shape) * 2).round()


POOLING: list[tuple[Any, ...]] = [
    (aten.max_pool2d_with_indices.default, (rand(2, 3, 8, 8), [2, 2], [2, 2])),
    (aten.max_pool2d_with_indices.default, (ties(2, 3, 9, 7), [3, 3], [2, 2], [1, 1])),
    (aten.max_pool2d_with_indices.default, (ties(1, 2, 10, 11), [3, 2], [2, 3], [1, 1], [2, 1], True)),
    (aten.max_pool2d_with_indices.default, (torch.full((1, 1, 5, 5), -torch.inf), [3, 3], [2, 2], [1, 1])),
    (aten.max_pool2d_with_indices_backward.default, max_pool_backward(rand(2, 3, 8, 8), [2, 2], [2, 2], [0, 0], [1, 1], False)),
    (aten.max_pool2d_with_indices_backward.default, max_pool_backward(ties(2, 3, 9, 7), [3, 3], [2, 2], [1, 1], [1, 1], True)),
    (aten.avg_pool2d.default, (rand(2, 3, 8, 9), [2, 3], [2, 2])),
    (aten.avg_pool2d_backward.default, (rand(2, 3, 4, 4), rand(2, 3, 8, 9), [2, 3], [2, 2], [0, 0], False, True, None)),
]


def batch_statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    _, mean, rstd = aten.native_batch_norm.default(x, None, None, None, None, True, 0.1, 1e-5)
    return mean, rstd


def group_norm_backward(
    n: int, c: int, h: int, groups: int, weight: torch.Tensor | None, wanted: list[bool]
) -> tuple[Any, ...]:
    x = rand(n, c, h, h)
    _, mean, rstd = aten.native_group_norm.default(x, weight, None, n, c, h * h, groups, 1e-5)
    return torch.randn_like(x), x, mean, rstd, weight, n, c, h * h, groups, wanted


BATCH = aten._native_batch_norm_legit_functional.default
NORMALIZATION: list[tuple[Any, ...]] = [
    (BATCH, (rand(4, 3, 8, 8), rand(3), rand(3), rand(3), rand(3).abs(), True, 0.1, 1e-5)),
    (BATCH, (rand(5, 6, 7), None, None, rand(6), rand(6).abs(), True, 0.3, 1e-3)),
    (BATCH, (rand(16, 32), rand(32), rand(32), rand(32), rand(32).abs(), True, 0.1, 1e-5)),
    (
        aten.native_batch_norm_backward.default,
        (
            *(rand(4, 3, 8, 8).flip(3) + 1, rand(4, 3, 8, 8) * 2, rand(3), None, None),
            *batch_statistics(rand(4, 3, 8, 8) * 2),
            *(True, 1e-5, [True, True, True]),
        ),
    ),
    (
        aten.native_batch_norm_backward.default,
        (rand(4, 5, 3), rand(4, 5, 3) * 2, rand(5), rand(5), rand(5).abs() + 0.1, None, None, False, 1e-5, [True, True, False]),
    ),
    (aten.native_group_norm.default, (rand(2, 6, 4, 4), rand(6), rand(6), 2, 6, 16, 3, 1e-5)),
    (aten.native_group_norm.default, (rand(3, 4, 5), None, None, 3, 4, 5, 1, 1e-5)),
    (aten.native_group_norm_backward.default, group_norm_backward(2, 6, 4, 3, rand(6), [True, True, True])),
    (aten.native_group_norm_backward.default, group_norm_backward(1, 8, 5, 2, None, [True, False, False])),
]

OPERATORS = (*PRODUCTS, *POINTWISE, *REDUCTIONS, *INDEXING, *ATTENTION, *CONVOLUTIONS, *POOLING, *NORMALIZATION)
CASES = [case if len(case) == 3 else (*case, {}) for case in OPERATORS]


def case_name(case: tuple[Any, ...]) -> str:
    shapes = "_".join("x".join(map(str, a.shape)) for a in case[1] if isinstance(a, torch.Tensor))
    return f"{case[0]}-{shapes}"


def tensors(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else [t for t in value if isinstance(t, torch.Tensor)]


def widen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.double() if value.dtype == torch.float32 else value
    return torch.float64 if value is torch.float32 else value


def region_inputs(args: tuple[Any, ...]) -> list[torch.Tensor]:
    return list({id(a): a for a in tensors(args)}.values())


@pytest.mark.parametrize(("op", "args", "kwargs"), CASES, ids=[case_name(c) for c in CASES])
def test_default_schedule_matches_float64(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    workload = workload_from_call(op, args, kwargs)
    assert DIALECT.supports(workload)
    kernel = DIALECT.build(workload, {"schedule": "default"})
    found = tensors(kernel(*region_inputs((*args, *kwargs.values()))))
    usual = tensors(op(*args, **kwargs))
    reference = tensors(op(*[widen(a) for a in args], **{k: widen(v) for k, v in kwargs.items()}))
    assert len(found) == len(usual)
    for mine, theirs, exact in zip(found, usual, reference, strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        scale = exact.double().abs().mean().item() + 1e-6
        torch.testing.assert_close(mine.double(), exact.double(), rtol=2e-5, atol=2e-5 * scale)


@pytest.mark.parametrize("second", ["mul", "_softmax", "gelu"])
def test_regions_of_two_operators(second: str) -> None:
    spec = TensorSpec("float32", (8, 16), (16, 1))
    args = {"mul": (Out(0), Out(0)), "_softmax": (Out(0), -1, False), "gelu": (Out(0),)}[second]
    overload = "Tensor" if second == "mul" else "default"
    operators = (Operator("aten.tanh.default", (In(0),)), Operator(f"aten.{second}.{overload}", args))
    workload = Workload(operators, (spec,), (Out(1), Out(0)), (spec, spec))
    assert DIALECT.supports(workload)
    x = rand(8, 16)
    for found, expected in zip(DIALECT.build(workload, {"schedule": "default"})(x), graph_module(workload)(x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_special_values_as_pytorch() -> None:
    x = torch.tensor([0.0, -0.0, 1e-40, 88.9, -104.0, 1e30, -1e30, torch.inf, -torch.inf, torch.nan] * 2)
    for op in (aten.exp, aten.log, aten.tanh, aten.erf, aten.relu, aten.sigmoid):
        found = DIALECT.build(workload_from_call(op.default, (x,), {}), {"schedule": "default"})(x)
        torch.testing.assert_close(
            found, op.default(x), rtol=1e-5, atol=2e-38, equal_nan=True, msg=lambda m, op=op: f"{op}: {m}"
        )


@pytest.mark.parametrize("schedule", ["default", "trace"])
@pytest.mark.parametrize(
    ("op", "shape", "args"),
    [
        (aten.exp, (32, 64), ()),
        (aten.amax, (64, 8, 8), ([-1],)),
        (aten._softmax, (16, 64), (-1, False)),
        (aten.sum.dim_IntList, (16, 64), ([0],)),
        (aten.mm, (32, 64), (rand(64, 48),)),
    ],
    ids=str,
)
def test_data_may_lie_at_any_address(op: Any, shape: tuple[int, ...], args: tuple[Any, ...], schedule: str) -> None:
    overload = op.default if isinstance(op, torch._ops.OpOverloadPacket) else op
    shifted = [shift(a) if isinstance(a, torch.Tensor) else a for a in (rand(*shape), *args)]
    workload = workload_from_call(overload, tuple(shifted), {})
    configs = [{"schedule": "default"}] if schedule == "default" else DIALECT.sample(workload, 2, 1)
    for config in configs:
        found = DIALECT.build(workload, config)(*region_inputs(tuple(shifted)))
        torch.testing.assert_close(found, overload(*shifted), rtol=1e-5, atol=1e-5)


def shift(x: torch.Tensor) -> torch.Tensor:
    """The tensor one element beyond an aligned address."""
    return torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


@pytest.mark.parametrize(("shape", "dims"), [((64, 8, 8), [-1]), ((6, 50), [1]), ((64, 12), [0]), ((3, 5), [0, 1])])
def test_extrema_keep_nan_and_infinities(shape: tuple[int, ...], dims: list[int]) -> None:
    for op, lowest in ((aten.amax.default, -torch.inf), (aten.amin.default, torch.inf)):
        x = rand(*shape)
        x[0, 0], x[-1] = torch.nan, lowest
        workload = workload_from_call(op, (x, dims), {})
        for config in ({"schedule": "default"}, *DIALECT.sample(workload, 2, 1)):
            torch.testing.assert_close(DIALECT.build(workload, config)(x), op(x, dims), rtol=0, atol=0, equal_nan=True)


def test_the_larger_and_the_smaller_of_two_keep_nan_of_either() -> None:
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 1.0])
    x, y = (t.flatten().contiguous() for t in torch.meshgrid(values, values, indexing="ij"))
    for op in (aten.maximum.default, aten.minimum.default):
        kernel = DIALECT.build(workload_from_call(op, (x, y), {}), {"schedule": "default"})
        torch.testing.assert_close(kernel(x, y), op(x, y), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_of_infinities_and_large_numbers_as_in_float64(approximate: str) -> None:
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 100.0, -100.0] * 4)
    kernel = DIALECT.build(workload_from_call(aten.gelu.default, (x,), {"approximate": approximate}), {"schedule": "default"})
    exact = aten.gelu.default(x.double(), approximate=approximate).float()
    torch.testing.assert_close(kernel(x), exact, rtol=1e-6, atol=0, equal_nan=True)


def test_masked_softmax_ignores_minus_infinity() -> None:
    x = rand(4, 32)
    x[:, 20:] = -torch.inf
    kernel = DIALECT.build(workload_from_call(aten._softmax.default, (x, -1, False), {}), {"schedule": "default"})
    torch.testing.assert_close(kernel(x), torch.softmax(x, -1))


def test_kernel_takes_parameters_and_unaligned_memory_and_returns_fresh_memory() -> None:
    x = rand(17)[1:].requires_grad_()
    y = rand(16)
    kernel = DIALECT.build(workload_from_call(aten.mul.Tensor, (x.detach(), y), {}), {"schedule": "default"})
    first, second = kernel(x, y), kernel(x, y)
    assert first.data_ptr() != second.data_ptr()
    assert not first.requires_grad
    torch.testing.assert_close(first, (x * y).detach())


def test_unlowered_and_empty_workloads_are_not_supported() -> None:
    transposed = (rand(1, 4, 8, 8), rand(4, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], True, [0, 0], 1)
    assert not DIALECT.supports(workload_from_call(aten.convolution.default, transposed, {}))
    assert not DIALECT.supports(workload_from_call(aten.mm.default, (rand(0, 4), rand(4, 4)), {}))
    assert not DIALECT.supports(workload_from_call(aten.mm.default, (rand(4, 4).half(), rand(4, 4).half()), {}))
    flash = aten._scaled_dot_product_flash_attention_for_cpu.default
    query, key, value = heads(1, 2, 8, 16)
    assert not DIALECT.supports(workload_from_call(flash, (query, key, value), {"attn_mask": rand(8, 8) > 0}))
    assert not DIALECT.supports(workload_from_call(flash, (query, key[:, :, :4], value[:, :, :4]), {}))


def test_every_rule_names_an_operator_of_pytorch() -> None:
    for name in registry.names():
        namespace, packet, overload = name.split(".")
        assert hasattr(getattr(getattr(torch.ops, namespace), packet), overload), name
