"""Which regions are lowered as one: the exact best cover, and only what the log says is worth it."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from raftune.compiler.cover import _best_disjoint, cover
from raftune.compiler.executor import BoundKernel
from raftune.compiler.lowering import assemble, lower
from raftune.compiler.selector import Selector
from raftune.compiler.step import compile_step
from raftune.device import current_device
from raftune.dialects.torch_ops import graph_module
from raftune.graph import capture, tasks_of
from raftune.graph.fusion import propose
from raftune.log import TuningLog
from raftune.workload import Candidate


@pytest.mark.parametrize("seed", range(6))
def test_the_cover_is_the_best_there_is(seed):
    draw = random.Random(seed)
    sets = [set(draw.sample(range(9), draw.randint(2, 4))) for _ in range(8)]
    savings = [draw.uniform(0.1, 5.0) for _ in sets]

    def total(chosen):
        return sum(savings[i] for i in chosen)

    def disjoint(chosen):
        return sum(len(sets[i]) for i in chosen) == len(set().union(*(sets[i] for i in chosen)))

    best = max(
        (c for size in range(len(sets) + 1) for c in itertools.combinations(range(len(sets)), size) if disjoint(c)), key=total
    )
    found = _best_disjoint(sets, savings)
    assert disjoint(found)
    assert total(found) == pytest.approx(total(best))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x, y):
        return self.head(self.norm(x + y))


@pytest.fixture
def net(tmp_path, record_win, monkeypatch):
    """A captured model, and a log in which the pair of an addition and a layer norm won with a given ratio."""
    torch.manual_seed(0)
    model, inputs = Net(), (torch.randn(64, 16), torch.randn(64, 16), torch.randint(4, (64,)))
    graph = capture(model, inputs, F.cross_entropy).reinplaced()
    pair = next(r for r in propose(graph.graph_module.graph) if "native_layer_norm.default" in r.workload.op)
    fused = Candidate("aten", torch.__version__, {"formulation": "default", "as": "one"})

    def with_ratio(ratio, singles=1.0):
        path = tmp_path / f"{ratio}-{singles}.sqlite"
        device = current_device(torch.get_num_threads())
        with TuningLog(path) as log:
            for task in tasks_of(graph.graph_module):
                winner = fused if singles < 1.0 else None
                record_win(log, task.workload, device, winner, ratio=singles)
            record_win(log, pair.workload, device, fused, ratio=ratio)
        return path

    monkeypatch.setattr(Selector, "usable", lambda self, workload, candidate: True)
    monkeypatch.setattr("raftune.dialects.registry.load", _composed)
    return model, inputs, graph, pair, with_ratio


def _composed(workload, candidate):
    from raftune.dialects.torch_ops import graph_module

    return graph_module(workload)


@pytest.mark.parametrize(("ratio", "singles", "taken"), [(0.8, 1.0, True), (0.8, 0.5, False), (0.4, 0.5, True)])
def test_a_region_is_taken_if_it_beats_its_members_winners(net, ratio, singles, taken):
    _, _, graph, pair, log = net
    regions = cover(propose(graph.graph_module.graph), Selector(log(ratio, singles)))
    assert [r.workload for r in regions] == ([pair.workload] if taken else [])


def test_an_unmeasured_member_or_region_is_not_guessed_at(net, tmp_path, record_win):
    _, _, graph, pair, _ = net
    path = tmp_path / "pair-only.sqlite"
    with TuningLog(path) as only:
        record_win(only, pair.workload, current_device(torch.get_num_threads()), Candidate("aten", "1", {}), ratio=0.1)
    assert cover(propose(graph.graph_module.graph), Selector(path)) == []
    assert cover(propose(graph.graph_module.graph), Selector(None)) == []


def test_a_step_lowered_with_a_region_is_right_and_repeats_its_plan(net, monkeypatch):
    model, inputs, graph, pair, log = net
    path = log(0.5)
    program = lower(graph.graph_module, Selector(path))
    assert [k.workload for k in program.bound if len(k.region.nodes) > 1] == [pair.workload]
    monkeypatch.setattr("raftune.compiler.step.single_compilers", list)
    monkeypatch.setattr("raftune.measure.race.interleave", lambda sides: {"eager": [2.0] * 9, "raftune": [1.0] * 9})
    for _ in range(2):
        step = compile_step(model, inputs, loss=F.cross_entropy, log=path)
        assert step.uses == "raftune"
        assert pair.workload in [k.workload for k in step.program.bound]
        expected = F.cross_entropy(model(inputs[0], inputs[1]), inputs[2])
        torch.testing.assert_close(step(inputs).loss, expected.detach())


def test_equal_workloads_are_built_once():
    x = torch.randn(8, 16)
    module = torch.fx.experimental.proxy_tensor.make_fx(lambda x: (x + 1.0).exp() * (x - 1.0).exp(), tracing_mode="fake")(x)
    built = []

    def build(region):
        built.append(region.workload)
        return BoundKernel(region, graph_module(region.workload))

    program = assemble(module, [], build)
    assert len(built) == len(set(built)) == 4
    assert program.kernels == 5
    for _ in range(2):
        torch.testing.assert_close(program([x]), (x + 1).exp() * (x - 1).exp())
