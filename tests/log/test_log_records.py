"""Recording and asking: winners, budgets, attribution."""

import dataclasses
import sqlite3
import threading
import warnings

import pytest
from log_samples import DEFAULT, DEVICE, FAST, FASTER, POLICY, against, failed, matmul, ok

from raftune.log import LogError, LogWarning, TuningLog
from raftune.log.records import MESSAGE_LIMIT
from raftune.measurement import Outcome, Policy, Status
from raftune.workload import Candidate


@pytest.fixture
def log(path):
    with TuningLog(path) as log:
        yield log


def test_every_outcome_is_a_row_and_comes_back_as_recorded(log, path):
    outcomes = {
        Candidate("d", "1", {"i": i}): Outcome(status, 5.0, 4.0, 6.0, 7, 0.25, f"said {status}", 0.5, 1.5)
        for i, status in enumerate(Status)
    }
    for candidate, outcome in outcomes.items():
        log.record(matmul(), candidate, DEVICE, POLICY, outcome)
    final = {c.digest: (c, o) for c, o in outcomes.items() if o.status is not Status.NOISY}
    assert log.outcomes(matmul(), DEVICE, POLICY) == final
    with sqlite3.connect(path) as other:
        assert other.execute("SELECT count(*) FROM measurement").fetchone() == (len(Status),)


def test_latest_final_outcome_holds(log):
    for outcome in (ok(10.0), failed(Status.CRASH), ok(12.0), failed(Status.NOISY)):
        log.record(matmul(), FAST, DEVICE, POLICY, outcome)
    assert log.outcomes(matmul(), DEVICE, POLICY)[FAST.digest] == (FAST, ok(12.0))


@pytest.mark.parametrize(
    "key",
    [
        (matmul(m=65), DEVICE, POLICY),
        (matmul(), dataclasses.replace(DEVICE, threads=2), POLICY),
        (matmul(), DEVICE, Policy(margin=0.1)),
    ],
)
def test_workload_device_and_policy_are_the_key(log, key):
    log.record(matmul(), DEFAULT, DEVICE, POLICY, ok(10.0), is_default=True)
    assert log.outcomes(matmul(), DEVICE, POLICY)
    assert log.outcomes(*key) == {}
    assert log.rematches(*key) == {}


def test_unknown_workload_is_a_miss(log):
    assert log.winner(matmul(), DEVICE) is None
    log.record(matmul(), DEFAULT, DEVICE, POLICY, failed(Status.CRASH), is_default=True)
    assert log.winner(matmul(), DEVICE) is None


def test_default_wins_until_beaten_in_a_rematch(log):
    log.record(matmul(), DEFAULT, DEVICE, POLICY, ok(100.0), is_default=True)
    log.record(matmul(), FAST, DEVICE, POLICY, ok(10.0))
    winner = log.winner(matmul(), DEVICE)
    assert (winner.candidate, winner.is_default, winner.time_us, winner.ratio) == (DEFAULT, True, 100.0, 1.0)

    log.record_rematch(matmul(), FAST, DEFAULT, DEVICE, POLICY, against(0.5, 0.6))
    winner = log.winner(matmul(), DEVICE)
    assert (winner.candidate, winner.default, winner.is_default) == (FAST, DEFAULT, False)
    assert (winner.time_us, winner.default_us, winner.ratio) == (50.0, 100.0, 0.5)


@pytest.mark.parametrize(("high", "wins"), [(1 - POLICY.margin, True), (1 - POLICY.margin + 1e-6, False), (1.2, False)])
def test_margin_of_the_policy_decides(log, high, wins):
    log.record(matmul(), DEFAULT, DEVICE, POLICY, ok(100.0), is_default=True)
    log.record(matmul(), FAST, DEVICE, POLICY, ok(90.0))
    log.record_rematch(matmul(), FAST, DEFAULT, DEVICE, POLICY, against(0.9, high))
    assert (log.winner(matmul(), DEVICE).candidate == FAST) is wins


def test_lowest_ratio_first_and_unaccepted_are_passed_over(log):
    log.record(matmul(), DEFAULT, DEVICE, POLICY, ok(100.0), is_default=True)
    for candidate, ratio in ((FAST, 0.8), (FASTER, 0.5)):
        log.record(matmul(), candidate, DEVICE, POLICY, ok(100 * ratio))
        log.record_rematch(matmul(), candidate, DEFAULT, DEVICE, POLICY, against(ratio, ratio))
    assert log.winner(matmul(), DEVICE).candidate == FASTER
    assert log.winner(matmul(), DEVICE, lambda c: c != FASTER).candidate == FAST
    assert log.winner(matmul(), DEVICE, lambda c: c == DEFAULT).candidate == DEFAULT
    assert log.winner(matmul(), DEVICE, lambda c: False) is None


@pytest.mark.parametrize("later", ["lost", "crashed", "wrong"])
def test_a_later_verdict_takes_the_win_back(log, later):
    log.record(matmul(), DEFAULT, DEVICE, POLICY, ok(100.0), is_default=True)
    log.record(matmul(), FAST, DEVICE, POLICY, ok(50.0))
    log.record_rematch(matmul(), FAST, DEFAULT, DEVICE, POLICY, against(0.5, 0.6))
    log.record_rematch(matmul(), FAST, DEFAULT, DEVICE, POLICY, against(0.5, 0.6, status=Status.NOISY))
    assert log.winner(matmul(), DEVICE).candidate == FAST
    if later == "lost":
        log.record_rematch(matmul(), FAST, DEFAULT, DEVICE, POLICY, against(0.99, 1.01))
    elif later == "crashed":
        log.record_rematch(matmul(), FAST, DEFAULT, DEVICE, POLICY, against(0.5, 0.6, status=Status.CRASH))
    else:
        log.record(matmul(), FAST, DEVICE, POLICY, failed(Status.WRONG))
    assert log.winner(matmul(), DEVICE).candidate == DEFAULT


def test_a_win_over_an_old_default_says_nothing_about_the_new_one(log):
    new = Candidate(DEFAULT.dialect, "1.1", DEFAULT.config)
    log.record(matmul(), DEFAULT, DEVICE, POLICY, ok(100.0), is_default=True)
    log.record(matmul(), FAST, DEVICE, POLICY, ok(50.0))
    log.record_rematch(matmul(), FAST, DEFAULT, DEVICE, POLICY, against(0.5, 0.5))
    log.record(matmul(), new, DEVICE, POLICY, ok(40.0), is_default=True)

    def installed(candidate):
        return candidate != DEFAULT

    assert log.winner(matmul(), DEVICE, installed).candidate == new
    assert log.rematches(matmul(), DEVICE, POLICY).keys() == {FAST.digest}
    assert log.rematches(matmul(), DEVICE, POLICY, default=new) == {}
    assert log.rematches(matmul(), DEVICE, POLICY, default=DEFAULT) == {FAST.digest: (FAST, against(0.5, 0.5))}


def test_a_rematch_makes_its_default_known(log):
    log.record(matmul(), DEFAULT, DEVICE, POLICY, ok(100.0))
    assert log.winner(matmul(), DEVICE) is None
    log.record_rematch(matmul(), FAST, DEFAULT, DEVICE, POLICY, against(1.5, 1.6))
    assert log.winner(matmul(), DEVICE).candidate == DEFAULT


def test_budget_is_per_key_and_outlives_runs(log, path):
    for key in ("a", "a", "b"):
        run = log.start_run(key, {"seed": 0})
        log.record(matmul(), DEFAULT, DEVICE, POLICY, ok(1.0, cost_s=1.25), run)
        log.record(matmul(), FAST, DEVICE, POLICY, failed(Status.TIMEOUT), run)
        log.record_rematch(matmul(), FAST, DEFAULT, DEVICE, POLICY, against(1.5, 1.6), run)
    log.record(matmul(), FASTER, DEVICE, POLICY, ok(1.0))
    log.close()
    with TuningLog(path) as again:
        assert (again.spent("a").seconds, again.spent("a").trials) == (2 * (1.25 + 0.5 + 2.0), 4)
        assert (again.spent("b").seconds, again.spent("b").trials) == (1.25 + 0.5 + 2.0, 2)
        assert (again.spent("c").seconds, again.spent("c").trials) == (0.0, 0)


def test_rows_of_a_run_that_does_not_exist_are_refused(log):
    with pytest.raises(LogError, match="FOREIGN KEY"):
        log.record(matmul(), FAST, DEVICE, POLICY, ok(1.0), run=77)
    assert log.outcomes(matmul(), DEVICE, POLICY) == {}


def test_tasks_weigh_as_in_the_latest_run(log):
    first, second = log.start_run("k", {}), log.start_run("k", {})
    log.record_tasks(first, [(matmul(1), 2), (matmul(2), 3.0)])
    log.record_tasks(second, [(matmul(2), 5.0)])
    assert log.weights() == {matmul(1).digest: 2.0, matmul(2).digest: 5.0}


def test_races_are_remembered_by_key_and_device(log):
    log.record_race("gpt", DEVICE, {"eager_ms": 10.0, "ratio": 1.5})
    log.record_race("gpt", DEVICE, {"eager_ms": 10.0, "ratio": 0.5})
    assert log.race("gpt", DEVICE) == {"eager_ms": 10.0, "ratio": 0.5}
    assert log.race("bert", DEVICE) is None
    assert log.race("gpt", dataclasses.replace(DEVICE, threads=2)) is None


def test_winners_and_training_rows_cover_the_log(log):
    other = dataclasses.replace(DEVICE, threads=2)
    for workload in (matmul(1), matmul(2)):
        for device in (DEVICE, other):
            log.record(workload, DEFAULT, device, POLICY, ok(100.0), is_default=True)
    log.record(matmul(1), FAST, other, POLICY, ok(20.0))
    log.record_rematch(matmul(1), FAST, DEFAULT, other, POLICY, against(0.2, 0.2))
    found = {(w.workload.digest, w.device.threads): w.winner.candidate for w in log.winners()}
    assert found == {
        (matmul(1).digest, 1): DEFAULT,
        (matmul(2).digest, 1): DEFAULT,
        (matmul(1).digest, 2): FAST,
        (matmul(2).digest, 2): DEFAULT,
    }
    assert next(log.winners(lambda c: c == FAST), None) is None  # a win counts only against a default that is still there
    rows = list(log.training_rows(other))
    assert [(r.workload, r.candidate, r.outcome.time_us, r.is_default, r.device) for r in rows] == [
        (matmul(1), DEFAULT, 100.0, True, other),
        (matmul(1), FAST, 20.0, False, other),
        (matmul(2), DEFAULT, 100.0, True, other),
    ]
    assert len(list(log.training_rows())) == 5


def test_the_winner_view_agrees_for_people(log, path):
    log.record(matmul(), DEFAULT, DEVICE, POLICY, ok(100.0), is_default=True)
    log.record(matmul(), FAST, DEVICE, POLICY, ok(50.0))
    log.record_rematch(matmul(), FAST, DEFAULT, DEVICE, POLICY, against(0.5, 0.6))
    with sqlite3.connect(path) as other:
        rows = other.execute("SELECT workload, op, threads, dialect, time_us, default_us, is_default FROM winner").fetchall()
    assert rows == [(matmul().digest, "aten.mm.default", 1, "fast", 50.0, 100.0, 0)]


def test_messages_are_bounded_and_any_text_is_storable(log):
    log.record(matmul(), FAST, DEVICE, POLICY, failed(Status.BUILD_ERROR, "start" + "x" * 100_000 + "end"))
    log.record(matmul(), FASTER, DEVICE, POLICY, failed(Status.CRASH, "lone \udc80 surrogate"))
    found = log.outcomes(matmul(), DEVICE, POLICY)
    message = found[FAST.digest][1].message
    assert len(message) <= MESSAGE_LIMIT
    assert message.startswith("start")
    assert message.endswith("end")
    assert found[FASTER.digest][1].message == "lone ? surrogate"


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE candidate SET config = '{not json' WHERE dialect = 'fast'",
        "UPDATE candidate SET config = '[1]' WHERE dialect = 'fast'",
        "UPDATE candidate SET config = '{\"tile\":[8,99]}' WHERE dialect = 'fast'",
        "UPDATE candidate SET version = CAST(x'ff' AS TEXT) WHERE dialect = 'fast'",
        f"UPDATE candidate SET config = '{'[' * 100_000}' WHERE dialect = 'fast'",
        "UPDATE measurement SET status = 'splendid' WHERE candidate_id IN (SELECT id FROM candidate WHERE dialect = 'fast')",
        "UPDATE measurement SET time_us = 'soon' WHERE candidate_id IN (SELECT id FROM candidate WHERE dialect = 'fast')",
        "UPDATE measurement SET repeats = 9e999 WHERE candidate_id IN (SELECT id FROM candidate WHERE dialect = 'fast')",
        "UPDATE measurement SET time_us = -1 WHERE candidate_id IN (SELECT id FROM candidate WHERE dialect = 'fast')",
    ],
)
def test_an_unreadable_row_is_a_warned_miss(log, path, damage):
    log.record(matmul(), DEFAULT, DEVICE, POLICY, ok(100.0), is_default=True)
    log.record(matmul(), FAST, DEVICE, POLICY, ok(50.0))
    with sqlite3.connect(path) as other:
        other.execute(damage)
    with pytest.warns(LogWarning, match=r"skipped measurement 2"):
        assert log.outcomes(matmul(), DEVICE, POLICY).keys() == {DEFAULT.digest}
    with pytest.warns(LogWarning):
        assert [r.candidate for r in log.training_rows()] == [DEFAULT]


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE candidate SET config = '{}' WHERE dialect = 'fast'",
        "UPDATE rematch SET time_us = 'soon'",
        "UPDATE rematch SET time_us = 9e999",
    ],
)
def test_an_unreadable_winner_falls_back_to_the_default(log, path, damage):
    log.record(matmul(), DEFAULT, DEVICE, POLICY, ok(100.0), is_default=True)
    log.record(matmul(), FAST, DEVICE, POLICY, ok(50.0))
    log.record_rematch(matmul(), FAST, DEFAULT, DEVICE, POLICY, against(0.5, 0.6))
    with sqlite3.connect(path) as other:
        other.execute(damage)
    with pytest.warns(LogWarning, match="skipped winner"):
        assert log.winner(matmul(), DEVICE).candidate == DEFAULT


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE workload SET spec = '{}'",
        """UPDATE workload SET spec = replace(spec, '"mutates":[]', '"mutates":[1e999]')""",
        "UPDATE device SET spec = '{\"kind\":1}'",
        """UPDATE device SET spec = replace(spec, '"cores":', '"cores":1e999,"was":')""",
    ],
)
def test_an_unreadable_workload_or_device_is_skipped(log, path, damage):
    log.record(matmul(), DEFAULT, DEVICE, POLICY, ok(100.0), is_default=True)
    with sqlite3.connect(path) as other:
        other.execute(damage)
    with pytest.warns(LogWarning):
        assert list(log.winners()) == []
    with pytest.warns(LogWarning):
        assert list(log.training_rows()) == []


def test_rounds_without_end_are_a_skipped_rematch(log, path):
    log.record(matmul(), DEFAULT, DEVICE, POLICY, ok(100.0), is_default=True)
    log.record_rematch(matmul(), FAST, DEFAULT, DEVICE, POLICY, against(0.5, 0.6))
    with sqlite3.connect(path) as other:
        other.execute("UPDATE rematch SET rounds = 9e999")
    with pytest.warns(LogWarning, match="skipped rematch"):
        assert log.rematches(matmul(), DEVICE, POLICY) == {}


@pytest.mark.parametrize("result", ["3", "[]", "{", "[" * 100_000])
def test_a_race_that_is_no_object_is_skipped_with_a_warning(log, path, result):
    log.record_race("gpt", DEVICE, {})
    with sqlite3.connect(path) as other:
        other.execute("UPDATE race SET result = ?", (result,))
    with pytest.warns(LogWarning, match="skipped race"):
        assert log.race("gpt", DEVICE) is None


def test_threads_may_share_a_log(log):
    def add(number):
        for i in range(10):
            log.record(matmul(), Candidate("d", "1", {"n": number, "i": i}), DEVICE, POLICY, ok(1.0))

    threads = [threading.Thread(target=add, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(log.outcomes(matmul(), DEVICE, POLICY)) == 40
