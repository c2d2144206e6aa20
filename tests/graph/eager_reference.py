"""Eager training in the plainest form, and the comparison of a captured step with it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raftune.graph import TrainingGraph, capture

Run = Callable[[nn.Module, Any], Tensor]


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, run: Run, batch: Any) -> Tensor:
    optimizer.zero_grad()
    loss = run(model, batch)
    loss.backward()
    optimizer.step()
    return loss.detach()


def assert_same_state(have: nn.Module, want: nn.Module, **tolerance: float) -> None:
    have_state, want_state = have.state_dict(), want.state_dict()
    assert have_state.keys() == want_state.keys()
    for name in want_state:
        torch.testing.assert_close(have_state[name], want_state[name], **tolerance, msg=lambda text, n=name: f"{n}: {text}")


def assert_same_optimizer(have: torch.optim.Optimizer, want: torch.optim.Optimizer, **tolerance: float) -> None:
    have_state, want_state = have.state_dict(), want.state_dict()
    assert have_state["param_groups"] == want_state["param_groups"]
    assert have_state["state"].keys() == want_state["state"].keys()
    for index, values in want_state["state"].items():
        assert have_state["state"][index].keys() == values.keys()
        for key, value in values.items():
            torch.testing.assert_close(have_state["state"][index][key], value, **tolerance)


def assert_follows_eager(
    model: nn.Module,
    batches: Sequence[Any],
    run: Run,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    loss: Callable[..., Tensor] | None = None,
    **tolerance: float,
) -> TrainingGraph:
    """One captured step per batch on a copy of ``model`` equals an eager one: losses, then parameters, buffers and state."""
    tolerance = tolerance or {"rtol": 1e-4, "atol": 1e-5}
    mine = copy.deepcopy(model)
    want_optimizer, have_optimizer = make_optimizer(model.parameters()), make_optimizer(mine.parameters())
    graph = capture(mine, batches[0], loss=loss, optimizer=have_optimizer)
    lowered = graph.reinplaced()
    step = lowered.bind()
    for seed, batch in enumerate(batches):
        torch.manual_seed(seed)
        want = eager_step(model, want_optimizer, run, batch)
        torch.manual_seed(seed)
        have = step.run(lowered.graph_module, batch)
        torch.testing.assert_close(have.loss, want, **tolerance)
    assert_same_state(mine, model, **tolerance)
    assert_same_optimizer(have_optimizer, want_optimizer, **tolerance)
    return graph
