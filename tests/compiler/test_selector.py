import dataclasses
import logging

import pytest
import torch

from raftune.compiler.selector import Selector
from raftune.device import current_device
from raftune.dialects import candidates, default_candidate, with_dialects
from raftune.graph import workload_from_call
from raftune.log import LogError, TuningLog
from raftune.workload import Candidate

aten = torch.ops.aten
DEVICE = current_device(1)


@pytest.fixture
def workload():
    return workload_from_call(aten.mm.default, (torch.randn(8, 16), torch.randn(32, 16).t()))


@pytest.fixture
def alternative(workload):
    return next(c for c in candidates(workload) if c.dialect == "aten" and c != default_candidate(workload))


@pytest.fixture
def log(tmp_path):
    with TuningLog(tmp_path / "log.sqlite") as log:
        yield log


def test_without_a_log_everything_is_the_default(workload):
    choice = Selector(None, device=DEVICE).choose(workload)
    assert (choice.provenance, choice.is_default, choice.time_us) == ("default", True, None)
    x, w = torch.randn(8, 16), torch.randn(32, 16).t()
    torch.testing.assert_close(choice.build()(x, w), x @ w)


def test_the_winner_of_the_log_is_chosen_and_built(log, workload, alternative, record_win):
    record_win(log, workload, DEVICE, alternative)
    selector = Selector(log, device=DEVICE)
    choice, kernel = selector.build(workload)
    assert choice.candidate == alternative
    assert (choice.provenance, choice.time_us, choice.is_default) == ("measured", 50.0, False)
    x, w = torch.randn(8, 16), torch.randn(32, 16).t()
    torch.testing.assert_close(kernel(x, w), x @ w)
    assert (selector.counts.hits, selector.counts.misses) == (1, 0)


def test_a_measured_default_is_a_hit(log, workload, record_win):
    record_win(log, workload, DEVICE)
    selector = Selector(log, device=DEVICE)
    assert selector.choose(workload).provenance == "measured"
    assert selector.choose(workload).is_default
    assert selector.counts.hits == 1


@pytest.mark.parametrize("change", [{"threads": 2}, {"model": "another processor"}, {"vector": ()}])
def test_what_another_device_measured_is_a_miss(log, workload, alternative, record_win, change):
    record_win(log, workload, dataclasses.replace(DEVICE, **change), alternative)
    selector = Selector(log, device=DEVICE)
    assert selector.choose(workload).provenance == "default"
    assert selector.counts.misses == 1


@pytest.mark.parametrize(
    "stale",
    [
        lambda c: dataclasses.replace(c, version="0.0.1"),
        lambda c: dataclasses.replace(c, dialect="gone"),
    ],
)
def test_a_winner_that_is_not_installed_any_more_is_passed_over(log, workload, alternative, record_win, stale):
    record_win(log, workload, DEVICE, stale(alternative))
    choice = Selector(log, device=DEVICE).choose(workload)
    assert choice.is_default


def test_a_winner_of_a_disabled_dialect_is_passed_over(log, workload, record_win):
    other = Candidate("onednn", "any", {})
    record_win(log, workload, DEVICE, other)
    with with_dialects(["aten"]):
        assert Selector(log, device=DEVICE).choose(workload).is_default


def test_a_config_that_does_not_build_is_a_warned_miss(log, workload, alternative, record_win, caplog):
    hostile = dataclasses.replace(alternative, config={"formulation": "__import__('os').system('true')"})
    record_win(log, workload, DEVICE, hostile)
    selector = Selector(log, device=DEVICE)
    choice, kernel = selector.build(workload)
    assert choice.is_default
    assert selector.counts.failed_builds == 1
    assert "does not build" in caplog.text
    x, w = torch.randn(8, 16), torch.randn(32, 16).t()
    torch.testing.assert_close(kernel(x, w), x @ w)


def test_misses_are_reported_once_in_one_line(log, workload, caplog):
    selector = Selector(log, device=DEVICE)
    selector.choose(workload)
    with caplog.at_level(logging.WARNING):
        selector.report_misses()
        selector.report_misses()
    assert len(caplog.records) == 1
    assert "1 of 1 workloads" in caplog.text
    assert "\n" not in caplog.records[0].getMessage()


def test_a_miss_asks_the_caller_who_wants_to_measure(log, workload, alternative, record_win):
    asked = []

    def measure(missed):
        asked.append(missed)
        record_win(log, missed, DEVICE, alternative)

    choice = Selector(log, device=DEVICE, on_miss=measure).choose(workload)
    assert asked == [workload]
    assert choice.candidate == alternative


def test_a_path_that_is_no_log_is_one_clear_error(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("not a database at all, only some text that is long enough to be one" * 10)
    with pytest.raises(LogError, match=r"notes\.txt"):
        Selector(path)
