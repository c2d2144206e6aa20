"""What TVM has no tensor expressions for: updates in place, and sums over rows that data names, for one and more threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from raftune.dialects.base import BuildError
from raftune.dialects.tvm import TvmDialect
from raftune.graph.workloads import workload_from_call
from raftune.measure.check import Checker
from raftune.measurement import Status
from raftune.workload import Workload

aten = torch.ops.aten
DIALECT = TvmDialect()
DEFAULT = {"schedule": "default"}


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Less than a vector, a tail, one element, a matrix that threads share, and one whose columns lie close."""
    shapes = [(5,), (37,), (), (65, 129), (1, 3, 1)]
    return [torch.empty(shape, dtype=dtype) for shape in shapes] + [torch.empty(33, 40, dtype=dtype).t()]


def adam(op, params, *, amsgrad: bool = False, steps=None, lr=0.01, **more) -> Workload:
    def like() -> list[torch.Tensor]:
        return [torch.empty_like(p) for p in params]

    steps = steps or [torch.tensor(3.0) for _ in params]
    lists = (params, like(), like(), like(), like() if amsgrad else [], steps)
    words = {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": amsgrad, "maximize": amsgrad}
    return workload_from_call(op, lists, {"lr": torch.tensor(lr), **words, **more})


def sgd(params, buffers: bool, **more) -> Workload:
    lists = (params, [torch.empty_like(p) for p in params], [torch.empty_like(p) for p in params] if buffers else [])
    words = {"weight_decay": 0.1, "momentum": 0.9 if buffers else 0.0, "dampening": 0.2, "nesterov": False, "maximize": False}
    return workload_from_call(
        aten._fused_sgd_.tensor_lr, lists, {"lr": torch.tensor(0.1), "is_first_step": False, **words, **more}
    )


UPDATES = {
    "adamw": lambda: adam(aten._fused_adamw_.tensor_lr, parameters()),
    "adamw_amsgrad": lambda: adam(aten._fused_adamw_.tensor_lr, parameters(), amsgrad=True),
    "adamw_double": lambda: adam(aten._fused_adamw_.tensor_lr, parameters(torch.float64)),
    "adam": lambda: adam(aten._fused_adam_.tensor_lr, parameters()),
    "sgd": lambda: sgd(parameters(), buffers=True),
    "sgd_nesterov": lambda: sgd(parameters(), buffers=True, dampening=0.0, nesterov=True, maximize=True),
    "sgd_first": lambda: sgd(parameters(), buffers=True, is_first_step=True),
    "sgd_plain": lambda: sgd(parameters(), buffers=False, weight_decay=0.0),
}


def assert_right(workload: Workload) -> None:
    verdict = Checker(workload).check(DIALECT.build(workload, DEFAULT))
    assert verdict.status is Status.OK, verdict.message


@pytest.mark.parametrize("name", list(UPDATES))
def test_an_update_writes_what_pytorch_writes(name: str, threads: int) -> None:
    workload = UPDATES[name]()
    assert DIALECT.candidates(workload) == [DEFAULT]
    assert DIALECT.sample(workload, 4, 0) == ()
    assert_right(workload)


def test_a_first_step_is_as_exact_as_in_double_precision() -> None:
    """1 - 0.999 in float32 would be wrong in the fifth digit."""
    params = [torch.empty(256)]
    kernel = DIALECT.build(adam(aten._fused_adamw_.tensor_lr, params), DEFAULT)
    generator = torch.Generator().manual_seed(0)
    state = [torch.randn(256, generator=generator), torch.randn(256, generator=generator), torch.zeros(256), torch.zeros(256)]
    rest = [torch.tensor(1.0), torch.tensor(0.01)]
    wanted = [t.double().clone() for t in state]
    kernel(*state, *rest)
    words = {"beta1": 0.9, "beta2": 0.999, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": False, "maximize": False}
    lists = [[t] for t in wanted]
    torch._fused_adamw_(*lists, [], [torch.tensor(1.0)], lr=0.01, **words)
    torch.testing.assert_close(state[0].double(), wanted[0], rtol=1e-6, atol=1e-7)


def test_what_is_no_such_update() -> None:
    params = parameters()
    apart = [torch.empty(40, 33).t(), torch.empty(5)]
    mixed = (apart, [torch.empty(33, 40), torch.empty(5)], [])
    words = {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False}
    cases = [
        adam(aten._fused_adamw_.tensor_lr, params, grad_scale=torch.tensor(2.0)),
        adam(aten._fused_adamw_.tensor_lr, parameters(torch.float16)),
        workload_from_call(aten._fused_sgd_.default, mixed, {**words, "is_first_step": False}),
        adam(aten._fused_adamw_.tensor_lr, [torch.empty(2) for _ in range(65)]),
    ]
    assert [DIALECT.supports(workload) for workload in cases] == [False] * len(cases)
    with pytest.raises(BuildError, match="default schedule only"):
        DIALECT.build(UPDATES["sgd"](), {"schedule": "trace", "trace": [[], []]})


@pytest.mark.parametrize("padding", [-1, 3])
@pytest.mark.parametrize(
    ("columns", "dtype"), [(64, torch.float32), (13, torch.float32), (3, torch.float64), (520, torch.float32)]
)
def test_the_gradient_of_an_embedding(columns: int, dtype: torch.dtype, padding: int, threads: int) -> None:
    indices = torch.randint(0, 50, (4, 33))
    call = (torch.empty(4, 33, columns, dtype=dtype), indices, 50, padding, False)
    workload = workload_from_call(aten.embedding_dense_backward.default, call)
    assert DIALECT.supports(workload)
    assert_right(workload)


def test_a_gradient_scaled_by_frequency_is_left_to_pytorch() -> None:
    call = (torch.empty(8, 4), torch.randint(0, 5, (8,)), 5, -1, True)
    assert not DIALECT.supports(workload_from_call(aten.embedding_dense_backward.default, call))
