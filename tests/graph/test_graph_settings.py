"""State that a graph cannot carry, and what the user may change after the capture."""

from __future__ import annotations

import time

import pytest
import torch
from eager_reference import assert_follows_eager
from torch import Tensor, nn

from raftune.graph import CaptureError, StepMismatch, capture
from raftune.graph.settings import ModuleSettings


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def square(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


class Keeps(nn.Module):
    """A model with state that is no buffer; ``forward`` of its subclasses changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.count, self.total, self.seen = 1, torch.ones(()), [1.0]
        self.cache: Tensor | None = None


class Counts(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.linear(x) * self.count


class AddsInPlace(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.total += 1
        return self.linear(x) * self.total


class CopiesInPlace(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.total.copy_(x.mean())
        return self.linear(x)


class Replaces(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + 1
        return self.linear(x) * self.total


class Appends(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(float(len(self.seen)))
        return self.linear(x) * self.seen[-1]


class Lazily(Keeps):
    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "steps"):
            self.steps = 0
        self.steps += 1
        return self.linear(x) * self.steps


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Counts, r"forward changes attribute Counts\.count, .* register it as a buffer"),
        (AddsInPlace, r"forward changes attribute AddsInPlace\.total"),
        (CopiesInPlace, "changes in place a tensor that is neither parameter nor buffer"),
        (Replaces, r"forward changes attribute Replaces\.total"),
        (Appends, r"forward changes attribute Appends\.seen"),
        (Lazily, r"forward changes attribute Lazily\.steps"),
    ],
)
def test_state_in_plain_attributes_is_refused_and_left_as_it_was(kind, message):
    model = kind()
    total, seen = model.total, model.seen
    with pytest.raises(CaptureError, match=message):
        capture(model, torch.ones(2, 4), loss=square, optimizer=sgd)
    assert (model.count, float(total), seen) == (1, 1.0, [1.0])
    assert model.total is total
    assert model.seen is seen
    assert not hasattr(model, "steps")


def test_a_cache_is_a_constant_once_it_is_filled():
    class Fills(Keeps):
        def forward(self, x: Tensor) -> Tensor:
            if self.cache is None:
                self.cache = torch.full((4,), 2.0)
            return self.linear(x) * self.cache

    model = Fills()
    with pytest.raises(CaptureError, match="run the model once"):
        capture(model, torch.ones(2, 4), loss=square, optimizer=sgd)
    model(torch.ones(2, 4))
    assert_follows_eager(model, [torch.randn(2, 4) for _ in range(3)], lambda m, x: square(m(x)), sgd, loss=square)


def test_an_attribute_that_is_a_result_is_neither_state_nor_setting(caplog):
    class Records(Keeps):
        def forward(self, x: Tensor) -> Tensor:
            self.total = self.linear(x)
            return self.total

    model = Records()
    lowered = capture(model, torch.ones(2, 4), loss=square, optimizer=sgd).reinplaced()
    assert "sets Records.total" in caplog.text
    step = lowered.bind()
    step.run(lowered.graph_module, torch.ones(2, 4))
    model(torch.ones(2, 4))
    step.run(lowered.graph_module, torch.ones(2, 4))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4, bias=False))


def quarter(module: nn.Module, *_: object) -> None:
    """A hook of any kind."""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m, o: setattr(m[1], "momentum", 0.5), r"BatchNorm1d.momentum is now 0.5, captured as 0.1"),
        (lambda m, o: setattr(m[2], "p", 0.0), r"Dropout.p is now 0.0"),
        (lambda m, o: delattr(m[2], "p"), r"Dropout.p is now None"),
        (lambda m, o: setattr(m[2], "p", torch.ones(2)), r"Dropout.p is now tensor"),
        (lambda m, o: m.factors.append(3.0), r"Sequential.factors is now \[2.0, 3.0\]"),
        (lambda m, o: setattr(m, "scale", torch.tensor(3.0)), "Sequential.scale was replaced"),
        (lambda m, o: m.__setitem__(2, nn.Sigmoid()), "a submodule of Sequential was replaced"),
        (lambda m, o: setattr(m[3], "bias", nn.Parameter(torch.ones(4))), "Linear.bias is now a tensor, captured as None"),
        (lambda m, o: m[0].register_forward_hook(quarter), "forward hooks of Linear"),
        (lambda m, o: m[0].register_forward_pre_hook(quarter), "forward pre hooks of Linear"),
        (lambda m, o: m[0].register_full_backward_hook(quarter), "backward hooks of Linear"),
        (lambda m, o: m[0].register_full_backward_pre_hook(quarter), "backward pre hooks of Linear"),
        (lambda m, o: m[0].weight.register_hook(quarter), "'0.weight' has gradient hooks now"),
        (lambda m, o: m[0].weight.register_post_accumulate_grad_hook(quarter), "'0.weight' has gradient hooks now"),
        (lambda m, o: m[3].weight.requires_grad_(), "'3.weight' has requires_grad=True now, captured as False"),
        (lambda m, o: o.param_groups[0]["params"].pop(), "parameter group 0 has other parameters now"),
        (lambda m, o: o.register_step_pre_hook(quarter), "step hooks now"),
        (lambda m, o: o.register_step_post_hook(quarter), "step hooks now"),
    ],
)
def test_what_changed_after_the_capture_is_noticed(change, message):
    model, batch = network(), torch.randn(6, 4)
    model.factors, model.scale = [2.0], torch.tensor(2.0)
    model[3].weight.requires_grad_(False)
    optimizer = sgd(model.parameters())
    lowered = capture(model, batch, loss=square, optimizer=optimizer).reinplaced()
    step = lowered.bind()
    step.run(lowered.graph_module, batch)
    change(model, optimizer)
    with pytest.raises(StepMismatch, match=message):
        step.run(lowered.graph_module, batch)


def test_settings_of_the_loss_are_noticed_too():
    loss = nn.CrossEntropyLoss()
    batch = (torch.randn(3, 4), torch.tensor([0, 1, 2]))
    step = capture(network(), batch, loss=loss, optimizer=sgd).bind()
    loss.label_smoothing = 0.1
    with pytest.raises(StepMismatch, match="label_smoothing"):
        step.gather(batch)


def test_equal_settings_in_another_type_are_no_change():
    model, batch = network(), torch.randn(6, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    step = capture(model, batch, loss=square, optimizer=optimizer).bind()
    optimizer.param_groups[0]["betas"] = [0.9, 0.999]
    step.gather(batch)


def test_unfreezing_without_an_optimizer_is_noticed():
    model, batch = network(), torch.randn(6, 4)
    model[0].weight.requires_grad_(False)
    step = capture(model, batch, loss=square).bind()
    model[0].weight.requires_grad_()
    with pytest.raises(StepMismatch, match="requires_grad=True now"):
        step.gather(batch)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks_are_refused(register):
    model = network()
    handle = getattr(model[0].weight, register)(quarter)
    with pytest.raises(CaptureError, match="has gradient hooks"):
        capture(model, torch.randn(6, 4), loss=square, optimizer=sgd)
    capture(model, torch.randn(6, 4), loss=square, mode="infer")
    handle.remove()
    capture(model, torch.randn(6, 4), loss=square, optimizer=sgd)


def test_looking_for_changes_is_cheap():
    model = nn.Sequential(*[nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(50)])
    settings = ModuleSettings((model,), frozenset())
    times = []
    for _ in range(20):
        start = time.perf_counter()
        assert settings.changed() is None
        times.append(time.perf_counter() - start)
    assert min(times) / len(list(model.modules())) < 5e-6


def test_buffers_that_are_only_written():
    class Last(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.register_buffer("last", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.last.copy_(x.mean())
            return super().forward(x)

    batches = [torch.randn(2, 4) for _ in range(3)]
    assert_follows_eager(Last(), batches, lambda m, x: square(m(x)), sgd, loss=square)
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    assert_follows_eager(spectral, batches, lambda m, x: square(m(x)), sgd, loss=square)


@pytest.mark.parametrize(
    "batch", [torch.ones(1, 4).expand(6, 4), torch.arange(9.0).as_strided((6, 4), (1, 1))], ids=["expanded", "windows"]
)
def test_dense_batches_after_one_whose_elements_share_memory(batch):
    batches = [batch, torch.randn(6, 4), batch]
    assert_follows_eager(network(), batches, lambda m, x: square(m(x)), sgd, loss=square)


def test_a_constant_result_is_the_callers_own():
    class Labels(nn.Linear):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            labels = torch.tensor([[1.0, 2.0]])
            return {"loss": super().forward(x).sum(), "labels": labels, "view": labels.t()}

    lowered = capture(Labels(4, 4), torch.ones(2, 4), optimizer=sgd).reinplaced()
    step = lowered.bind()
    for _ in range(2):
        outputs = step.run(lowered.graph_module, torch.ones(2, 4)).outputs
        assert outputs["labels"].tolist() == [[1.0, 2.0]]
        assert outputs["view"].tolist() == [[1.0], [2.0]]
        outputs["labels"].add_(5)
        outputs["view"].add_(5)


def test_gradients_do_not_share_memory():
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return ((self.a + self.b) * x).sum()

    model = Sums()
    x = torch.full((3,), 2.0)
    lowered = capture(model, x).reinplaced()
    lowered.bind().run(lowered.graph_module, x)
    model.a.grad.mul_(10)
    assert model.b.grad.tolist() == [2.0] * 3
    assert x.tolist() == [2.0] * 3


@pytest.mark.parametrize("make", [torch.optim.AdamW, sgd])
def test_double_precision_models_have_a_double_precision_rate(make):
    model = nn.Linear(4, 4).double()
    batches = [torch.randn(3, 4, dtype=torch.float64) for _ in range(3)]
    assert_follows_eager(model, batches, lambda m, x: square(m(x)), make, loss=square, rtol=1e-13, atol=1e-13)
