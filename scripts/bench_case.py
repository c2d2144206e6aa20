"""One case of the benchmark: every contender made ready, its losses compared, its steps timed in turns, its memory read."""

from __future__ import annotations

import sqlite3
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench_peers import CONTENDERS, EAGER, RAFTUNE
from bench_process import ContenderFailed, ContenderProcess, start
from bench_rounds import median_ms, run_rounds, steps_per_turn

from raftune.measure.race import lower_quartile

Row = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What all cases have in common; ``log`` is ``None`` where there is no tuning log."""

    contenders: Sequence[str]
    threads: int
    rounds: int
    log: Path | None


@dataclass(frozen=True)
class Ready:
    """A contender that waits for its turns, with what making it ready has told."""

    process: ContenderProcess
    compile_s: float
    losses: list[float]
    step_ms: float
    measurements: int


def bench_case(case: str, settings: Settings, speed: Callable[[], list[float]]) -> list[Row]:
    """A row for each contender: its times, ratio to eager's, compile time, memory and losses, or the ``reason`` for none."""
    reasons: dict[str, str] = {}
    ready: dict[str, Ready] = {}
    with ExitStack() as stack:
        for name in settings.contenders:
            try:
                ready[name] = _make_ready(name, case, settings, stack)
            except ContenderFailed as failure:
                reasons[name] = str(failure)
            _tell(f"{case}: {name} " + (reasons.get(name) or f"ready after {ready[name].compile_s:.1f} s"))
        times: dict[str, list[float]] = {}
        memory: dict[str, Row] = {}
        disturbed = 0
        if EAGER in ready:
            count = steps_per_turn(ready[EAGER].step_ms)
            found = run_rounds({name: _turn(r.process, count) for name, r in ready.items()}, settings.rounds, speed)
            reasons |= found.failed
            times, disturbed = found.milliseconds, found.disturbed
            for name in list(times):
                try:
                    memory[name] = ready[name].process.ask("memory")
                except ContenderFailed as failure:
                    reasons[name] = str(failure)
    return [
        _identity(case, name, settings)
        | (
            {"reason": reasons.get(name, "there is no eager step to compare it with")}
            if name in reasons or EAGER not in times
            else _measured(ready[name], ready[EAGER], times[name], times[EAGER])
            | memory[name]
            | {"disturbed_rounds": disturbed}
            | ({"measurements": ready[name].measurements} if name == RAFTUNE else {})
        )
        for name in settings.contenders
    ]


def loss_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest difference relative to the expected loss, or to a hundredth of the first where it has become smaller.

    The loss of a batch that is known by heart is mostly rounding.
    """
    floor = abs(expected[0]) / 100
    return max(abs(a - b) / max(abs(b), floor) for a, b in zip(losses, expected, strict=True))


def _make_ready(name: str, case: str, settings: Settings, stack: ExitStack) -> Ready:
    models = CONTENDERS[name].models
    if models is not None and case.removesuffix("_small") not in models:
        raise ContenderFailed(f"written for {' and '.join(models)} only")
    cache = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
    log = settings.log if name == RAFTUNE else None
    before = recorded(log)
    process = start(name, case, settings.threads, log, cache)
    try:
        compile_s = process.ask("prepare")["compile_s"]
        answer = process.ask("losses")
    except BaseException:
        process.end()
        raise
    stack.enter_context(process)
    return Ready(process, compile_s, answer["losses"], answer["step_ms"], recorded(log) - before)


def recorded(log: Path | None) -> int:
    """How many measurements, rematches and races a tuning log holds."""
    if log is None:
        return 0
    connection = sqlite3.connect(f"{log.resolve().as_uri()}?mode=ro", uri=True)
    try:
        tables = ("measurement", "rematch", "race")
        return sum(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables)
    finally:
        connection.close()


def _turn(process: ContenderProcess, count: int) -> Callable[[], float]:
    return lambda: median_ms(process.ask("step", count=count)["ns"])


def _identity(case: str, name: str, settings: Settings) -> Row:
    model, small = case.removesuffix("_small"), case.endswith("_small")
    return {
        "case": case,
        "model": model,
        "batch": "small" if small else "moderate",
        "contender": name,
        "threads": settings.threads,
    }


def _measured(ready: Ready, eager: Ready, times: list[float], eager_times: list[float]) -> Row:
    return {
        "median_ms": statistics.median(times),
        "lower_quartile_ms": lower_quartile(times),
        "ratio": statistics.median(a / b for a, b in zip(times, eager_times, strict=True)),
        "rounds": len(times),
        "compile_s": ready.compile_s,
        "loss_difference": loss_difference(ready.losses, eager.losses),
    }


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
