"""The command line: parse, call the library, print. Results go to stdout, progress to stderr."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from raftune.lifetime import exit_on_terminate

if TYPE_CHECKING:
    from raftune.search import Budget
    from raftune.tuning import ModelRequest

DEFAULT_LOG = "raftune.sqlite"
_INTERRUPTED = 130  # as shells report SIGINT


class UserError(click.ClickException):
    """What a person did wrong, in one line; the command exits with 2."""

    exit_code = 2


@contextmanager
def _user_errors() -> Iterator[None]:
    """Turn the library's typed errors into one clear line."""
    from raftune.cost_model import NotEnoughData
    from raftune.device import UnknownDevice
    from raftune.dialects import UnknownDialect
    from raftune.graph import CaptureError
    from raftune.log import LogError
    from raftune.measure import WorkerUnavailable
    from raftune.packing import PackError
    from raftune.search import InvalidBudget
    from raftune.targets import TargetError

    known = (CaptureError, NotEnoughData, InvalidBudget, LogError, PackError, TargetError)
    try:
        yield
    except (*known, UnknownDevice, UnknownDialect, WorkerUnavailable) as error:
        raise UserError(" ".join(str(error).split())) from error


class _Commands(click.Group):
    """Output that cannot be written is one line as well: a full disk, or a character that the terminal's encoding lacks."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        try:
            return super().main(*args, **kwargs)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EIO, errno.EFBIG) or error.filename is not None:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or the interpreter says it again when it flushes at the end
            click.echo(f"Error: the output cannot be written: {error.strerror}", err=True)
            sys.exit(1)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="raftune")
def main() -> None:
    """Measure, learn and remember the fastest kernel dialect for every operator of a training graph."""
    exit_on_terminate()


@main.group()
def tune() -> None:
    """Measure candidates and record them in a tuning log."""


def _dialect_names(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    return None if value is None else tuple(name.strip() for name in value.split(",") if name.strip())


@tune.command("model")
@click.argument("target")
@click.option("--log", "log_path", default=DEFAULT_LOG, show_default=True, type=click.Path(dir_okay=False), help="Tuning log.")
@click.option(
    "--budget", default="5m", show_default=True, help="Time to spend on this model in all, over repeated runs (5m, 90s)."
)
@click.option("--trials", type=click.IntRange(min=0), help="Measurements to make for this model in all, over repeated runs.")
@click.option("--dialects", callback=_dialect_names, help="Only these dialects, comma-separated, in order of preference.")
@click.option("--mode", type=click.Choice(["train", "infer"]), default="train", show_default=True)
@click.option("--optimizer", type=click.Choice(["adamw", "sgd", "none"]), help="Instead of the target's own.")
@click.option("--threads", type=click.IntRange(min=1), help="Intra-op threads [default: PyTorch's].")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--device", help="Build for this device instead of tuning on this CPU: cuda:sm_90 (with --build-only or --dry-run)."
)
@click.option("--build-only", type=click.Path(file_okay=False), help="Compile candidates into this folder, measure nothing.")
@click.option("--dry-run", is_flag=True, help="List tasks and candidate counts, measure nothing.")
@click.option(
    "--simulate", type=click.Path(dir_okay=False), help="Search in this recorded log instead of on this machine; keep nothing."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def tune_model_command(
    target: str,
    log_path: str,
    budget: str,
    trials: int | None,
    dialects: tuple[str, ...] | None,
    mode: Literal["train", "infer"],
    optimizer: str | None,
    threads: int | None,
    seed: int,
    device: str | None,
    build_only: str | None,
    dry_run: bool,
    simulate: str | None,
    as_json: bool,
) -> None:
    """Tune every operator of TARGET's step and race the result against PyTorch.

    TARGET is a built-in (gpt, bert, resnet, mlp), file.py:callable, or package.module:callable, where the callable returns
    (model, inputs[, loss[, optimizer]]).
    """
    with _user_errors():
        from raftune import display
        from raftune.search import Budget, Stop
        from raftune.tuning import (
            ModelOutcome,
            ModelRequest,
            check_request,
            dry_run_counts,
            prepare,
            simulate_model,
            tune_model,
        )

        limit = Budget.parse(budget, trials)
        request = ModelRequest(
            target, mode=mode, optimizer=optimizer, threads=threads, dialects=dialects, seed=seed, device=device
        )
        if (device is None) != (build_only is None) and not dry_run:
            raise UserError("--device and --build-only go together: what is built for a device is measured where it is")
        if dry_run:
            rows = dry_run_counts(request)
            if as_json:
                tasks = [{"digest": w.digest, "op": w.op, "weight": n, "candidates": counts} for w, n, counts in rows]
                click.echo(json.dumps({"tasks": tasks}))
            else:
                display.print_tasks(rows)
            return
        if build_only is not None:
            _build_pack(request, Path(build_only), limit, as_json=as_json)
            return
        if simulate is not None:
            result = simulate_model(request, Path(simulate), limit)
            if as_json:
                click.echo(json.dumps(ModelOutcome(result, None).to_json()))
            else:
                display.print_result(result, None)
            return
        check_request(request, Path(log_path))
        click.echo(f"capturing {target} ({mode}) ...", err=True)
        prepared = prepare(request)
        with display.live_progress(limit.seconds) as listen:
            outcome = tune_model(prepared, Path(log_path), limit, progress=listen)
        if as_json:
            click.echo(json.dumps(outcome.to_json()))
        else:
            display.print_result(outcome.result, outcome.race)
        if outcome.race_failure:
            click.echo(f"warning: {outcome.race_failure}", err=True)
        click.echo(f"log: {log_path}", err=True)
        if outcome.result.stopped is Stop.INTERRUPTED:
            click.echo("interrupted: the step was not raced; run the same command again to go on", err=True)
            sys.exit(_INTERRUPTED)


def _build_pack(request: ModelRequest, folder: Path, limit: Budget, *, as_json: bool) -> None:
    from raftune.packing import build_pack
    from raftune.tuning import prepare

    click.echo(f"capturing {request.target} ({request.mode}) ...", err=True)
    prepared = prepare(request)

    def tell(built: int, failed: int, planned: int) -> None:
        click.echo(f"{built} built, {failed} failed, of {planned}", err=True)

    report = build_pack(prepared.tasks, prepared.device, folder, limit, dialects=request.dialects, progress=tell)
    if as_json:
        click.echo(json.dumps(report.to_json()))
        return
    click.echo(
        f"{report.packed} candidates of {report.tasks} tasks for {prepared.device} in {folder}, {report.left_out} not built"
    )
    for message, count in report.failures.items():
        click.echo(f"  {count} failed: {message}")


@main.command()
@click.argument("target")
@click.option("--log", "log_path", type=click.Path(dir_okay=False), help="Tuning log; without one, PyTorch's own step.")
@click.option("--mode", type=click.Choice(["train", "infer"]), default="train", show_default=True)
@click.option("--optimizer", type=click.Choice(["adamw", "sgd", "none"]), help="Instead of the target's own.")
@click.option("--threads", type=click.IntRange(min=1), help="Intra-op threads [default: PyTorch's].")
@click.option("--rounds", type=click.IntRange(min=1), default=15, show_default=True, help="Steps to time.")
@click.option("--top", type=click.IntRange(min=1), default=30, show_default=True, help="Rows to print.")
@click.option("--trace", type=click.Path(dir_okay=False), help="Write one step for Perfetto or chrome://tracing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def profile(
    target: str,
    log_path: str | None,
    mode: Literal["train", "infer"],
    optimizer: str | None,
    threads: int | None,
    rounds: int,
    top: int,
    trace: str | None,
    as_json: bool,
) -> None:
    """Show where the time of TARGET's compiled step goes, against what this machine can do, the most to gain first."""
    with _user_errors():
        from raftune import display
        from raftune.tuning import ModelRequest, profile_model

        request = ModelRequest(target, mode=mode, optimizer=optimizer, threads=threads)
        found = profile_model(request, None if log_path is None else Path(log_path), rounds)
        if trace is not None:
            try:
                Path(trace).write_text(json.dumps(found.to_trace()), encoding="utf-8")
            except OSError as error:
                raise UserError(f"the trace cannot be written to {trace}: {error.strerror}") from error
        if as_json:
            click.echo(json.dumps(found.to_json()))
        else:
            display.print_profile(found, top)


@main.group()
def plan() -> None:
    """Look at what a log makes of a model."""


@plan.command("explain")
@click.argument("target")
@click.argument("nodes", nargs=-1)
@click.option("--log", "log_path", type=click.Path(dir_okay=False), help="Tuning log; without one, PyTorch's own step.")
@click.option("--mode", type=click.Choice(["train", "infer"]), default="train", show_default=True)
@click.option("--optimizer", type=click.Choice(["adamw", "sgd", "none"]), help="Instead of the target's own.")
@click.option("--threads", type=click.IntRange(min=1), help="Intra-op threads [default: PyTorch's].")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan_explain(
    target: str,
    nodes: tuple[str, ...],
    log_path: str | None,
    mode: Literal["train", "infer"],
    optimizer: str | None,
    threads: int | None,
    as_json: bool,
) -> None:
    """Show what runs at each operator of TARGET's step and, for the operators named NODES, everything that could.

    Costs are measured where the log has them and otherwise predicted by its cost model, with 90% bounds.
    """
    with _user_errors():
        from raftune import display
        from raftune.explaining import explain_plan
        from raftune.tuning import ModelRequest, loaded

        request = ModelRequest(target, mode=mode, optimizer=optimizer, threads=threads)
        report = explain_plan(loaded(request), mode, None if log_path is None else Path(log_path), nodes)
        if as_json:
            click.echo(json.dumps(report.to_json()))
        else:
            display.print_plan(report)


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def dialects(as_json: bool) -> None:
    """List the installed dialects, with version and availability."""
    import dataclasses

    from raftune.dialects import describe

    rows = describe()
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(row) for row in rows]))
    else:
        from raftune import display

        display.print_dialects(rows)


@main.group("log")
def log_group() -> None:
    """Read a tuning log."""


@log_group.command("show")
@click.argument("path", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def log_show(path: str, as_json: bool) -> None:
    """List the winners in a log, by device."""
    with _user_errors():
        from raftune import display
        from raftune.log import TuningLog

        with TuningLog(path, read_only=True) as log:
            rows = list(log.winners())
    if as_json:
        click.echo(json.dumps([display.winner_json(row) for row in rows]))
    else:
        display.print_winners(rows)


@main.group("cost-model")
def cost_model_group() -> None:
    """Train and judge the cost model of a tuning log."""


def _cost_model_command(function: Callable[..., None]) -> Callable[..., None]:
    function = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(function)
    return click.argument("path", type=click.Path())(function)


@cost_model_group.command("train")
@_cost_model_command
def cost_model_train(path: str, as_json: bool) -> None:
    """Train on every measurement in the log, and store the model beside it."""
    with _user_errors():
        from raftune.cost_model import model_path, train
        from raftune.log import TuningLog

        with TuningLog(path, read_only=True) as log:
            rows = sum(1 for _ in log.training_rows())
            stored = model_path(log.path)
            try:
                train(log).save_beside(log.path)
            except OSError as error:
                raise UserError(f"the model cannot be stored in {stored}: {error.strerror}") from error
    summary = {"rows": rows, "stored": str(stored)}
    click.echo(json.dumps(summary) if as_json else f"trained on {rows} measurements; stored in {stored}")


@cost_model_group.command("evaluate")
@_cost_model_command
def cost_model_evaluate(path: str, as_json: bool) -> None:
    """Judge the cost model by leaving out one workload at a time."""
    with _user_errors():
        from raftune.cost_model import evaluate
        from raftune.log import TuningLog

        with TuningLog(path, read_only=True) as log:
            evaluation = evaluate(log)
    click.echo(json.dumps(evaluation.to_json()) if as_json else str(evaluation))


if __name__ == "__main__":
    sys.exit(main())
