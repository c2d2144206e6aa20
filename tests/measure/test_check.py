"""The accuracy check passes what PyTorch runs and refuses what differs in values, layout or manners."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from raftune.dialects.torch_ops import graph_module
from raftune.graph.workloads import workload_from_call
from raftune.measure import poison
from raftune.measure.check import Checker, ReferenceFailed
from raftune.measurement import Status
from raftune.workload import In, Operator, Out, TensorSpec, Workload

aten = torch.ops.aten


def randn(*shape: int) -> Tensor:
    return torch.randn(shape)


def sgd() -> Workload:
    tensors = ([randn(4, 5), randn(7)], [randn(4, 5), randn(7)], [randn(4, 5), randn(7)])
    options = {"weight_decay": 0.01, "momentum": 0.9, "dampening": 0.0, "nesterov": False, "maximize": False}
    return workload_from_call(
        aten._fused_sgd_.tensor_lr, tensors, {"lr": torch.tensor(1e-3), "is_first_step": False, **options}
    )


CALLS: dict[str, Callable[[], Workload]] = {
    "addmm": lambda: workload_from_call(aten.addmm.default, (randn(16), randn(32, 64).t(), randn(32, 16))),
    "bfloat16": lambda: workload_from_call(aten.mm.default, (randn(32, 64).bfloat16(), randn(64, 8).bfloat16())),
    "float16": lambda: workload_from_call(aten.mm.default, (randn(32, 64).half(), randn(64, 8).half())),
    "norm": lambda: workload_from_call(aten.native_layer_norm.default, (randn(4, 32), [32], randn(32), randn(32), 1e-5)),
    "dtype argument": lambda: workload_from_call(
        aten._softmax_backward_data.default, (randn(4, 9), randn(4, 9), 1, torch.float32)
    ),
    "integers": lambda: workload_from_call(aten.embedding.default, (randn(10, 4), torch.randint(0, 10, (3, 2)))),
    "integer result": lambda: workload_from_call(aten.max_pool2d_with_indices.default, (randn(1, 2, 8, 8), [2, 2], [2, 2])),
    "boolean result": lambda: workload_from_call(aten.gt.Scalar, (randn(9), 0)),
    "empty": lambda: workload_from_call(aten.relu.default, (randn(0, 4),)),
    "scalar": lambda: workload_from_call(aten.sum.default, (randn(5, 5),)),
    "expanded": lambda: workload_from_call(aten.mul.Tensor, (randn(1, 8).expand(4, 8), randn(4, 8))),
    "nan": lambda: workload_from_call(aten.acos.default, (randn(50),)),
    "optimizer": sgd,
}


@pytest.mark.parametrize("name", CALLS)
def test_the_default_passes(name: str) -> None:
    workload = CALLS[name]()
    verdict = Checker(workload).check(graph_module(workload))
    assert (verdict.status, verdict.message) == (Status.OK, "")
    assert verdict.max_error is not None
    assert verdict.max_error <= 0.5


def matmul(dtype: torch.dtype = torch.float32, n: int = 256) -> Workload:
    return workload_from_call(aten.mm.default, (torch.randn(32, n).to(dtype), torch.randn(n, 16).to(dtype)))


def test_another_order_of_summation_passes_and_less_precision_does_not() -> None:
    checker = Checker(matmul(n=2048))

    def sequential(a: Tensor, b: Tensor) -> Tensor:
        total = torch.zeros(a.shape[0], b.shape[1])
        for k in range(a.shape[1]):
            total += a[:, k, None] * b[k]
        return total

    assert checker.check(sequential).status is Status.OK
    verdict = checker.check(lambda a, b: (a.bfloat16() @ b.bfloat16()).float())
    assert verdict.status is Status.WRONG
    assert verdict.max_error is not None
    assert verdict.max_error > 10


@pytest.mark.parametrize("seed", range(8))
def test_a_sum_that_cancels_may_be_summed_in_any_order(seed: int) -> None:
    checker = Checker(workload_from_call(aten.sum.default, (randn(20000),)), seed)
    assert checker.check(lambda x: torch.from_numpy(x.numpy().cumsum(dtype="float32"))[-1].clone()).status is Status.OK
    assert checker.check(lambda x: x.bfloat16().float().sum()).status is Status.WRONG


def test_an_operator_without_float64_is_compared_with_pytorch_and_says_so() -> None:
    x, y = (TensorSpec("float32", (1, c, 8, 8), (64 * c, 64, 8, 1)) for c in (3, 4))
    w = TensorSpec("float32", (4, 3, 3, 3), (27, 9, 3, 1))
    convolution = Operator("aten.mkldnn_convolution.default", (In(0), In(1), None, (1, 1), (1, 1), (1, 1), 1))
    workload = Workload((convolution,), (x, w), (Out(0),), (y,))
    checker = Checker(workload)
    verdict = checker.check(graph_module(workload))
    assert verdict.status is Status.OK
    assert "none in float64" in verdict.message
    assert checker.check(lambda x, w: torch.conv2d(x, w, padding=1)).status is Status.OK
    assert checker.check(lambda x, w: torch.conv2d(x, w, padding=1) * 1.001).status is Status.WRONG


def test_a_workload_that_pytorch_cannot_run_is_refused() -> None:
    spec = TensorSpec("float32", (2, 3), (3, 1))
    impossible = Workload((Operator("aten.mm.default", (In(0), In(0))),), (spec,), (Out(0),), (spec,))
    with pytest.raises(ReferenceFailed, match=r"aten\.mm\.default fails: RuntimeError"):
        Checker(impossible)


def test_constants_may_be_kept_and_others_may_not() -> None:
    free = matmul()
    packed = dataclasses.replace(free, inputs=(free.inputs[0], dataclasses.replace(free.inputs[1], constant=True)))

    def packing() -> Callable[[Tensor, Tensor], Tensor]:
        kept: list[Tensor] = []

        def kernel(a: Tensor, b: Tensor) -> Tensor:
            if not kept:
                kept.append(b.clone())
            return a @ kept[0]

        return kernel

    assert Checker(packed).check(packing()).status is Status.OK
    assert Checker(free).check(packing()).status is Status.WRONG


def test_side_effects_are_checked() -> None:
    workload = sgd()
    checker, default = Checker(workload), graph_module(workload)
    assert checker.check(lambda *inputs: None).status is Status.WRONG
    assert "updated input" in checker.check(lambda *inputs: None).message

    def touches_gradient(*inputs: Tensor) -> Any:
        result = default(*inputs)
        gradient = next(i for i in range(len(inputs)) if i not in workload.mutates)
        inputs[gradient].add_(1)
        return result

    assert "was written to" in checker.check(touches_gradient).message


def test_writing_into_a_gap_of_an_input_is_seen() -> None:
    workload = workload_from_call(aten.relu.default, (torch.randn(4, 8)[:, :3],))

    def kernel(x: Tensor) -> Tensor:
        result = torch.relu(x)
        x.as_strided((1,), (1,), 3).zero_()
        return result

    assert Checker(workload).check(kernel).message == "input 0 was written to"


def test_an_unwritten_part_is_seen() -> None:
    workload = workload_from_call(aten.relu.default, (torch.randn(64, 64),))
    stale = torch.randn(64, 64)

    def kernel(x: Tensor) -> Tensor:
        # What an allocator likes to hand out: the memory of an earlier right result.
        relu = torch.relu(x)
        del relu
        result = torch.empty_like(stale)
        result[:-1] = torch.relu(x[:-1])
        return result

    verdict = Checker(workload).check(kernel)
    assert verdict.status is Status.WRONG
    assert "output 0[63, 0]" in verdict.message


def test_poison_reaches_every_floating_point_dtype_and_ends() -> None:
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    with poison.poisoned_memory():
        assert all(torch.empty(5000, dtype=dtype).isnan().all() for dtype in dtypes)
    # Large, so that it is not just the memory that was filled above; it may hold whatever else was there.
    assert not torch.empty(1 << 24).isnan().all()


def test_infinities_must_be_the_same() -> None:
    workload = workload_from_call(aten.mul.Scalar, (randn(64), float("inf")))
    checker = Checker(workload)
    assert checker.check(lambda x: x * float("inf")).status is Status.OK
    assert checker.check(lambda x: x * float("-inf")).status is Status.WRONG
    assert checker.check(lambda x: x * 1e38 * 1e38).status is Status.OK
    assert checker.check(lambda x: x * 1e30).status is Status.WRONG


def test_two_outputs_in_one_memory_are_refused() -> None:
    workload = workload_from_call(aten.native_layer_norm.default, (randn(4, 32), [32], randn(32), randn(32), 1e-5))

    def kernel(*inputs: Tensor) -> tuple[Tensor, ...]:
        result, mean, rstd = graph_module(workload)(*inputs)
        both = torch.stack([mean, rstd])
        return result, both[0], both[1]

    assert "is not fresh memory" in Checker(workload).check(kernel).message


def test_a_kernel_that_needs_aligned_inputs_is_refused_and_is_timed_on_such() -> None:
    workload = workload_from_call(aten.relu.default, (randn(64),))
    checker = Checker(workload)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in checker.scratch())

    def kernel(x: Tensor) -> Tensor:
        down = x.data_ptr() % 64 // x.element_size()
        return torch.relu(x.as_strided(x.shape, x.stride(), x.storage_offset() - down))

    verdict = checker.check(kernel)
    assert verdict.status is Status.WRONG
    assert "output 0" in verdict.message
