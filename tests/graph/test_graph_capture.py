"""What a captured graph is, and what capture leaves alone."""

from __future__ import annotations

import copy
import dataclasses
import os
import subprocess
import sys

import pytest
import torch
from eager_reference import assert_follows_eager, assert_same_state
from torch import Tensor, nn
from torch.nn import functional

from raftune.graph import Kind, Slot, capture
from raftune.graph.workloads import CONSTANT_META


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def square(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


def operators(graph) -> set[str]:
    return {str(node.target) for node in graph.graph_module.graph.nodes if node.op == "call_function"}


class Convolutional(nn.Module):
    """Convolution, batch normalization, an in-place activation, dropout and layer normalization: what most models have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.dropout = nn.Dropout(0.3)
        self.layer_norm = nn.LayerNorm(4)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(functional.relu(self.norm(self.conv(x)), inplace=True))
        return self.out(self.layer_norm(x.mean((2, 3))))


def test_functional_graph_keeps_whole_operators_and_mutates_nothing():
    graph = capture(Convolutional(), torch.randn(2, 3, 8, 8), loss=square, optimizer=torch.optim.AdamW)
    for node in graph.graph_module.graph.nodes:
        assert node.op in ("placeholder", "call_function", "output")
        if isinstance(node.target, torch._ops.OpOverload):
            assert not node.target._schema.is_mutable, node.target
            assert isinstance(node.meta["val"], Tensor | list | tuple)
    assert operators(graph) >= {
        "aten.convolution.default",
        "aten.convolution_backward.default",
        "aten.native_batch_norm_backward.default",
        "aten.native_layer_norm_backward.default",
        "aten.native_dropout.default",
        "aten._fused_adamw.tensor_lr",
    }


def test_slots_say_what_inputs_and_outputs_are():
    model = nn.Linear(3, 2)
    graph = capture(model, torch.randn(4, 3), loss=square, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    assert graph.inputs == (
        Slot(Kind.PARAMETER, "weight"),
        Slot(Kind.PARAMETER, "bias"),
        Slot(Kind.STATE, "weight", "momentum_buffer"),
        Slot(Kind.STATE, "bias", "momentum_buffer"),
        Slot(Kind.LEARNING_RATE),
        Slot(Kind.INPUT),
    )
    assert graph.outputs == (
        Slot(Kind.LOSS),
        Slot(Kind.OUTPUT),
        Slot(Kind.PARAMETER, "weight"),
        Slot(Kind.PARAMETER, "bias"),
        Slot(Kind.STATE, "weight", "momentum_buffer"),
        Slot(Kind.STATE, "bias", "momentum_buffer"),
    )


def test_reinplaced_form_updates_its_inputs_to_what_the_functional_form_returns():
    graph = capture(Convolutional(), torch.randn(2, 3, 8, 8), loss=square, optimizer=torch.optim.AdamW)
    lowered = graph.reinplaced()
    assert operators(lowered) & {"aten._fused_adamw_.tensor_lr", "aten._foreach_add_.Scalar"}
    assert not operators(lowered) & {"aten._fused_adamw.tensor_lr", "aten._foreach_add.Scalar"}
    assert {slot.kind for slot in lowered.outputs} == {Kind.LOSS, Kind.OUTPUT}
    assert lowered.inputs == graph.inputs

    batch = torch.randn(2, 3, 8, 8)
    flat = [torch.rand_like(x) if x.is_floating_point() else x.clone() for x in graph.bind().gather(batch)]
    written = [x.clone() for x in flat]
    torch.manual_seed(1)
    want = dict(zip(graph.outputs, graph.graph_module(*flat), strict=True))
    torch.manual_seed(1)
    returned = dict(zip(lowered.outputs, lowered.graph_module(*written), strict=True))
    have = returned | {slot: written[lowered.inputs.index(slot)] for slot in graph.outputs if slot in lowered.inputs}
    assert have.keys() == want.keys()
    for slot, value in want.items():
        torch.testing.assert_close(have[slot], value, rtol=0, atol=0)


def test_output_that_is_a_parameter_keeps_its_old_value():
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"loss": (self.weight * x).sum(), "weight": self.weight.view(3)}

    model = Returns()
    lowered = capture(model, torch.ones(3), optimizer=sgd).reinplaced()
    result = lowered.bind().run(lowered.graph_module, torch.ones(3))
    torch.testing.assert_close(result.outputs["weight"], torch.ones(3))
    torch.testing.assert_close(model.weight.detach(), torch.full((3,), 0.9))


def test_buffers_that_take_each_others_value():
    class Swaps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("a", torch.zeros(2))
            self.register_buffer("b", torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            self.a, self.b = self.b, self.a
            return (self.weight * x).sum()

    assert_follows_eager(Swaps(), [torch.ones(2)] * 3, lambda model, x: model(x), sgd)


def test_capture_changes_nothing():
    class Caches(Convolutional):
        def forward(self, x: Tensor) -> Tensor:
            self.last = super().forward(x)
            return self.last

    model, x = Caches(), torch.randn(2, 3, 8, 8)
    model.conv.weight.grad = torch.ones_like(model.conv.weight)
    optimizer = torch.optim.AdamW(model.parameters())
    before, attributes, state = copy.deepcopy(model.state_dict()), set(vars(model)), torch.random.get_rng_state()
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    capture(model, x, loss=square, optimizer=optimizer)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert set(vars(model)) == attributes
    assert optimizer.state == {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        assert tensor is tensors[name]
        assert torch.equal(tensor, before[name])
    assert torch.equal(model.conv.weight.grad, torch.ones_like(model.conv.weight))
    assert model.out.weight.grad is None
    assert torch._C._get_mkldnn_enabled()
    assert not torch.compiler.is_compiling()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_capture_runs_no_update_over_memory_of_its_own(optimizer, monkeypatch):
    def fallback(_mode, func, *_):
        raise AssertionError(f"{func} was run to learn its results' layouts")

    monkeypatch.setattr("torch._subclasses.fake_tensor.run_fallback_kernel", fallback)
    capture(nn.Linear(3, 2), (torch.randn(4, 3), torch.randn(4, 2)), functional.mse_loss, lambda p: optimizer(p, lr=0.1))


def test_tied_weights_are_one_input_with_the_sum_of_gradients():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 4)
            self.out = nn.Linear(4, 10, bias=False)
            self.out.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return functional.cross_entropy(self.out(self.embedding(tokens)), tokens)

    batches = [torch.randint(10, (6,)) for _ in range(3)]
    graph = assert_follows_eager(Tied(), batches, lambda model, x: model(x), torch.optim.AdamW)
    assert [slot.name for slot in graph.inputs if slot.kind is Kind.PARAMETER] == ["embedding.weight"]


def test_module_used_twice():
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.Tanh(), layer)
    batches = [torch.randn(3, 4) for _ in range(3)]
    assert_follows_eager(model, batches, lambda model, x: square(model(x)), sgd, loss=square)
    assert model[0] is model[2]


def test_frozen_and_unused_parameters_stay():
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused, self.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.frozen(self.used(x))

    model = Partly()
    before = copy.deepcopy(model.state_dict())
    graph = assert_follows_eager(
        model, [torch.randn(3, 4) for _ in range(3)], lambda model, x: square(model(x)), torch.optim.AdamW, loss=square
    )
    for name in ("unused.weight", "frozen.weight", "frozen.bias"):
        assert torch.equal(model.state_dict()[name], before[name])
    assert {slot.name for slot in graph.outputs if slot.kind is Kind.PARAMETER} == {"used.weight", "used.bias"}
    assert not any("unused" in slot.name for slot in graph.inputs)


@pytest.mark.parametrize("shape", [(8, 16), (2, 3, 5, 7)])
def test_dropout_draws_what_eager_draws(shape):
    model = nn.Sequential(nn.Dropout(0.4), nn.Linear(shape[-1], 4), nn.Dropout(0.2))
    x = torch.randn(shape)
    graph = capture(model, x, loss=square)
    torch.manual_seed(5)
    want = model(x)
    after = torch.random.get_rng_state()
    torch.manual_seed(5)
    have = graph.bind().run(graph.graph_module, x).outputs
    torch.testing.assert_close(have, want.detach())
    assert torch.equal(torch.random.get_rng_state(), after)


def test_dropout_between_recurrent_layers_and_float_input():
    model = nn.LSTM(4, 4, num_layers=2, dropout=0.5)
    x = torch.randn(3, 2, 4)
    graph = capture(model, x, loss=lambda outputs: square(outputs[0]))
    torch.manual_seed(5)
    want = model(x)[0]
    square(want).backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(5)
    torch.testing.assert_close(graph.bind().run(graph.graph_module, x).outputs[0], want.detach())
    torch.testing.assert_close([p.grad for p in model.parameters()], expected)


@pytest.mark.parametrize(("bias", "bidirectional", "batch_first"), [(True, False, True), (False, True, False)])
def test_an_lstm_is_run_a_sequence_at_a_time_as_in_eager(bias, bidirectional, batch_first):
    model = nn.LSTM(4, 6, num_layers=2, bias=bias, bidirectional=bidirectional, batch_first=batch_first)
    graph = assert_follows_eager(
        model, [torch.randn(5, 3, 4)] * 2, lambda model, x: square(model(x)[0]), sgd, loss=lambda outputs: square(outputs[0])
    )
    assert "aten.mkldnn_rnn_layer_backward.default" in operators(graph)
    assert len(operators(graph)) < 120
    assert graph.digest == capture(model, torch.randn(5, 3, 4), lambda outputs: square(outputs[0]), sgd).digest


def test_a_projected_lstm_and_a_gru_run_step_by_step_as_in_eager():
    for model in (nn.LSTM(4, 6, proj_size=3), nn.GRU(4, 6)):
        graph = assert_follows_eager(
            model,
            [torch.randn(5, 3, 4)] * 2,
            lambda model, x: square(model(x)[0]),
            sgd,
            loss=lambda outputs: square(outputs[0]),
        )
        assert "aten.mkldnn_rnn_layer_backward.default" not in operators(graph)


def test_evaluation_flags_are_taken_as_they_are():
    model = Convolutional().eval()
    graph = assert_follows_eager(model, [torch.randn(2, 3, 8, 8)] * 2, lambda model, x: square(model(x)), sgd, loss=square)
    assert "aten.native_dropout.default" not in operators(graph)
    assert not any(slot.kind is Kind.BUFFER for slot in graph.outputs)


@dataclasses.dataclass
class Output:
    """As a model outside transformers might return; pytree does not know it."""

    loss: Tensor
    logits: tuple[Tensor, ...]
    name: str = "head"
    extra: None = None


def test_dataclass_output_is_restored():
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor, scale: float = 1.0) -> Output:
            y = self.layer(x) * scale
            return Output(y.square().mean(), (y, y + 1))

    model, batch = Returns(), {"x": torch.randn(3, 4), "scale": 2.0}
    graph = capture(model, batch, optimizer=sgd)
    want = model(**batch)
    result = graph.bind().run(graph.graph_module, batch)
    assert isinstance(result.outputs, Output)
    assert (result.outputs.name, result.outputs.extra) == ("head", None)
    torch.testing.assert_close((result.loss, *result.outputs.logits), (want.loss.detach(), *(t.detach() for t in want.logits)))


def test_targets_of_a_mapping_go_by_the_loss_parameters_names():
    def loss(outputs: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        return functional.cross_entropy(outputs, labels, label_smoothing=smoothing)

    batches = [{"input": torch.randn(3, 4), "labels": torch.randint(2, (3,))} for _ in range(3)]
    assert_follows_eager(
        nn.Linear(4, 2), batches, lambda model, batch: loss(model(batch["input"]), batch["labels"]), sgd, loss=loss
    )


def test_loss_module_with_a_weight_is_a_constant_input():
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0]))
    batches = [(torch.randn(3, 4), torch.randint(2, (3,))) for _ in range(3)]
    graph = assert_follows_eager(nn.Linear(4, 2), batches, lambda model, batch: loss(model(batch[0]), batch[1]), sgd, loss=loss)
    assert Slot(Kind.CONSTANT) in graph.inputs


def test_without_an_optimizer_gradients_accumulate_as_backward_does():
    model = nn.Linear(4, 2)
    x = torch.randn(3, 4)
    lowered = capture(model, x, loss=square).reinplaced()
    step = lowered.bind()
    for _ in range(2):
        step.run(lowered.graph_module, x)
    have = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for _ in range(2):
        square(model(x)).backward()
    torch.testing.assert_close(have, [p.grad for p in model.parameters()])


def test_inference_has_constant_parameters_and_no_loss():
    model = Convolutional().eval()
    x = torch.randn(2, 3, 8, 8)
    graph = capture(model, x, mode="infer")
    result = graph.bind().run(graph.graph_module, x)
    torch.testing.assert_close(result.outputs, model(x).detach())
    assert result.loss is None
    for node, slot in zip(graph.graph_module.graph.nodes, graph.inputs, strict=False):
        assert node.meta.get(CONSTANT_META, False) is (slot.kind is not Kind.INPUT)


def test_inference_in_training_mode_updates_its_buffers():
    model = Convolutional()
    eager = copy.deepcopy(model)
    x = torch.randn(2, 3, 8, 8)
    lowered = capture(model, x, mode="infer").reinplaced()
    torch.manual_seed(3)
    have = lowered.bind().run(lowered.graph_module, x).outputs
    torch.manual_seed(3)
    torch.testing.assert_close(have, eager(x).detach())
    assert_same_state(model, eager)
    changed = {slot for slot in lowered.inputs if "running" in slot.name or "num_batches" in slot.name}
    nodes = dict(zip(lowered.inputs, lowered.graph_module.graph.nodes, strict=False))
    assert changed
    assert not any(nodes[slot].meta.get(CONSTANT_META) for slot in changed)


_DIGEST = """
import torch
from raftune.graph import capture

def digest(seed, p):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(p), torch.nn.Linear(4, 2))
    return capture(model, torch.randn(3, 4), loss=lambda y: y.square().mean(), optimizer=torch.optim.AdamW).digest
"""


def test_digest_is_the_same_in_another_process_and_differs_for_another_constant():
    scope: dict = {}
    exec(_DIGEST, scope)
    here = scope["digest"](seed=0, p=0.25)
    assert len(here) == 32
    assert scope["digest"](seed=0, p=0.5) != here
    command = [sys.executable, "-c", _DIGEST + "print(digest(seed=7, p=0.25))"]
    environment = os.environ | {"PYTHONHASHSEED": "12345"}
    assert subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip() == here
