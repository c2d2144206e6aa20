"""Optimizers in the graph, and the bound step beside the user's own optimizer and schedule."""

from __future__ import annotations

import copy

import pytest
import torch
from eager_reference import assert_follows_eager, assert_same_optimizer, assert_same_state, eager_step
from torch import Tensor, nn
from torch.nn import functional

from raftune.graph import StepMismatch, UnsupportedOptimizer, capture
from raftune.models import BUILT_IN

EXACT = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(5, 6), torch.randint(3, (5,))) for _ in range(count)]


def run(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("SGD", {}),
        ("SGD", {"weight_decay": 0.1}),
        ("SGD", {"momentum": 0.9}),
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
        ("SGD", {"momentum": 0.9, "maximize": True}),
        ("SGD", {"momentum": 0.9, "foreach": True}),
        ("AdamW", {}),
        ("AdamW", {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.2}),
        ("AdamW", {"amsgrad": True, "maximize": True}),
        ("AdamW", {"fused": True}),
        ("Adam", {}),
        ("Adam", {"weight_decay": 0.1, "amsgrad": True}),
    ],
)
def test_optimizer_settings(kind, settings):
    optimizer = getattr(torch.optim, kind)
    assert_follows_eager(
        network(), batches(5), run, lambda p: optimizer(p, lr=0.05, **settings), loss=functional.cross_entropy, **EXACT
    )


def test_parameter_groups_keep_their_settings():
    def optimizer(parameters):
        first, second, *rest = parameters
        groups = [
            {"params": [first], "weight_decay": 0.5},
            {"params": [second], "lr": 0.2},
            {"params": rest, "betas": (0.5, 0.6)},
        ]
        return torch.optim.AdamW(groups, lr=0.01)

    graph = assert_follows_eager(network(), batches(4), run, optimizer, loss=functional.cross_entropy, **EXACT)
    assert sum("_fused_adamw" in str(node.target) for node in graph.graph_module.graph.nodes) == 3


def test_gradient_in_another_layout_than_its_parameter():
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.weight.t() @ x.t()).t()

    assert_follows_eager(Transposed(), batches(3), run, torch.optim.AdamW, loss=functional.cross_entropy, **EXACT)


def test_channels_last_model():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 3, 6), nn.Flatten()).to(memory_format=torch.channels_last)
    images = [(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last), torch.tensor([0, 2])) for _ in range(3)]
    assert_follows_eager(model, images, run, torch.optim.AdamW, loss=functional.cross_entropy, rtol=1e-4, atol=1e-5)


def test_schedule_changes_the_rate_without_a_new_graph():
    model = network()
    mine = copy.deepcopy(model)
    pairs = []
    for m in (model, mine):
        optimizer = torch.optim.SGD(m.parameters(), lr=1.0, momentum=0.9)
        pairs.append((optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)))
    (want, want_schedule), (have, have_schedule) = pairs
    data = batches(4)
    lowered = capture(mine, data[0], loss=functional.cross_entropy, optimizer=have).reinplaced()
    step = lowered.bind()
    for batch in data:
        eager_step(model, want, run, batch)
        want_schedule.step()
        step.run(lowered.graph_module, batch)
        have_schedule.step()
    assert have.param_groups[0]["lr"] == 1.0 / 16
    assert_same_state(mine, model, **EXACT)


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
def test_compiled_and_eager_steps_alternate_and_state_is_loaded(make):
    model = network()
    mine = copy.deepcopy(model)
    want, have = make(model.parameters()), make(mine.parameters())
    data = batches(8)
    lowered = capture(mine, data[0], loss=functional.cross_entropy, optimizer=have).reinplaced()
    step = lowered.bind()
    for index, batch in enumerate(data):
        eager_step(model, want, run, batch)
        if index == 4:
            have.load_state_dict(copy.deepcopy(have.state_dict()))
            mine.load_state_dict(copy.deepcopy(mine.state_dict()))
        if index % 3 == 1:
            eager_step(mine, have, run, batch)
        else:
            step.run(lowered.graph_module, batch)
    assert_same_state(mine, model, **EXACT)
    assert_same_optimizer(have, want, **EXACT)


def test_functional_form_runs_as_a_step_too():
    model = network()
    mine = copy.deepcopy(model)
    want, have = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(mine.parameters())
    data = batches(3)
    graph = capture(mine, data[0], loss=functional.cross_entropy, optimizer=have)
    step = graph.bind()
    for batch in data:
        eager_step(model, want, run, batch)
        step.run(graph.graph_module, batch)
    assert_same_state(mine, model, **EXACT)
    assert_same_optimizer(have, want, **EXACT)


def test_batch_in_another_memory_layout_is_accepted():
    model = network()
    x, y = batches(1)[0]
    graph = capture(model, (x, y), loss=functional.cross_entropy)
    result = graph.bind().run(graph.graph_module, (x.t().contiguous().t(), y))
    torch.testing.assert_close(result.loss, run(model, (x, y)).detach())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, o, b: (b[0][:3], b[1][:3]), r"input 0 is torch.float32 \(3, 6\) on cpu, captured as torch.float32 \(5, 6\)"),
        (lambda m, o, b: (b[0].double(), b[1]), "input 0 is torch.float64"),
        (lambda m, o, b: {"x": b[0], "y": b[1]}, "the batch has the structure"),
        (lambda m, o, b: (b[0], 3), "input 1 is 3, captured as a tensor"),
        (lambda m, o, b: m.eval() and b, "Sequential.training is now False"),
        (lambda m, o, b: m[0].requires_grad_(False) and b, "'0.weight' has requires_grad=False now"),
        (lambda m, o, b: setattr(m[0], "bias", nn.Parameter(torch.ones(8))) or b, "'0.bias' was replaced"),
        (lambda m, o, b: m.double() and b, "parameter 0.weight  is now .torch.float64"),
        (lambda m, o, b: o.param_groups[0].update(weight_decay=0.7) or b, "weight_decay of parameter group 0 is now 0.7"),
        (lambda m, o, b: o.add_param_group({"params": [nn.Parameter(torch.ones(1))]}) or b, "2 parameter groups now"),
    ],
)
def test_what_is_not_as_captured_is_refused_before_anything_changes(change, message):
    model, batch = network(), batches(1)[0]
    optimizer = torch.optim.AdamW(model.parameters())
    lowered = capture(model, batch, loss=functional.cross_entropy, optimizer=optimizer).reinplaced()
    step = lowered.bind()
    step.run(lowered.graph_module, batch)
    batch = change(model, optimizer, batch)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(StepMismatch, match=message):
        step.run(lowered.graph_module, batch)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_constant_of_the_batch_may_not_change():
    class Scaled(nn.Linear):
        def forward(self, x: Tensor, scale: float) -> Tensor:
            return super().forward(x).square().mean() * scale

    graph = capture(Scaled(3, 2), (torch.ones(1, 3), 2.0))
    with pytest.raises(StepMismatch, match=r"input 1 is 3\.0, captured as the constant 2\.0"):
        graph.bind().gather((torch.ones(1, 3), 3.0))


class Custom(torch.optim.SGD):
    """An optimizer whose step could be anything."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torch.optim.RMSprop, "not torch.optim.rmsprop.RMSprop"),
        (lambda p: Custom(p, lr=0.1), "not test_graph_step.Custom"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5), "dampening=0.5"),
        (lambda p: torch.optim.AdamW(p, differentiable=True), "differentiable=True"),
        (lambda p: torch.optim.AdamW(p, capturable=True), "capturable=True"),
        (lambda p: torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1), r"shape \(2,\) that the model has not"),
        (lambda p: "sgd", "returned str"),
        ("sgd", "not 'sgd'"),
    ],
)
def test_unsupported_optimizers_are_named(make, message):
    with pytest.raises(UnsupportedOptimizer, match=message):
        capture(network(), batches(1)[0], loss=functional.cross_entropy, optimizer=make)


def test_optimizer_with_step_hooks_is_refused():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(UnsupportedOptimizer, match="step hooks"):
        capture(model, batches(1)[0], loss=functional.cross_entropy, optimizer=optimizer)


@pytest.mark.parametrize("name", ["gpt", "mlp"])
def test_built_in_target_is_seeded_and_captured(name):
    first, second = BUILT_IN[name](), BUILT_IN[name]()
    assert_same_state(first.model, second.model, rtol=0, atol=0)
    graph = capture(first.model, first.inputs, first.loss, first.optimizer)
    assert graph.digest == capture(second.model, second.inputs, second.loss, second.optimizer).digest
    again = capture(first.model, first.inputs, first.loss, mode="infer")
    assert again.digest != graph.digest
