"""What `raftune plan explain` says of a plan: every node, its regions, and each candidate by measurement or prediction."""

import json

import pytest
import torch
from click.testing import CliRunner

from raftune.cli import main
from raftune.compiler.cover import cover, saving_us
from raftune.compiler.explain import alternatives
from raftune.compiler.selector import Selector
from raftune.cost_model import Prediction
from raftune.device import current_device
from raftune.dialects import candidates, registry
from raftune.graph import capture, tasks_of
from raftune.graph.fusion import propose
from raftune.log import TuningLog
from raftune.measurement import Outcome, Policy, Status
from raftune.models import Target

MODULE = """
import torch
from torch import nn


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.SiLU(), nn.LayerNorm(64)), torch.randn(32, 48), lambda y: y.square().mean()
"""


@pytest.fixture
def target(tmp_path, monkeypatch):
    (tmp_path / "tiny.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    namespace = {}
    exec(MODULE, namespace)
    return Target(*namespace["make"]())


def graph_of(target):
    return capture(target.model, target.inputs, target.loss).reinplaced().graph_module.graph


def device():
    return current_device(torch.get_num_threads())


@pytest.fixture
def log(target, tmp_path, record_win):
    """Every operator measured: the default won, but for the product, which another formulation of it wins at half the time."""
    path = tmp_path / "log.sqlite"
    graph = graph_of(target)
    with TuningLog(path) as opened:
        for task in tasks_of(graph.owning_module):
            other = candidates(task.workload)[1] if task.workload.op == "aten.addmm.default" else None
            record_win(opened, task.workload, device(), other, ratio=0.5)
            if other is not None:
                failed = candidates(task.workload)[2]
                opened.record(task.workload, failed, device(), Policy(), Outcome(Status.CRASH, message="it fell over"))
    return path


def run(*arguments):
    return CliRunner().invoke(main, ["plan", "explain", "tiny.py:make", *arguments])


def test_every_operator_of_the_step_is_in_the_plan_once(target, log):
    result = run("--log", str(log), "--json")
    assert result.exit_code == 0, result.stderr
    names = [name for unit in json.loads(result.stdout)["plan"] for name in unit["nodes"]]
    tunable = [n.name for n in graph_of(target).nodes if n.name.startswith(("addmm", "silu", "native_layer_norm", "mm", "sum"))]
    assert set(tunable) <= set(names)
    assert len(names) == len(set(names))
    (product,) = (u for u in json.loads(result.stdout)["plan"] if u["nodes"] == ["addmm"])
    assert (product["provenance"], product["dialect"]) == ("measured", "aten")


def test_a_node_lists_what_was_measured_what_failed_and_what_is_predicted(target, log, monkeypatch):
    monkeypatch.setattr(Selector, "predictions", lambda self, w, all_: [Prediction(-0.1, 0.2)] * len(all_))
    (product,) = (t.workload for t in tasks_of(graph_of(target).owning_module) if t.workload.op == "aten.addmm.default")
    found = alternatives(product, Selector(log))
    best = found[0]
    assert (best.source, best.chosen, best.ratio) == ("measured", True, pytest.approx(0.5))
    (default,) = (a for a in found if a.is_default)
    assert (default.source, default.ratio) == ("measured", pytest.approx(1.0))
    assert found[-1].source == "failed"
    assert found[-1].note == "crash: it fell over"
    predicted = [a for a in found if a.source == "predicted"]
    assert {a.candidate for a in predicted} == set(candidates(product)) - {
        a.candidate for a in found if a.source != "predicted"
    }
    assert predicted[0].ratio == pytest.approx(0.905, abs=1e-3)
    assert predicted[0].low == pytest.approx(0.651, abs=1e-3)
    assert predicted[0].high == pytest.approx(1.257, abs=1e-3)


def test_text_marks_what_is_chosen(log):
    result = run("addmm", "silu", "--log", str(log))
    assert result.exit_code == 0, result.stderr
    assert "addmm: regions that it could be part of" in result.stdout
    assert "crash: it fell over" in result.stdout
    assert any(line.startswith("*") and "aten" in line for line in result.stdout.splitlines())


def test_a_node_that_is_not_there_is_a_users_mistake(log):
    result = run("admm", "--log", str(log))
    assert result.exit_code == 2
    assert "no operator called 'admm'; similar ones: addmm" in result.stderr


def test_without_a_log_everything_is_the_default():
    result = run("--json")
    assert result.exit_code != 0  # there is no such target here


def test_an_unmeasured_region_counts_by_the_upper_bound_of_its_prediction(target, log, monkeypatch):
    graph = graph_of(target)
    selector = Selector(log)
    proposals = propose(graph)
    (region,) = (
        r for r in proposals if [o.op for o in r.workload.operators] == ["aten.silu.default", "aten.native_layer_norm.default"]
    )
    assert saving_us(region, selector) == 0.0
    default_us = sum(
        selector.winner(t.workload).default_us
        for t in tasks_of(graph.owning_module)
        if t.workload.op in ("aten.silu.default", "aten.native_layer_norm.default")
    )
    sure, unsure = Prediction(-0.5, 0.1), Prediction(-0.5, 0.4)
    named = registry.default_candidate(region.workload)
    for prediction, expected in ((sure, default_us * (1 - 2.718281828 ** (-0.5 + 1.645 * 0.1))), (unsure, None)):
        monkeypatch.setattr(Selector, "prediction", lambda self, w, p=prediction: (named, p) if w == region.workload else None)
        saving = saving_us(region, selector)
        assert saving == pytest.approx(expected) if expected else saving < 0
        assert cover(proposals, selector) == ([region] if expected else [])
