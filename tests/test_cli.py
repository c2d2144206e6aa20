import json
import os
import sqlite3
import subprocess
import sys
import textwrap

import pytest
import torch
from click.testing import CliRunner

from raftune.cli import main
from raftune.device import Device
from raftune.graph import workload_from_call
from raftune.log import TuningLog
from raftune.measurement import Outcome, Policy, Status
from raftune.racing import Raced
from raftune.search import Stop, TuneResult
from raftune.workload import Candidate

TINY = """
    import torch
    from torch import nn
    import torch.nn.functional as F

    def make():
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        return model, (torch.randn(6, 8), torch.randint(4, (6,))), F.cross_entropy, lambda p: torch.optim.SGD(p, lr=0.1)

    def wrong():
        return nn.Linear(8, 4), torch.randn(6, 9)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.py").write_text(textwrap.dedent(TINY))

    def call(*arguments):
        return CliRunner().invoke(main, [str(a) for a in arguments])

    return call


def one_line_error(result):
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1
    assert "Traceback" not in result.output
    return lines[0]


def test_dialects_are_listed_for_machines(run):
    rows = json.loads(run("dialects", "--json").stdout)
    assert {"aten", "onednn", "inductor", "tvm"} <= {row["name"] for row in rows}
    assert all(set(row) == {"name", "version", "available", "reason"} for row in rows)


def test_a_dry_run_lists_tasks_and_measures_nothing(run, tmp_path):
    result = run("tune", "model", "tiny.py:make", "--dry-run", "--json", "--dialects", "aten")
    assert result.exit_code == 0, result.output
    tasks = {task["op"]: task for task in json.loads(result.stdout)["tasks"]}
    assert tasks["aten.relu.default"]["weight"] == 1
    assert tasks["aten.addmm.default"]["candidates"]["aten"] > 1
    assert not (tmp_path / "raftune.sqlite").exists()


def test_tuning_measures_once_and_answers_from_the_log_afterwards(run, tmp_path):
    arguments = (
        "tune",
        "model",
        "tiny.py:make",
        "--dialects",
        "aten",
        "--trials",
        "14",
        "--budget",
        "60s",
        "--threads",
        "1",
        "--json",
    )
    first = run(*arguments)
    assert first.exit_code == 0, first.output
    told = json.loads(first.stdout.splitlines()[-1])
    assert 0 < told["measured"] <= 14
    assert set(told["race"]) >= {"eager_ms", "raftune_ms", "ratio"}
    for task in told["tasks"]:
        assert {"digest", "op", "weight", "default_us", "winner", "dialect", "best_us"} <= set(task)

    again = json.loads(run(*arguments).stdout.splitlines()[-1])
    assert again["measured"] == 0
    assert again["hits"] == told["measured"]
    assert again["race"] == told["race"]

    rows = json.loads(run("log", "show", "raftune.sqlite", "--json").stdout)
    known = {task["digest"] for task in told["tasks"] if task["default_us"] is not None}
    assert {row["digest"] for row in rows} == known
    with sqlite3.connect(tmp_path / "raftune.sqlite") as log:
        assert log.execute("select count(*) from measurement").fetchone()[0] >= told["measured"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tune", "model", "nothing"), "unknown target 'nothing'"),
        (("tune", "model", "tiny.py:absent"), "no callable 'absent'"),
        (("tune", "model", "tiny.py:wrong", "--optimizer", "none"), "mat1 and mat2 shapes cannot be multiplied (6x9 and 8x4)"),
        (("tune", "model", "tiny.py:make", "--dialects", "aten,nvm"), "unknown dialect 'nvm'"),
        (("tune", "model", "tiny.py:make", "--budget", "soon"), "duration 'soon'"),
        (("tune", "model", "tiny.py:make", "--log", "absent/folder/x.sqlite"), "absent/folder/x.sqlite"),
        (("log", "show", "absent.sqlite"), "absent.sqlite"),
        (("log", "show", "tiny.py"), "tiny.py"),
        (("cost-model", "train", "absent.sqlite"), "absent.sqlite"),
    ],
)
def test_a_mistake_is_one_clear_line_and_exit_status_2(run, arguments, message):
    assert message in one_line_error(run(*arguments))


@pytest.fixture
def odd_log(tmp_path):
    """A log whose winner's config holds markup, terminal commands and characters beyond ASCII."""
    workload = workload_from_call(torch.ops.aten.relu.default, (torch.randn(4),))
    device, policy = Device("cpu", "a [/b] model", 1, ("avx2",), 1), Policy()
    odd = Candidate("[/bold]", "1", {"formulation": "[/b]\x1b[31m ünï"})
    path = tmp_path / "odd.sqlite"
    with TuningLog(path) as log:
        log.record(workload, odd, device, policy, Outcome(Status.OK, 10.0, 10.0, 10.0, 9), is_default=True)
    return path


def test_what_a_log_holds_is_printed_as_text(run, odd_log):
    result = run("log", "show", odd_log)
    assert result.exit_code == 0, result.output
    assert "[/b]?[31m" in result.stdout
    assert "a [/b] model" in result.stdout


def test_a_simulation_needs_a_recording_of_the_model(run, tmp_path):
    assert "there is no tuning log" in one_line_error(run("tune", "model", "tiny.py:make", "--simulate", "none.sqlite"))
    with TuningLog(tmp_path / "empty.sqlite"):
        pass
    assert "nothing to simulate" in one_line_error(run("tune", "model", "tiny.py:make", "--simulate", "empty.sqlite"))
    workload = workload_from_call(torch.ops.aten.relu.default, (torch.randn(3, 5),), {})
    with TuningLog(tmp_path / "other.sqlite") as log:
        default = Candidate("aten", "1.0", {"formulation": "default"})
        outcome = Outcome(Status.OK, 9.0, 8.9, 9.1, cost_s=0.5)
        log.record(workload, default, Device("cpu", "recorded", 1, (), 1), Policy(), outcome, is_default=True)
    assert "none of the tasks" in one_line_error(run("tune", "model", "tiny.py:make", "--simulate", "other.sqlite"))
    assert not (tmp_path / "raftune.sqlite").exists()


def test_a_recorded_model_is_simulated_in_no_time(run, tmp_path):
    log = tmp_path / "recorded.sqlite"
    assert (
        run(
            "tune", "model", "tiny.py:make", "--log", log, "--trials", 60, "--dialects", "aten,onednn", "--threads", 1
        ).exit_code
        == 0
    )
    before = log.read_bytes()
    result = run("tune", "model", "tiny.py:make", "--simulate", log, "--json", "--threads", 1)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["race"] is None
    assert found["measured"] > 0
    assert {task["status"] for task in found["tasks"]} <= {"won", "default"}
    assert log.read_bytes() == before
    assert not (tmp_path / "raftune.sqlite").exists()


@pytest.mark.parametrize("stdout", ["ascii", "full"])
def test_output_that_cannot_be_written_as_it_is_gives_no_traceback(odd_log, stdout):
    command = [sys.executable, "-m", "raftune.cli", "log", "show", str(odd_log)]
    if stdout == "ascii":
        result = subprocess.run(
            command, env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0
        assert "relu" in result.stdout
    else:
        with open("/dev/full", "w") as full:
            result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert result.returncode == 1
        assert "cannot be written" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [("--dialects", "nvm"), ("--log", "absent/x.sqlite"), ("--log", "tiny.py")])
def test_what_needs_no_capture_is_refused_before_it(run, arguments, tmp_path):
    result = run("tune", "model", "tiny.py:make", *arguments)
    one_line_error(result)
    assert result.stderr.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "__pycache__") == ["tiny.py"]


def test_an_interrupted_search_is_not_raced_and_says_so(run, monkeypatch):
    def interrupted(tasks, log, **options):
        return TuneResult((), 3, 0, 0, 1.0, Stop.INTERRUPTED, "key")

    def no_race(*_):
        raise AssertionError("raced")

    monkeypatch.setattr("raftune.tuning.tune", interrupted)
    monkeypatch.setattr("raftune.tuning.race_in_child", no_race)
    result = run("tune", "model", "tiny.py:make", "--json")
    assert result.exit_code == 130
    assert json.loads(result.stdout)["stopped"] == "interrupted"
    assert "run the same command again" in result.stderr


def test_a_budget_is_for_the_search_and_the_race(run, monkeypatch):
    given = {}

    def search(tasks, log, **options):
        given["search"] = options["budget"].seconds
        return TuneResult((), 0, 0, 0, 1.0, Stop.BUDGET, "key")

    def race(task, log_path, threads, patience_s):
        given["race"] = patience_s
        return Raced(None, "not today")

    monkeypatch.setattr("raftune.tuning.tune", search)
    monkeypatch.setattr("raftune.tuning.race_in_child", race)
    assert run("tune", "model", "tiny.py:make", "--budget", "4m").exit_code == 0
    assert given == {"search": 180.0, "race": 60.0}


def test_a_race_without_end_is_a_plan_that_is_not_recommended(run, monkeypatch):
    monkeypatch.setattr("raftune.racing._RACE_TIMEOUT", 0.01)
    result = run("tune", "model", "tiny.py:make", "--trials", "0", "--json", "--dialects", "aten")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["race"] is None
    assert "could not be raced within" in result.stderr


def test_a_file_that_is_not_a_log_is_left_as_it_was(run, tmp_path):
    (tmp_path / "precious.txt").write_text("do not touch")
    one_line_error(run("tune", "model", "tiny.py:make", "--log", "precious.txt"))
    assert (tmp_path / "precious.txt").read_text() == "do not touch"
