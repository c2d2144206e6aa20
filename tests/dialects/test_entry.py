"""The cheap way into an operator does what the operator does, or is not taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raftune.dialects.entry import entry

ops = torch.ops.aten
X = torch.arange(12.0).view(3, 4)


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        (ops.add.Tensor, (X, X), {"alpha": 2}),
        (ops.add.Tensor, (X, 2.0), {}),
        (ops.mm.default, (X, X.t()), {}),
        (ops.view.default, (X, [4, 3]), {}),
        (ops.slice.Tensor, (X, 1, 0, 2), {}),
        (ops.sum.dim_IntList, (X, [0], True), {}),
        (ops.sum.default, (X,), {}),
        (ops.native_layer_norm.default, (X, [4], None, None, 1e-5), {}),
        (ops.gelu.default, (X,), {"approximate": "tanh"}),
        (ops.threshold_backward.default, (X, X, 0), {}),
        (ops.full.default, ([2, 2], 3.0), {"dtype": torch.float64, "device": torch.device("cpu")}),
        (ops._to_copy.default, (X,), {"dtype": torch.float64}),
        (ops.select.int, (X, 0, 1), {}),
        (ops.cat.default, ([X, X], 1), {}),
    ],
)
def test_results_are_those_of_the_operator(op: Any, args: Any, kwargs: Any) -> None:
    expected, found = op(*args, **kwargs), entry(op, args, kwargs)(*args, **kwargs)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_binding_is_found_for_common_operators() -> None:
    assert entry(ops.mm.default, (X, X.t()), {}) is torch.mm
    assert entry(ops.add.Tensor, (X, X), {}) is torch.add
    assert entry(ops.gelu.default, (X,), {}) is torch._C._nn.gelu


def test_a_binding_that_runs_other_operators_is_not_taken() -> None:
    assert entry(ops.softmax.int, (X, 1), {}) is ops.softmax.int._op  # the binding leads to aten._softmax
    assert entry(ops.relu_.default, (X,), {})(X.clone().neg_()).sum() == 0


def test_random_operators_and_their_state_are_left_alone() -> None:
    state = torch.get_rng_state()
    assert entry(ops.rand.default, ([3],), {}) is ops.rand.default._op
    assert entry(ops.bernoulli.p, (X, 0.5), {}) is ops.bernoulli.p._op
    assert torch.equal(torch.get_rng_state(), state)


def test_an_update_in_place_is_not_made_on_the_example() -> None:
    x = torch.zeros(3)
    found = entry(ops.add_.Tensor, (x, 1.0), {})
    assert x.sum() == 0
    found(x, 1.0)
    assert x.sum() == 3
