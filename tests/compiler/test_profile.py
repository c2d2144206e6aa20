"""The profile of a step: every node is in it, its figures follow from the times, and the model is as before."""

import copy
import json
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import nn

from raftune.cli import main
from raftune.compiler.profile import Peaks, profile_step
from raftune.compiler.step import compile_step

PEAKS = Peaks(gflops=50.0, gbytes=10.0)


@pytest.fixture(scope="module")
def profiled():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 5))
    inputs = (torch.randn(16, 24), torch.randint(5, (16,)))
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    step = compile_step(model, inputs, loss=F.cross_entropy, optimizer=sgd, race=False)
    before = copy.deepcopy(model.state_dict())
    return step, profile_step(step, inputs, rounds=3, peaks=PEAKS), before, model


def test_every_node_is_timed_once(profiled):
    step, profile, _, _ = profiled
    nodes = [n for n in step.graph.graph_module.graph.nodes if n.op not in ("placeholder", "output")]
    assert sum(row.count for row in profile.rows) == len(nodes) == len(profile.spans)
    assert [span.name for span in profile.spans] == [n.name for n in nodes]
    assert all(row.ms >= 0 for row in profile.rows)


def test_figures_follow_from_flops_bytes_and_time(profiled):
    _, profile, _, _ = profiled
    (row,) = (
        r for r in profile.rows if r.workload and r.workload.op == "aten.addmm.default" and r.workload.inputs[0].shape == (32,)
    )
    operations = 2 * 16 * 24 * 32
    moved = 4 * (32 + 16 * 24 + 24 * 32 + 16 * 32)
    assert row.gflops == pytest.approx(operations / row.ms / 1e6, rel=0.1)
    assert row.gbytes == pytest.approx(moved / row.ms / 1e6)
    assert row.floor_ms == pytest.approx(max(operations / 50.0, moved / 10.0) / 1e6, rel=0.1)
    assert row.headroom_ms == pytest.approx(max(0.0, row.ms - row.floor_ms))
    assert list(profile.rows) == sorted(profile.rows, key=lambda r: (-r.headroom_ms, -r.ms))


def test_the_model_is_put_back(profiled):
    _, _, before, model = profiled
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_command_prints_json_and_writes_a_trace(tmp_path):
    (tmp_path / "net.py").write_text(
        "import torch\n\n\ndef make():\n    return torch.nn.Linear(4, 3), (torch.randn(2, 4), torch.randint(3, (2,))), "
        "torch.nn.functional.cross_entropy\n"
    )
    trace = tmp_path / "out.json"
    command = ["profile", f"{tmp_path / 'net.py'}:make", "--rounds", "2", "--trace", str(trace), "--json"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["step_ms"] > 0
    assert found["peaks"]["gflops"] > 0
    assert any(row["op"] == "aten.addmm.default" for row in found["rows"])
    events = json.loads(trace.read_text())["traceEvents"]
    assert len(events) == sum(row["count"] for row in found["rows"])
    assert all(event["ph"] == "X" and event["dur"] >= 0 for event in events)


def test_a_trace_that_cannot_be_written_is_one_line(tmp_path):
    command = ["profile", "mlp", "--rounds", "1", "--trace", str(tmp_path / "no" / "out.json")]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2
    assert "the trace cannot be written" in result.stderr
