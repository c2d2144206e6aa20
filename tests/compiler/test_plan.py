"""When the plan that the log holds is followed, and when a step is raced again."""

import json
import math
import sqlite3

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import raftune.compiler.step as step_module
from raftune.compiler.lowering import regions_of
from raftune.compiler.plan import Plan
from raftune.compiler.step import compile_step
from raftune.device import current_device
from raftune.dialects import candidates, registry
from raftune.graph import capture, tasks_of
from raftune.log import TuningLog
from raftune.measure.race import judge

# The steps below take this long by the races' clock: 2% of it is 28 us.
STEP_MS = 1.4


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)), (torch.randn(5, 6), torch.randint(4, (5,)))


def device():
    return current_device(torch.get_num_threads())


class Bench:
    """A log with a winner for the first product, and a count of the races that compiling from it takes."""

    def __init__(self, path, record_win, monkeypatch):
        model, inputs = make()
        tasks = tasks_of(capture(model, inputs, F.cross_entropy).reinplaced().graph_module)
        self.path, self.record_win, self.races, self.ratio = path, record_win, 0, 0.7
        self.product = next(t.workload for t in tasks if t.workload.op == "aten.addmm.default")
        self.others = [c for c in candidates(self.product) if c.dialect == "aten"][1:]
        with TuningLog(path) as log:
            for task in tasks:
                winner = self.others[0] if task.workload == self.product else None
                record_win(log, task.workload, device(), winner, ratio=0.5)
        monkeypatch.setattr("raftune.compiler.contest.race", self.race)
        monkeypatch.setattr(step_module, "single_compilers", list)

    def race(self, sides):
        assert list(sides) == ["eager", "raftune"]
        self.races += 1
        return judge({"eager": [STEP_MS / self.ratio] * 9, "raftune": [STEP_MS] * 9})

    def new_winner(self, ratio):
        with TuningLog(self.path) as log:
            self.record_win(log, self.product, device(), self.others[1], ratio=ratio)

    def compile(self, **options):
        model, inputs = make()
        return compile_step(model, inputs, loss=F.cross_entropy, log=self.path, **options)

    def chosen(self, step):
        return step.selector.choose(self.product).candidate


@pytest.fixture
def bench(tmp_path, record_win, monkeypatch):
    return Bench(tmp_path / "log.sqlite", record_win, monkeypatch)


@pytest.mark.parametrize(("ratio", "races"), [(0.45, 1), (0.1, 2)])
def test_a_later_winner_is_raced_for_if_it_saves_enough_of_the_step(bench, ratio, races):
    assert bench.chosen(bench.compile()) == bench.others[0]
    bench.new_winner(ratio)
    step = bench.compile()
    assert bench.races == races
    assert bench.chosen(step) == bench.others[races - 1]
    assert step.selector.counts.misses == 0
    assert step.uses == "raftune"
    bench.compile()
    assert bench.races == races


def test_a_lost_race_is_run_again_with_any_new_winner(bench):
    bench.ratio = 1.2
    assert bench.compile().uses == "eager"
    assert bench.compile().uses == "eager"
    assert bench.races == 1
    bench.new_winner(0.49)
    bench.compile()
    assert bench.races == 2


def test_a_plan_that_cannot_be_built_here_is_not_followed(bench, monkeypatch):
    bench.compile()
    aten = registry.get("aten")
    monkeypatch.setattr(type(aten), "version", lambda self: "another")
    step = bench.compile()
    assert bench.races == 2
    assert step.selector.counts.misses > 0


def test_without_a_race_the_logs_winners_are_used(bench):
    bench.compile()
    bench.new_winner(0.45)
    step = bench.compile(race=False)
    assert bench.chosen(step) == bench.others[1]
    assert step.race is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda plan: plan | {"choices": []},
        lambda plan: plan | {"choices": {"x": {"dialect": "aten"}}},
        lambda plan: plan | {"choices": {k: v | {"config": "__import__('os')"} for k, v in plan["choices"].items()}},
        lambda plan: plan | {"choices": {k: v | {"provenance": "rumour"} for k, v in plan["choices"].items()}},
        lambda plan: plan | {"choices": {k: v | {"time_us": "soon"} for k, v in plan["choices"].items()}},
        lambda plan: plan | {"choices": {k: v | {"time_us": 10**400} for k, v in plan["choices"].items()}},
        lambda plan: plan | {"choices": {k: v | {"config": {"tile": math.nan}} for k, v in plan["choices"].items()}},
        lambda plan: plan | {"rounds": math.inf},
        lambda plan: plan | {"eager_ms": 10**400},
        lambda plan: plan | {"ratio": -1.0},
        lambda plan: plan | {"eager_ms": math.nan},
        lambda plan: {k: v for k, v in plan.items() if k != "ratio"},
        lambda plan: {k: v for k, v in plan.items() if k != "choices"},
        lambda plan: [plan],
    ],
)
@pytest.mark.filterwarnings("ignore::raftune.log.LogWarning")
def test_a_spoiled_plan_is_raced_again(bench, spoil):
    bench.compile()
    with sqlite3.connect(bench.path) as connection:
        (text,) = connection.execute("SELECT result FROM race").fetchone()
        connection.execute("UPDATE race SET result = ?", (json.dumps(spoil(json.loads(text))),))
    assert bench.compile().uses == "raftune"
    assert bench.races == 2


def test_a_plan_survives_its_journey_through_the_log(bench):
    step = bench.compile()
    plan = Plan.of(regions_of(step.graph.graph_module.graph, []), step.selector, step.race)
    assert len(plan.choices) > 5
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
