import math
import sys
import textwrap

import bench_case
import bench_models
import bench_peers
import bench_process
import pytest
import torch
from bench_case import Settings, loss_difference
from bench_process import ContenderFailed, ContenderProcess
from bench_report import best_peer, left_to_do, load_rows, save_rows, summarize, table
from bench_rounds import run_rounds, steps_per_turn

from raftune.log import TuningLog
from raftune.models import Gpt, Target

FAKE = """
    import json, os, socket, sys, time
    from raftune.measure.protocol import Channel

    channel = Channel(socket.socket(fileno=int(sys.argv[-1])))
    while (message := channel.receive(None))["do"] != "end":
        match message["do"]:
            case "prepare": answer = {"compile_s": 1.5}
            case "losses": answer = {"losses": [2.0, 1.0], "step_ms": 10.0}
            case "step": answer = {"ns": [3_000_000] * message["count"]}
            case "memory": answer = {"peak_mb": 100.0, "step_mb": 10.0, "loaded_mb": 90.0}
            case "environment": answer = {"value": os.environ.get("GREETING")}
            case "refuse": answer = {"failed": "TypeError: no"}
            case "dawdle": time.sleep(60)
            case "crash": sys.exit("out of luck")
        channel.send(answer)
"""


def row(case, contender, ratio, threads=1, **more):
    measured = {"median_ms": 10 * ratio, "ratio": ratio, "compile_s": 4.0, "peak_mb": 100.0, "step_mb": 10.0}
    return {"case": case, "contender": contender, "threads": threads, "loss_difference": 1e-7, **measured, **more}


def refused(case, contender, reason):
    return {"case": case, "contender": contender, "threads": 1, "reason": reason}


ROWS = [
    row("mlp", "eager", 1.0),
    row("mlp", "eager keep pages", 0.9),
    row("mlp", "torch.compile", 0.8),
    row("mlp", "raftune", 0.4, compile_s=1.0, peak_mb=90.0, step_mb=12.0),
    row("vit", "eager", 1.0),
    row("vit", "eager keep pages", 0.5),
    refused("vit", "torch.compile", "RuntimeError: no compiler"),
    row("vit", "raftune", 1.0),
]


@pytest.fixture
def fake(tmp_path):
    path = tmp_path / "fake.py"
    path.write_text(textwrap.dedent(FAKE))

    def start(**environment):
        return ContenderProcess([sys.executable, str(path)], environment | {"PYTHONPATH": ":".join(filter(None, sys.path))})

    return start


def test_the_summary_compares_with_the_best_other_contender_of_each_case():
    summary = summarize(ROWS)
    assert summary["geomean"] == pytest.approx(math.sqrt(2.0 * 0.5))
    assert summary["worst"] == pytest.approx(0.5)
    assert summary["geomean_over_eager"] == pytest.approx(math.sqrt(2.5))
    assert summary["geomean_over_keep_pages"] == pytest.approx(math.sqrt(0.9 / 0.4 * 0.5))
    assert summary["compile_ratio"] == pytest.approx(0.25)
    assert summary["peak_ratio"] == pytest.approx(1.0)
    assert summary["step_ratio"] == pytest.approx(1.2)
    assert summary["rows"] == ROWS


def test_a_case_without_raftune_is_missing_not_forgotten():
    summary = summarize([row("mlp", "eager", 1.0), refused("mlp", "raftune", "CaptureError: no")])
    assert summary["missing"] == ["mlp"]
    assert (summary["cases"], summary["geomean"], summary["worst"]) == (0, None, None)


def test_the_table_has_a_line_for_each_case_and_the_reasons():
    text = table(ROWS)
    line = next(line for line in text.splitlines() if line.startswith("mlp"))
    assert "torch.compile" in line
    assert "2.00x" in line
    assert "0.90 (1.20)" in line
    assert "1.0 / 4.0" in line
    assert "vit, torch.compile: RuntimeError: no compiler" in text
    assert "1.00x (geometric mean of 2 cases), worst 0.50x" in text
    assert "mlp" in table([refused("mlp", "eager", "killed"), refused("mlp", "raftune", "there is no eager")])


def test_the_best_peer_is_never_raftune():
    assert best_peer({"eager": row("mlp", "eager", 1.0), "raftune": row("mlp", "raftune", 0.1)}) == "eager"


def test_results_are_kept_and_cases_that_have_some_are_not_run_again(tmp_path):
    path = tmp_path / "results.json"
    assert load_rows(path) == []
    save_rows(path, ROWS)
    assert load_rows(path) == ROWS
    assert list(tmp_path.iterdir()) == [path]
    assert left_to_do(["mlp", "gpt", "vit"], ROWS, threads=1) == ["gpt"]
    assert left_to_do(["mlp", "gpt"], ROWS, threads=2) == ["mlp", "gpt"]


@pytest.mark.parametrize("text", ["[]", "{}", "no JSON"])
def test_another_file_is_not_taken_for_results(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError):  # noqa: PT011  (json has a subclass of it)
        load_rows(path)


def test_losses_are_compared_relative_to_what_they_are_but_not_to_nothing():
    assert loss_difference([2.0, 1.1], [2.0, 1.0]) == pytest.approx(0.1)
    assert loss_difference([2.0, 2e-9], [2.0, 1e-9]) == pytest.approx(1e-9 / 0.02)


def test_turns_alternate_their_order():
    order = []
    turns = {name: lambda name=name: order.append(name) or 1.0 for name in "abc"}
    times = run_rounds(turns, 2, lambda: [1.0], sleep=lambda _: None)
    assert "".join(order) == "abccba"
    assert times.milliseconds == {name: [1.0, 1.0] for name in "abc"}
    assert times.disturbed == 0


def test_a_disturbed_round_is_begun_again_at_once():
    speeds = iter([[1.0, 1.0], [1.0, 2.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
    values = iter([9.0, 1.0, 2.0])
    turn = lambda: next(values)  # noqa: E731
    times = run_rounds({"a": turn, "b": turn}, 1, lambda: next(speeds), sleep=lambda _: None)
    assert times.milliseconds == {"a": [1.0], "b": [2.0]}


def test_without_patience_a_disturbed_round_counts_and_is_counted():
    speeds = iter([[1.0], [2.0]] + [[1.0], [2.0], [1.0]] * 2)
    now = iter(range(100))
    times = run_rounds(
        {"a": lambda: 1.0, "b": lambda: 2.0}, 2, lambda: next(speeds), patience=1, clock=lambda: next(now), sleep=lambda _: None
    )
    assert times.milliseconds == {"a": [1.0, 1.0], "b": [2.0, 2.0]}
    assert times.disturbed == 2


def test_a_contender_that_fails_is_out_and_the_others_go_on():
    answers = iter([1.0, None])

    def sometimes():
        if (answer := next(answers)) is None:
            raise ContenderFailed("exit status -11:")
        return answer

    times = run_rounds({"a": sometimes, "b": lambda: 2.0}, 3, lambda: [1.0], sleep=lambda _: None)
    assert times.milliseconds == {"b": [2.0] * 3}
    assert times.failed == {"a": "exit status -11:"}


@pytest.mark.parametrize(("step_ms", "count"), [(1, 10), (10, 3), (300, 1)])
def test_short_steps_are_timed_several_in_a_turn(step_ms, count):
    assert steps_per_turn(step_ms) == count


def test_a_contender_answers_and_ends(fake):
    with fake(GREETING="hello") as process:
        assert process.ask("step", count=2) == {"ns": [3_000_000] * 2}
        assert process.ask("environment") == {"value": "hello"}
        with pytest.raises(ContenderFailed, match="TypeError: no"):
            process.ask("refuse")
        assert process.ask("prepare") == {"compile_s": 1.5}


def test_a_contender_that_hangs_or_dies_is_a_reason(fake):
    with fake() as process:
        with pytest.raises(ContenderFailed, match="dawdle took more than 0 s"):
            process.ask("dawdle", patience=0.1)
        process._process.kill()
    with fake() as process, pytest.raises(ContenderFailed, match="exit status 1: out of luck"):
        process.ask("crash")


def test_a_case_has_a_row_for_each_contender(fake, monkeypatch, tmp_path):
    def start(name, *_):
        process = fake()
        if name == "torchscript":
            monkeypatch.setattr(process, "ask", lambda do, **_: fail())
        return process

    def fail():
        raise ContenderFailed("cannot be traced")

    monkeypatch.setattr(bench_case, "start", start)
    TuningLog(tmp_path / "log.sqlite").close()
    settings = Settings(["eager", "torchscript", "jax", "raftune"], threads=2, rounds=3, log=tmp_path / "log.sqlite")
    eager, torchscript, jax, raftune = bench_case.bench_case("vit_small", settings, lambda: [1.0])
    assert raftune == eager | {"contender": "raftune", "measurements": 0}
    assert eager == {
        "case": "vit_small",
        "model": "vit",
        "batch": "small",
        "contender": "eager",
        "threads": 2,
        "median_ms": 3.0,
        "lower_quartile_ms": 3.0,
        "ratio": 1.0,
        "rounds": 3,
        "disturbed_rounds": 0,
        "compile_s": 1.5,
        "loss_difference": 0.0,
        "peak_mb": 100.0,
        "step_mb": 10.0,
        "loaded_mb": 90.0,
    }
    assert torchscript["reason"] == "cannot be traced"
    assert jax["reason"] == "written for mlp and gpt only"


def test_without_an_eager_step_nothing_is_compared(fake, monkeypatch):
    def start(name, *_):
        if name == "eager":
            raise ContenderFailed("killed")
        return fake()

    monkeypatch.setattr(bench_case, "start", start)
    rows = bench_case.bench_case("mlp", Settings(["eager", "raftune"], 1, 1, None), lambda: [1.0])
    assert [r["reason"] for r in rows] == ["killed", "there is no eager step to compare it with"]


def test_every_model_has_two_batches():
    assert len(bench_models.CASES) == 16
    small, moderate = bench_models.llama_small(), bench_models.llama()
    assert small.inputs["tokens"].shape[0] < moderate.inputs["tokens"].shape[0]
    assert all(callable(getattr(bench_models, case)) for case in bench_models.CASES)


def tiny_gpt():
    torch.manual_seed(0)
    tokens = torch.randint(32, (2, 9))
    inputs = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    model = Gpt(vocabulary=32, width=16, heads=2, layers=1, context=8)
    return Target(model, inputs, None, lambda p: torch.optim.AdamW(p, lr=1e-3))


def losses_of(name, model, target):
    step = bench_peers.CONTENDERS[name].make(bench_peers.Task(model, target, None))
    return [float(step()) for _ in range(4)]


@pytest.mark.parametrize("name", ["eager foreach", "eager fused", "torchscript", "jax", "raftune"])
@pytest.mark.parametrize(("model", "make"), [("gpt", tiny_gpt), ("mlp", bench_models.mlp_small)])
def test_contenders_train_the_same_model(name, model, make):
    if name == "jax":
        pytest.importorskip("jax")
    assert losses_of(name, model, make()) == pytest.approx(losses_of("eager", model, make()), rel=1e-5)


def test_a_real_contender_in_its_process(tmp_path):
    with bench_process.start("eager keep pages", "mlp_small", 1, None, tmp_path) as process:
        assert process.ask("prepare")["compile_s"] > 0
        assert len(process.ask("losses")["losses"]) == 50
        assert len(process.ask("step", count=2)["ns"]) == 2
        memory = process.ask("memory")
        assert 0 < memory["step_mb"] < memory["peak_mb"]
