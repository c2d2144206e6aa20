"""Learning a known rule, being honest about what was not learned, and keeping a model on disk."""

import dataclasses
import json
import math
import random
import subprocess
import sys
import warnings

import pytest
import xgboost

from raftune.cost_model import (
    CostModel,
    CostModelWarning,
    NotEnoughData,
    Prediction,
    evaluate,
    evaluate_rows,
    model_path,
    train,
)
from raftune.cost_model import model as model_module
from raftune.log import TuningLog
from raftune.measurement import Outcome, Policy, Status
from raftune.workload import Candidate


def nothing(workload, candidate):
    return {}


@pytest.fixture(scope="module")
def model(rows):
    return CostModel(describe=nothing).fit(rows)


def test_the_rule_transfers_to_unseen_workloads(world, model, unseen):
    assert len(unseen) > 30
    lost = []
    for workload in unseen:
        predictions = model.predict(workload, world.candidates)
        chosen = world.candidates[min(range(len(predictions)), key=lambda i: predictions[i].score)]
        ratio = world.log_ratio(workload, chosen)
        lost.append((0.0 if ratio is None else ratio) - world.best(workload))
    # Taking the default, or any one candidate, everywhere loses several times as much.
    default = sum(-world.best(w) for w in unseen) / len(unseen)
    assert sum(lost) / len(lost) < 0.1 * default
    assert sum(value < 0.05 for value in lost) > 0.9 * len(lost)


def test_uncertainty_covers_the_error(world, model, unseen):
    surprises = [
        abs(prediction.log_ratio - truth) / prediction.std
        for workload in unseen
        for candidate, prediction in zip(world.candidates, model.predict(workload, world.candidates), strict=True)
        if candidate.dialect == "tiled" and (truth := world.log_ratio(workload, candidate)) is not None
    ]
    assert sum(s < 2.0 for s in surprises) > 0.9 * len(surprises)


def test_failures_are_foreseen(world, model):
    odd, even = (model.predict(world.workload(64, 64, k), [world.fragile])[0] for k in (243, 256))
    assert odd.ok < 0.5
    assert even.ok > 0.9
    assert odd.score > 0.0 > even.score


def test_before_fitting_the_order_given_is_the_prior(world, tmp_path):
    workload = world.workload(8, 8, 8)
    model = CostModel(describe=nothing)
    predictions = model.predict(workload, world.candidates)
    ratios = [p.log_ratio for p in predictions]
    assert ratios == sorted(ratios)
    assert ratios[0] == 0.0
    assert len(set(ratios)) == len(ratios)
    assert all(p.std == model_module.PRIOR_STD for p in predictions)
    assert model.choose(workload, world.candidates) is None
    assert model.predict(workload, []) == []
    with pytest.raises(NotEnoughData):
        model.save(tmp_path / "model.json")


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_rows_keep_the_prior(world, count):
    rows = list(world.rows(world.workloads(count, seed=1)))
    model = CostModel(describe=nothing)
    with pytest.raises(NotEnoughData, match="too few"):
        model.fit(rows)
    assert not model.is_fitted
    assert model.predict(world.workload(8, 8, 8), [world.skinny]) == [Prediction(0.0, model_module.PRIOR_STD)]


def test_groups_without_a_timed_default_teach_nothing(world, rows):
    with pytest.raises(NotEnoughData, match="0 timed candidates"):
        CostModel(describe=nothing).fit([r for r in rows if not r.is_default])


def test_equal_rows_teach_nothing(world):
    (row, *_) = world.rows(world.workloads(1, seed=1))
    with pytest.raises(NotEnoughData, match="apart"):
        CostModel(describe=nothing).fit([row] * 10)


def test_a_dialect_or_config_that_was_never_seen_stays_uncertain(world, model):
    workload = world.workload(64, 64, 64)
    stranger = Candidate("stranger", "1", {})
    new_word = Candidate("fragile", "1", {"style": "baroque"})
    new_name = Candidate("skinny", "1", {"packed": True, "depth": 3})
    known, unknown, word, name = model.predict(workload, [world.fragile, stranger, new_word, new_name])
    assert known.std < 0.2
    assert unknown == Prediction(0.01, model_module.PRIOR_STD)
    assert word.std >= model_module.PRIOR_STD
    assert name.std >= model_module.PRIOR_STD


def test_defaults_alone_are_no_knowledge_of_their_dialect(world, rows):
    model = CostModel(describe=nothing).fit([r for r in rows if r.candidate.dialect in ("base", "skinny")])
    other = Candidate("base", "1", {"formulation": "swapped"})
    assert model.predict(world.workload(64, 64, 64), [world.default, other])[1].std == model_module.PRIOR_STD


def test_choose_names_only_what_surely_beats_the_default(world, model):
    narrow = world.workload(512, 16, 128)
    candidate, prediction = model.choose(narrow, world.candidates)
    assert candidate == world.skinny
    assert 0.95 <= prediction.faster <= 1.0
    assert prediction.ratio_low < prediction.ratio < prediction.ratio_high < 1.0
    wide = world.workload(512, 512, 243)
    assert model.choose(wide, [world.default, world.skinny, world.fragile]) is None
    assert model.choose(narrow, [world.skinny]) is None  # the first is the default


def test_other_devices_are_told_apart(world, rows):
    many = dataclasses.replace(world.device, threads=2)
    flipped = []
    for row in rows:
        outcome = row.outcome
        if row.candidate == world.skinny:
            outcome = dataclasses.replace(outcome, time_us=outcome.time_us * 8)
        flipped.append(dataclasses.replace(row, device=many, device_digest=many.digest, outcome=outcome))
    model = CostModel(describe=nothing).fit([*rows, *flipped])
    workload = world.workload(512, 16, 128)
    (one,) = model.predict(workload, [world.skinny], device=world.device)
    (two,) = model.predict(workload, [world.skinny], device=many)
    assert one.log_ratio < -0.7
    assert two.log_ratio > 0.7


def test_dialects_describe_their_candidates(world, rows):
    """A config that is opaque by itself becomes learnable through what its dialect says about it."""
    names = {str(c.config.get("tile")): f"schedule-{i}" for i, c in enumerate(world.tiled)}
    tiles = {name: float(tile) for tile, name in names.items()}

    def opaque(candidate):
        if candidate.dialect != "tiled":
            return candidate
        return Candidate("tiled", "1", {"trace": [names[str(candidate.config["tile"])]]})

    def describe(workload, candidate):
        return {"tile": tiles[candidate.config["trace"][0]]} if candidate.dialect == "tiled" else {}

    model = CostModel(describe=describe).fit([dataclasses.replace(r, candidate=opaque(r.candidate)) for r in rows])
    for k, best in ((16, 4), (1024, 32)):
        predictions = model.predict(world.workload(256, 256, k), [opaque(c) for c in world.tiled])
        fastest = min(zip(predictions, world.tiled, strict=True), key=lambda pair: pair[0].log_ratio)
        assert fastest[1].config["tile"] == best


def test_equal_rows_and_seed_give_equal_models_whatever_the_order(world, rows, tmp_path, model):
    shuffled = list(rows)
    random.Random(5).shuffle(shuffled)
    again = CostModel(describe=nothing).fit(shuffled)
    model.save(tmp_path / "a.json")
    again.save(tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    other = CostModel(seed=1, describe=nothing).fit(rows)
    workload = world.workload(64, 64, 64)
    assert other.predict(workload, world.candidates) != model.predict(workload, world.candidates)


def test_a_stored_model_predicts_the_same(world, model, tmp_path):
    path = tmp_path / "tuning.sqlite"
    assert CostModel.load_beside(path) is None
    model.save_beside(path)
    assert [p.name for p in tmp_path.iterdir()] == [model_path(path).name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = CostModel.load_beside(path, describe=nothing)
    workload = world.workload(27, 128, 64)
    assert loaded.predict(workload, world.candidates) == model.predict(workload, world.candidates)
    assert loaded.device == world.device


def tree(value):
    return value["members"][0]["learner"]["gradient_booster"]["model"]["trees"][0]


def changed(key, content):
    return lambda value: value.update({key: content})


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (changed("feature_schema", 99), "feature schema 99"),
        (changed("xgboost", "1.7.6"), rf"XGBoost 1.7.6, this is {xgboost.__version__}"),
        (changed("format", "something"), "not a cost model"),
        (changed("members", []), "no members"),
        (changed("members", [{}]), "damaged"),
        (changed("columns", ["one"]), "damaged"),
        (changed("residuals", {"tiled": -1.0}), "not positive"),
        (changed("device", {"kind": "cpu"}), "damaged"),
        (lambda value: value.pop("runs"), "damaged"),
        (lambda value: tree(value)["left_children"].__setitem__(0, 10**6), "node 0 of tree 0 leads nowhere"),
        (lambda value: tree(value)["left_children"].__setitem__(0, 0), "node 0 of tree 0 leads nowhere"),
        (lambda value: tree(value)["split_indices"].__setitem__(0, -7), "splits on column -7"),
        (lambda value: tree(value)["right_children"].pop(), "damaged"),
        (lambda value: value["members"][0]["learner"]["objective"].update(name="rank:map"), "rank:map"),
        (lambda value: value["members"][0]["learner"]["learner_model_param"].update(num_class="9"), "several outputs"),
    ],
)
def test_a_stale_or_damaged_model_is_ignored_with_one_warning(model, tmp_path, damage, reason):
    path = tmp_path / "model.json"
    model.save(path)
    value = json.loads(path.read_text())
    damage(value)
    path.write_text(json.dumps(value))
    with pytest.warns(CostModelWarning, match=reason) as caught:
        assert CostModel.load(path) is None
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{", b"[]", b"[" * 100_000])
def test_a_file_that_is_no_model_is_ignored(tmp_path, content):
    path = tmp_path / "model.json"
    path.write_bytes(content)
    with pytest.warns(CostModelWarning):
        assert CostModel.load(path) is None


def test_a_failing_description_is_warned_about_and_left_out(world, monkeypatch):
    from raftune.dialects import registry

    class Broken:
        def features(self, workload, config):
            return {"x": config["missing"]}

    monkeypatch.setattr(registry, "installed", lambda: {"tiled": Broken()})
    with pytest.warns(CostModelWarning, match="dialect tiled cannot describe"):
        model = CostModel().fit(world.rows(world.workloads(4, seed=1)))
    assert model.is_fitted


@pytest.fixture
def log(tmp_path, world):
    with TuningLog(tmp_path / "tuning.sqlite") as log:
        run = log.start_run("key", {})
        workloads = world.workloads(6, seed=1)
        for row in world.rows(workloads):
            log.record(row.workload, row.candidate, row.device, Policy(), row.outcome, run, is_default=row.is_default)
        log.record(workloads[0], world.tiled[0], world.device, Policy(), Outcome(Status.NOISY), run)
        log.record_tasks(run, [(w, 2.0) for w in workloads])
        yield log


def test_train_from_a_log_stores_beside_it(world, log):
    model = train(log)
    loaded = CostModel.load_beside(log.path)
    workload = world.workload(64, 64, 64)
    assert loaded.predict(workload, world.candidates) == model.predict(workload, world.candidates)
    model_path(log.path).unlink()
    with TuningLog(log.path, read_only=True) as same:
        train(same)
    assert not model_path(log.path).exists()


def test_train_and_evaluate_say_when_there_is_too_little(tmp_path):
    with TuningLog(tmp_path / "empty.sqlite") as log:
        with pytest.raises(NotEnoughData, match="tune something first"):
            train(log)
        with pytest.raises(NotEnoughData, match="tune something first"):
            evaluate(log)


def test_evaluate_a_log(log):
    first, again = evaluate(log), evaluate(log)
    assert first == again
    assert (first.workloads, first.samples) == (6, 42)
    assert 0.0 < first.default <= 1.0
    assert json.loads(json.dumps(first.to_json()))["top1"] == first.top1


def test_evaluation_figures(world, monkeypatch):
    """Against figures computed by hand: a model that ranks by name instead of learning."""
    places = {"skinny": 0.0, "base": 1.0, "tiled": 2.0, "fragile": 3.0}

    class ByName:
        def __init__(self, **_):
            pass

        def fit_samples(self, data):
            return self

        def predict(self, workload, candidates, *, device=None):
            return [Prediction(places[c.dialect], 0.1) for c in candidates]

        def choose(self, workload, candidates):
            assert candidates[0].dialect == "base"
            named = [c for c in candidates if c.dialect == "skinny"] if workload.digest == wide.digest else []
            return (named[0], Prediction(-1.0, 0.1)) if named else None

    monkeypatch.setattr("raftune.cost_model.evaluation.CostModel", ByName)
    narrow, wide = world.workload(16, 16, 64), world.workload(64, 64, 64)
    rows = [r for r in world.rows([narrow, wide], noise=0.0) if r.candidate.dialect != "tiled"]
    found = evaluate_rows(rows, weights={narrow.digest: 3.0, wide.digest: 1.0})
    default = {"narrow": 160.0, "wide": 640.0}
    best = 3 * default["narrow"] * 0.4 + default["wide"] * 0.75
    assert found.top1 == pytest.approx(best / (3 * default["narrow"] * 0.4 + default["wide"] * 1.8))
    assert found.top5 == pytest.approx(1.0)
    assert found.default == pytest.approx(best / (3 * default["narrow"] + default["wide"]))
    assert found.regret == pytest.approx((0.0 + (1.8 / 0.75 - 1.0)) / 2)
    assert found.chosen == pytest.approx(best / (3 * default["narrow"] + default["wide"] * 1.8))
    assert found.chosen_regret == pytest.approx(((1 / 0.4 - 1.0) + (1.8 / 0.75 - 1.0)) / 2)
    assert found.chosen_worst == pytest.approx(0.8)


def test_a_learned_ranking_is_better_than_the_default(world):
    found = evaluate_rows(world.rows(world.workloads(20, seed=3)), describe=nothing)
    assert found.default < found.top1 <= found.top5 <= 1.0
    assert found.top5 > 0.95
    assert math.isfinite(found.regret)


def test_importing_is_cheap():
    code = "import sys, raftune.cost_model; print([m for m in ('xgboost', 'torch', 'tvm') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
