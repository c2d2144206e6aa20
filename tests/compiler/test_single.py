"""A step by one compiler alone: which operators it gets, what it computes, and when the race prefers it."""

from __future__ import annotations

import copy
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import raftune.compiler.step as step_module
from raftune.compiler.eager import EagerStep
from raftune.compiler.selector import Selector
from raftune.compiler.single import compiled_alone, single_compilers
from raftune.compiler.step import compile_step
from raftune.dialects import registry
from raftune.dialects.base import BuildError
from raftune.dialects.torch_ops import graph_module
from raftune.graph import capture
from raftune.graph.fusion import whole_regions
from raftune.log import TuningLog
from raftune.measure.race import RaceResult, Single, judge


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.first, self.drop, self.last = nn.Linear(8, 24), nn.Dropout(0.25), nn.Linear(8, 5)

    def forward(self, tokens):
        x = self.norm(self.embed(tokens))
        a, b, c = self.first(x).chunk(3, -1)
        return self.last(self.drop(F.silu(a) * b + c))


def make():
    torch.manual_seed(0)
    return Net(), (torch.randint(11, (6,)), torch.randint(5, (6,)))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


class Whole:
    """A dialect that takes whole graphs, and runs them as they are."""

    name: ClassVar[str] = "whole"
    takes_graphs = True
    fails = False

    def supports(self, workload):
        return len(workload.operators) > 1

    def candidates(self, workload):
        return [{}]

    def build(self, workload, config):
        if self.fails:
            raise BuildError("no compiler here")
        module = graph_module(workload)
        self.built = [*getattr(self, "built", []), workload]
        return module if len(workload.outputs) == 1 else (lambda *inputs: tuple(module(*inputs)))


@pytest.fixture
def whole(monkeypatch):
    dialect = Whole()
    monkeypatch.setattr(step_module, "single_compilers", lambda: [dialect])
    return dialect


def graph_of(model, inputs):
    return capture(model, inputs, F.cross_entropy, adamw).reinplaced()


def test_whole_regions_are_split_by_what_is_random_and_nothing_else():
    model, inputs = make()
    before, after = whole_regions(graph_of(model, inputs).graph_module.graph)
    assert {"aten.native_layer_norm.default", "aten.silu.default", "aten.mul.Tensor"} <= {
        o.op for o in before.workload.operators
    }
    assert {"aten.addmm.default", "aten._log_softmax.default", "aten.embedding_dense_backward.default"} <= {
        o.op for o in after.workload.operators
    }
    model.drop.p = 0.0
    assert len(whole_regions(graph_of(model, inputs).graph_module.graph)) == 1


def test_a_step_by_one_compiler_follows_eager(whole):
    model, inputs = make()
    twin = copy.deepcopy(model)
    graph = graph_of(model, inputs)
    program = compiled_alone(graph.graph_module, whole, Selector(None))
    assert {kernel.dialect for kernel in program.bound} == {"whole", "aten"}
    step, eager = graph.bind(), EagerStep(twin, F.cross_entropy, adamw(twin.parameters()), "train")
    for seed in range(5):
        torch.manual_seed(seed)
        found = step.run(lambda *tensors: program(list(tensors)), inputs).loss
        torch.manual_seed(seed)
        torch.testing.assert_close(found, eager(inputs).loss, rtol=1e-5, atol=1e-6)


def test_a_compiler_that_fails_takes_no_part(whole):
    whole.fails = True
    model, inputs = make()
    assert compiled_alone(graph_of(model, inputs).graph_module, whole, Selector(None)) is None


@pytest.mark.parametrize(
    ("plan_ms", "single_ms", "winner"), [(1.0, 0.8, "whole"), (0.8, 1.0, "raftune"), (3.0, 2.5, "eager"), (3.0, 1.5, "whole")]
)
def test_the_race_prefers_it_only_if_it_beats_plan_and_eager(whole, monkeypatch, tmp_path, plan_ms, single_ms, winner):
    races = []

    def race(sides):
        races.append(list(sides))
        times = {"eager": 2.0, "raftune": plan_ms, "whole": single_ms}
        return judge({name: [times[name]] * 9 for name in sides})

    monkeypatch.setattr("raftune.compiler.contest.race", race)
    model, inputs = make()
    log = tmp_path / "log.sqlite"
    TuningLog(log).close()
    for run in range(2):  # raced, then from the log
        step = compile_step(model, inputs, loss=F.cross_entropy, optimizer=adamw, log=log)
        if run == 0:
            step.race_singles(inputs)
        assert step.uses == winner
        if winner != "eager":
            assert ("whole" in step.program.dialects.values()) == (winner == "whole")
    assert races == [["eager", "raftune"], ["eager", "raftune", "whole"]]


def test_a_winner_that_is_gone_leaves_its_place_to_the_better_of_the_others(whole, monkeypatch, tmp_path):
    times = {"eager": [2.0] * 9, "raftune": [1.0] * 9, "whole": [0.5] * 9}
    monkeypatch.setattr("raftune.compiler.contest.race", lambda sides: judge({name: times[name] for name in sides}))
    model, inputs = make()
    log = tmp_path / "log.sqlite"
    TuningLog(log).close()
    compile_step(model, inputs, loss=F.cross_entropy, optimizer=adamw, log=log).race_singles(inputs)
    whole.fails = True
    step = compile_step(model, inputs, loss=F.cross_entropy, optimizer=adamw, log=log)
    assert step.uses == "raftune"
    assert "whole" not in step.program.dialects.values()


def test_a_single_compiler_is_judged_round_by_round():
    single = Single(2.0, 0.8, 0.9, 1.0, 1.1)
    assert RaceResult(2.5, 2.0, 0.8, 0.9, 9, {"x": single}).winner == "raftune"
    assert RaceResult(2.5, 2.0, 0.8, 1.01, 9, {"x": single}).winner == "x"
    result = RaceResult(2.5, 2.0, 0.8, 0.9, 9, {"x": Single(1.5, 0.6, 0.7, 0.75, 0.8)})
    assert (result.winner, result.pair_winner, result.best_ms) == ("x", "raftune", 1.5)
    assert RaceResult.from_json(result.to_json()) == result


@pytest.mark.skipif("inductor" not in {d.name for d in registry.enabled()}, reason="no C++ compiler for this dialect")
def test_the_real_compiler_of_whole_graphs_follows_eager():
    (dialect,) = single_compilers()
    model, inputs = make()
    twin = copy.deepcopy(model)
    graph = graph_of(model, inputs)
    program = compiled_alone(graph.graph_module, dialect, Selector(None))
    assert sum(kernel.dialect == dialect.name for kernel in program.bound) == 2
    step, eager = graph.bind(), EagerStep(twin, F.cross_entropy, adamw(twin.parameters()), "train")
    for seed in range(3):
        torch.manual_seed(seed)
        found = step.run(lambda *tensors: program(list(tensors)), inputs).loss
        torch.manual_seed(seed)
        torch.testing.assert_close(found, eager(inputs).loss, rtol=1e-4, atol=1e-5)
