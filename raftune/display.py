"""What a person sees: a live line of progress on stderr, and tables on stdout."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from raftune.compiler.explain import Alternative, Unit
from raftune.compiler.profile import Profile
from raftune.dialects.registry import DialectInfo
from raftune.explaining import PlanReport
from raftune.log import LoggedWinner
from raftune.measure.race import RaceResult
from raftune.measurement import Status
from raftune.search import Event, Measured, Racing, Rematched, Sampled, SearchStarted, TaskStarted, TuneResult
from raftune.search import Progress as Listener
from raftune.workload import Candidate, Workload

# Without a terminal there is no width to fit into, and a cut column cannot be read back.
_PIPED_WIDTH = 200


@contextmanager
def live_progress(budget_seconds: float | None) -> Iterator[Listener]:
    """A listener that draws on stderr while the block runs; plain lines where stderr is not a terminal."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("[bold]tuning"), BarColumn(24), TextColumn("{task.description}"), TimeElapsedColumn(), console=console
    )
    with bar:
        line = bar.add_task("starting workers", total=budget_seconds)

        def listen(event: Event) -> None:
            text = describe_event(event)
            left = getattr(event, "seconds_left", math.inf)
            done = None if budget_seconds is None or math.isinf(left) else max(0.0, budget_seconds - left)
            bar.update(line, description=text, completed=done)
            if isinstance(event, Rematched) and event.won:
                bar.console.print(f"  {text}", highlight=False, soft_wrap=True)
            elif not console.is_terminal and isinstance(event, SearchStarted | TaskStarted | Racing):
                console.print(text, highlight=False, soft_wrap=True)

        yield listen


def describe_event(event: Event) -> str:
    """One event in one line."""
    match event:
        case SearchStarted():
            return f"{event.tasks} tasks, {event.candidates} candidates, {event.hits} known from the log"
        case TaskStarted():
            return f"default {event.index}/{event.total} {short_op(event.workload)}"
        case Sampled():
            return f"{event.dialect} proposes {event.count} for {short_op(event.workload)}"
        case Racing():
            return f"racing the step, also by single compilers that get ready within {event.patience_s:.0f} s"
        case Rematched():
            ratio = "" if event.rematch.ratio is None else f" at {event.rematch.ratio:.2f} of the default's time"
            verdict = "wins" if event.won else "loses"
            return f"{short_op(event.workload)} {short_shapes(event.workload)}: {event.candidate.dialect} {verdict}{ratio}"
        case Measured():
            ended = f"{event.outcome.time_us:.1f} µs" if event.outcome.status is Status.OK else event.outcome.status.value
            return f"#{event.measured} {short_op(event.workload)} {event.candidate.dialect}: {ended}"


def short_op(workload: Workload) -> str:
    """``aten.addmm.default`` as ``addmm``: what a person calls it."""
    return "+".join(operator.op.split(".")[1] for operator in workload.operators)


def short_shapes(workload: Workload, limit: int = 3) -> str:
    """The first inputs' shapes: ``512x256, 256x1024``."""
    shapes = ["x".join(map(str, spec.shape)) or "()" for spec in workload.inputs]
    return ", ".join(shapes[:limit]) + (", ..." if len(shapes) > limit else "")


def short_config(candidate: Candidate, limit: int = 44) -> str:
    """A config's values in one short line; a schedule's trace says nothing in one."""
    plain = {k: v for k, v in candidate.config.items() if not (isinstance(v, list) and any(isinstance(x, list) for x in v))}
    text = ", ".join(f"{k}={v}" if not isinstance(v, str) else v for k, v in plain.items())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def print_result(result: TuneResult, race: RaceResult | None) -> None:
    """The table of tasks, heaviest first, and the race of the whole step."""
    console = _stdout()
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("task", "shapes"):
        table.add_column(heading, no_wrap=True, max_width=34)
    table.add_column("weight", justify="right")
    table.add_column("default µs", justify="right")
    table.add_column("winner", no_wrap=True)
    table.add_column("dialect", no_wrap=True)
    table.add_column("µs", justify="right")
    table.add_column("speed-up", justify="right")
    for task in sorted(result.tasks, key=lambda t: -(t.weight * (t.default_us or 0.0))):
        gain = task.default_us / task.best_us if task.default_us and task.best_us else None
        _add_row(
            table,
            short_op(task.workload),
            short_shapes(task.workload),
            str(task.weight),
            _number(task.default_us),
            task.reason[:44] if task.winner is None else short_config(task.winner),
            task.status.value if task.winner is None else task.winner.dialect,
            _number(task.best_us),
            "" if gain is None else f"{gain:.2f}x",
        )
    console.print(table, soft_wrap=True)
    console.print(
        f"\n{result.measured} measured, {result.rematches} rematches, {result.hits} known from the log, {result.seconds:.0f} s",
        highlight=False,
    )
    if race is not None:
        console.print(race_text(race), soft_wrap=True)


def race_text(race: RaceResult) -> str:
    """The race of a step in one line."""
    text = f"step race: eager {race.eager_ms:.2f} ms, raftune {race.raftune_ms:.2f} ms, "
    text += f"ratio {race.ratio:.3f} (95% bound {race.ratio_high:.3f}, {race.rounds} rounds)"
    for name, single in race.singles.items():
        text += f"; {name} alone {single.ms:.2f} ms, ratio {single.ratio:.3f} ({single.ratio_high:.3f})"
    return f"{text}: {race.winner} is used"


def print_tasks(rows: Sequence[tuple[Workload, int, dict[str, int]]]) -> None:
    """Tasks and how many candidates each dialect enumerates for them (``--dry-run``)."""
    dialects = list(dict.fromkeys(name for _, _, counts in rows for name in counts))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("task", no_wrap=True)
    table.add_column("shapes", no_wrap=True, max_width=44)
    table.add_column("weight", justify="right")
    for name in dialects:
        table.add_column(name, justify="right")
    for workload, weight, counts in rows:
        _add_row(table, short_op(workload), short_shapes(workload), str(weight), *(str(counts.get(n, 0)) for n in dialects))
    console = _stdout()
    console.print(table, soft_wrap=True)
    total = sum(sum(counts.values()) for _, _, counts in rows)
    console.print(f"\n{len(rows)} tasks, {total} candidates, before any that a dialect samples", highlight=False)


def winner_json(row: LoggedWinner) -> dict[str, Any]:
    """One winner of a log as JSON; times in microseconds."""
    winner = row.winner
    return {
        "digest": row.workload.digest,
        "op": row.workload.op,
        "device": row.device.to_json(),
        "dialect": winner.candidate.dialect,
        "version": winner.candidate.version,
        "winner": dict(winner.candidate.config),
        "best_us": winner.time_us,
        "default_us": winner.default_us,
        "ratio": winner.ratio,
        "is_default": winner.is_default,
        "recorded_at": winner.recorded_at,
    }


def print_winners(rows: Sequence[LoggedWinner]) -> None:
    """One table per device, the largest gains first."""
    console = _stdout()
    for device in dict.fromkeys(row.device for row in rows):
        table = Table(box=None, pad_edge=False, header_style="bold")
        for heading in ("task", "shapes", "winner", "dialect"):
            table.add_column(heading, no_wrap=True, max_width=44)
        for heading in ("default µs", "µs", "speed-up"):
            table.add_column(heading, justify="right")
        here = [row for row in rows if row.device == device]
        for row in sorted(here, key=lambda r: r.winner.ratio):
            won = row.winner
            _add_row(
                table,
                short_op(row.workload),
                short_shapes(row.workload),
                short_config(won.candidate),
                won.candidate.dialect,
                _number(won.default_us),
                _number(won.time_us),
                f"{1 / won.ratio:.2f}x",
            )
        console.print(f"{device}: {len(here)} workloads", highlight=False)
        console.print(table, soft_wrap=True)
    if not rows:
        console.print("no winners in this log")


def print_dialects(rows: Sequence[DialectInfo]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("dialect", "version", "available", "reason"):
        table.add_column(heading)
    for row in rows:
        _add_row(table, row.name, row.version, "yes" if row.available else "no", row.reason)
    _stdout().print(table, soft_wrap=True)


def print_profile(profile: Profile, limit: int) -> None:
    """Where the step's time goes, the most to gain first."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("task", "shapes"):
        table.add_column(heading, no_wrap=True, max_width=34)
    table.add_column("dialect", no_wrap=True)
    for heading in ("calls", "ms", "share", "GFLOP/s", "GB/s", "floor ms", "to gain ms"):
        table.add_column(heading, justify="right")
    for row in profile.rows[:limit]:
        workload = row.workload
        _add_row(
            table,
            "(views, factories, random numbers)" if workload is None else short_op(workload),
            "" if workload is None else short_shapes(workload),
            "" if workload is None else row.dialect,
            str(row.count),
            f"{row.ms:.2f}",
            f"{row.share:.1%}",
            _number(row.gflops),
            _number(row.gbytes),
            "" if row.floor_ms is None else f"{row.floor_ms:.2f}",
            "" if row.floor_ms is None else f"{row.headroom_ms:.2f}",
        )
    console = _stdout()
    console.print(table, soft_wrap=True)
    rest = profile.rows[limit:]
    if rest:
        console.print(f"and {len(rest)} more, {sum(row.ms for row in rest):.2f} ms", highlight=False)
    floor, spent = sum(row.floor_ms or 0.0 for row in profile.rows), sum(row.ms for row in profile.rows)
    console.print(
        f"\nstep {profile.step_ms:.2f} ms, in nodes {spent:.2f} ms, sum of floors {floor:.2f} ms; "
        f"peaks reached here: {profile.peaks.gflops:.0f} GFLOP/s, {profile.peaks.gbytes:.1f} GB/s",
        highlight=False,
        soft_wrap=True,
    )


def print_plan(report: PlanReport) -> None:
    """Every region of the plan in the order of the graph, or all that could run at the nodes that were asked for."""
    console = _stdout()
    if not report.nodes:
        console.print(_table_of_units(report.units), soft_wrap=True)
        if report.race is not None:
            console.print(f"\n{race_text(report.race)}", soft_wrap=True)
    for node in report.nodes:
        console.print(f"{node.name}: regions that it could be part of", soft_wrap=True)
        console.print(_table_of_units(node.units), soft_wrap=True)
        for unit, found in node.alternatives:
            console.print(f"\ncandidates for {short_op(unit.workload)} {short_shapes(unit.workload)}", soft_wrap=True)
            console.print(_table_of_alternatives(found), soft_wrap=True)


def _table_of_units(units: Sequence[Unit]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("", "operators", "task", "shapes", "choice", "dialect"):
        table.add_column(heading, no_wrap=True, max_width=32)
    for heading in ("µs", "by", "saves µs"):
        # Where a line is too long the words are cut, not the numbers.
        table.add_column(heading, no_wrap=True, min_width=8, justify="left" if heading == "by" else "right")
    for unit in units:
        sure = "" if unit.choice.confidence is None else f" ({unit.choice.confidence:.0%} sure)"
        _add_row(
            table,
            "*" if unit.chosen else "",
            "+".join(unit.nodes),
            short_op(unit.workload),
            short_shapes(unit.workload),
            short_config(unit.choice.candidate),
            unit.choice.dialect,
            _number(unit.choice.time_us),
            unit.choice.provenance + sure,
            _number(unit.saving_us),
        )
    return table


def _table_of_alternatives(alternatives: Sequence[Alternative]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("", "dialect", "config"):
        table.add_column(heading, no_wrap=True, max_width=60)
    for heading in ("µs", "/ default", "bounds"):
        table.add_column(heading, justify="right")
    table.add_column("by", no_wrap=True, max_width=60)
    for a in alternatives:
        bounds = " ".join("-" if bound is None else f"{bound:.2f}" for bound in (a.low, a.high)) if a.low or a.high else ""
        _add_row(
            table,
            "*" if a.chosen else "",
            a.candidate.dialect,
            short_config(a.candidate, 60),
            _number(a.time_us),
            "" if a.ratio is None else f"{a.ratio:.2f}",
            bounds,
            a.note or a.source,
        )
    return table


def _add_row(table: Table, *cells: str) -> None:
    """Without what a terminal would obey."""
    table.add_row(*("".join(c if c.isprintable() else "?" for c in cell) for cell in cells))


def _stdout() -> Console:
    """What is printed comes from logs and models: it is text, never markup."""
    plain: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
    console = Console(**plain)
    return console if console.is_terminal else Console(width=_PIPED_WIDTH, **plain)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
