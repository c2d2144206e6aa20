import copy
import subprocess
import sys
import textwrap

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from raftune.compiler.backend import asked_tasks, raftune_backend, selector_for
from raftune.compiler.eager import EagerStep
from raftune.device import current_device
from raftune.dialects import candidates
from raftune.log import TuningLog


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))
    return model, (torch.randn(6, 12), torch.randint(4, (6,)))


@pytest.fixture
def log_path(tmp_path, record_win):
    """A log in which the first alternative of the default's dialect won every task that torch.compile asks for."""
    model, inputs = make()
    tasks = asked_tasks(
        lambda backend: EagerStep(torch.compile(model, backend=backend), F.cross_entropy, None, "train")(inputs)
    )
    path = tmp_path / "log.sqlite"
    with TuningLog(path) as log:
        for task in tasks:
            others = [c for c in candidates(task.workload) if c.dialect == "aten"][1:]
            record_win(log, task.workload, current_device(torch.get_num_threads()), others[0] if others else None)
    return path


def losses(model, forward, inputs, steps=5):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(forward(inputs[0]), inputs[1])
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def test_training_under_torch_compile_follows_eager_and_hits_every_workload(log_path):
    model, inputs = make()
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend=raftune_backend, options={"log": str(log_path)})
    assert losses(model, compiled, inputs) == pytest.approx(losses(twin, twin, inputs), rel=1e-4)
    counts = selector_for(str(log_path)).counts
    assert counts.misses == 0
    assert counts.hits > 5


def test_the_backend_is_found_by_name_without_importing_raftune(log_path):
    program = """
        import sys, torch
        model = torch.nn.Linear(12, 16)
        assert not any(name.startswith("raftune") for name in sys.modules)
        x = torch.randn(6, 12)
        torch.testing.assert_close(torch.compile(model, backend="raftune")(x), model(x))
        assert "raftune" in sys.modules
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={"RAFTUNE_LOG": str(log_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_an_unknown_option_is_refused():
    model, inputs = make()
    with pytest.raises(Exception, match="no option 'logs'"):
        torch.compile(model, backend=raftune_backend, options={"logs": "x"})(inputs[0])


def test_a_second_shape_is_never_wrong(log_path):
    model, _ = make()
    compiled = torch.compile(model, backend=raftune_backend, options={"log": str(log_path)})
    for rows in (6, 7, 3, 6):
        x = torch.randn(rows, 12)
        torch.testing.assert_close(compiled(x), model(x))


def test_outputs_of_one_call_survive_the_next(log_path):
    model, inputs = make()
    compiled = torch.compile(model, backend=raftune_backend, options={"log": str(log_path)})
    first = compiled(inputs[0])
    kept = first.detach().clone()
    compiled(inputs[0] + 1)
    torch.testing.assert_close(first.detach(), kept, rtol=0, atol=0)
