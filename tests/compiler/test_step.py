import copy
import logging

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import raftune.compiler.step as step_module
from raftune.compiler.eager import EagerStep
from raftune.compiler.executor import Program
from raftune.compiler.lowering import lower
from raftune.compiler.step import compile_step
from raftune.device import current_device
from raftune.dialects import candidates, default_candidate
from raftune.graph import capture, tasks_of
from raftune.log import TuningLog
from raftune.measure.race import RaceResult, judge


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(4 * 64, 5)

    def forward(self, x):
        return self.head(self.drop(F.gelu(self.norm(self.conv(x))).flatten(1)))


def make(seed=0):
    torch.manual_seed(seed)
    return Net(), (torch.randn(2, 3, 8, 8), torch.randint(5, (2,)))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


@pytest.fixture
def full_log(tmp_path, record_win):
    """A log in which some other candidate of the default's own dialect won every task that has one."""
    model, inputs = make()
    graph = capture(model, inputs, F.cross_entropy, adamw).reinplaced()
    path = tmp_path / "log.sqlite"
    with TuningLog(path) as log:
        for task in tasks_of(graph.graph_module):
            others = [c for c in candidates(task.workload) if c.dialect == "aten"][1:]
            record_win(log, task.workload, current_device(torch.get_num_threads()), others[0] if others else None)
    return path


@pytest.fixture
def quick_race(monkeypatch):
    """A race whose clock says what the test wants: raftune's time over eager's."""

    def with_ratio(ratio):
        raced = []

        def race(sides):
            raced.append(1)
            for run in sides.values():
                run()
            return judge({"eager": [2.0] * 9, "raftune": [2.0 * ratio] * 9})

        monkeypatch.setattr("raftune.compiler.contest.race", race)
        monkeypatch.setattr(step_module, "single_compilers", list)
        return raced

    return with_ratio


def eager_losses(steps):
    model, (x, target) = make()
    optimizer = adamw(model.parameters())
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, model


def test_compiled_steps_follow_eager_with_every_winner_in_place(full_log):
    expected, trained = eager_losses(10)
    model, inputs = make()
    step = compile_step(model, inputs, loss=F.cross_entropy, optimizer=adamw, log=full_log, race=False)
    assert step.program.kernels > 5
    assert step.selector.counts.misses == 0
    torch.manual_seed(1)
    found = [float(step(inputs).loss) for _ in range(10)]
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    for (name, value), other in zip(model.state_dict().items(), trained.state_dict().values(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize(("ratio", "uses"), [(0.7, "raftune"), (1.1, "eager")])
def test_the_faster_one_of_the_race_is_used(full_log, quick_race, ratio, uses):
    quick_race(ratio)
    model, inputs = make()
    step = compile_step(model, inputs, loss=F.cross_entropy, optimizer=adamw, log=full_log)
    assert step.uses == uses
    assert step.race.ratio == pytest.approx(ratio)


def test_the_race_changes_nothing_and_is_remembered(full_log, quick_race):
    raced = quick_race(0.7)
    model, inputs = make()
    before = copy.deepcopy(model.state_dict())
    optimizer = adamw(model.parameters())
    random = torch.get_rng_state()
    compile_step(model, inputs, loss=F.cross_entropy, optimizer=optimizer, log=full_log)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert not any("exp_avg" in state for state in optimizer.state.values())
    assert torch.equal(random, torch.get_rng_state())
    again = compile_step(model, inputs, loss=F.cross_entropy, optimizer=optimizer, log=full_log)
    assert len(raced) == 1
    assert again.race.ratio == pytest.approx(0.7)


def test_the_race_restores_what_forward_assigns_and_what_the_caller_holds(full_log, quick_race):
    class Moves(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.last = nn.Linear(4, 4), None
            self.register_buffer("a", torch.zeros(4))
            self.register_buffer("b", torch.ones(4))

        def forward(self, x):
            y = self.linear(x) + self.b
            self.a, self.b = self.b, self.a * 0.5 + 1
            self.last = y
            return y

    quick_race(0.7)
    torch.manual_seed(0)
    model, x = Moves(), torch.randn(2, 4)
    rate = torch.tensor(0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, foreach=False)
    EagerStep(model, lambda y: y.square().mean(), optimizer, "train")(x)
    model.last = None
    buffers, group, state = dict(model.named_buffers()), optimizer.param_groups[0], dict(optimizer.state)
    values = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    step = compile_step(model, x, loss=lambda y: y.square().mean(), optimizer=optimizer, log=full_log)
    assert step.uses == "raftune"
    assert model.last is None
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
    assert optimizer.param_groups[0] is group
    assert group["lr"] is rate
    assert all(optimizer.state[parameter] is entry for parameter, entry in state.items())
    torch.testing.assert_close([model.state_dict(), optimizer.state_dict()], values, rtol=0, atol=0)


def test_a_change_after_compilation_runs_in_eager_with_one_warning(caplog):
    model, inputs = make()
    step = compile_step(model, inputs, loss=F.cross_entropy, optimizer=adamw, race=False)
    step(inputs)
    model.drop.p = 0.9
    twin = copy.deepcopy(model)
    torch.manual_seed(3)
    loss = step(inputs).loss
    step(inputs)
    torch.manual_seed(3)
    torch.testing.assert_close(loss, F.cross_entropy(twin(inputs[0]), inputs[1]).detach())
    assert sum("Dropout.p is now 0.9" in r.getMessage() for r in caplog.records) == 1


def test_a_plan_with_another_loss_is_never_used(full_log, quick_race, monkeypatch, caplog):
    quick_race(0.1)
    model, inputs = make()
    right = Program.__call__
    monkeypatch.setattr(Program, "__call__", lambda self, args: [value * 1.01 for value in right(self, args)])
    step = compile_step(model, inputs, loss=F.cross_entropy, optimizer=adamw, log=full_log)
    assert step.uses == "eager"
    assert step.race is None
    assert "loss" in caplog.text


def test_other_batch_sizes_are_compiled_for_when_they_come_again_up_to_a_limit(full_log, caplog, monkeypatch):
    monkeypatch.setattr(step_module, "_MOST_VARIANTS", 2)
    model, inputs = make()
    step = compile_step(model, inputs, loss=F.cross_entropy, optimizer=adamw, log=full_log, race=False)
    twin = copy.deepcopy(model)
    eager = EagerStep(twin, F.cross_entropy, adamw(twin.parameters()), "train")
    compiled = []
    monkeypatch.setattr(step_module, "lower", lambda *args: compiled.append(1) or lower(*args))
    sizes = [3, 3, 2, 5, 4, 5, 3, 4, 4]
    with caplog.at_level(logging.WARNING):
        for size in sizes:
            batch = (torch.randn(size, 3, 8, 8), torch.randint(5, (size,)))
            losses = []
            for run in (step, eager):
                torch.manual_seed(size)
                losses.append(run(batch).loss)
            torch.testing.assert_close(losses[0], losses[1], rtol=1e-4, atol=1e-5)
    assert len(compiled) == 2
    assert sum("2 other kinds of batches were compiled for" in r.getMessage() for r in caplog.records) == 1


def test_a_batch_that_nothing_can_be_compiled_for_runs_in_eager(caplog):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, factor):
            y = self.linear(x) * float(factor)
            return y.sum() if x.shape[0] < 4 else y[y.sum(1) > 0].sum()

    model = Scaled()
    step = compile_step(model, {"x": torch.randn(2, 4), "factor": 2}, race=False)
    large = {"x": torch.randn(5, 4), "factor": 2}
    for _ in range(3):
        expected = model(**large)
        torch.testing.assert_close(step(large).loss, expected.detach())
    assert sum("cannot be compiled for" in r.getMessage() for r in caplog.records) == 1
    strange = {"x": torch.randn(2, 4), "factor": np.float32(3.0)}
    torch.testing.assert_close(step(strange).loss, model(**strange).detach())


def test_a_log_that_cannot_be_written_still_serves(full_log, quick_race, monkeypatch):
    quick_race(0.7)
    model, inputs = make()
    log = TuningLog(full_log, read_only=True)
    monkeypatch.setattr(step_module, "TuningLog", lambda path: TuningLog(path, read_only=True))
    step = compile_step(model, inputs, loss=F.cross_entropy, optimizer=adamw, log=log)
    assert step.uses == "raftune"


def test_inference_equals_the_model(tmp_path, record_win):
    model, (x, _) = make()
    model.eval()
    step = compile_step(model, x, mode="infer", race=False)
    with torch.no_grad():
        torch.testing.assert_close(step(x).outputs, model(x))
    assert step(x).loss is None


def test_without_an_optimizer_gradients_accumulate_as_in_eager():
    model, inputs = make()
    twin = copy.deepcopy(model)
    step = compile_step(model, inputs, loss=F.cross_entropy, race=False)
    for _ in range(2):
        torch.manual_seed(5)
        step(inputs)
        torch.manual_seed(5)
        F.cross_entropy(twin(inputs[0]), inputs[1]).backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


def test_the_update_that_nobody_tuned_is_the_optimizers_own_loop():
    model, inputs = make()
    graph = capture(model, inputs, F.cross_entropy, adamw).reinplaced()
    (update,) = [t.workload for t in tasks_of(graph.graph_module) if t.workload.mutates]
    assert default_candidate(update).config == {"formulation": "default"}


def test_a_race_is_judged_by_paired_rounds():
    # Round by round raftune is the faster one, though the machine slowed down in the middle.
    result = judge({"eager": [1.0, 1.0, 1.0, 9.0, 9.0, 9.0, 9.0], "raftune": [0.9, 0.9, 0.9, 8.1, 8.1, 8.1, 8.1]})
    assert result.ratio == pytest.approx(0.9)
    assert result.winner == "raftune"
    assert RaceResult.from_json(result.to_json()) == result
