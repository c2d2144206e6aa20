"""What the log hands out, and turning rows (data from strangers) into it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from raftune.device import Device
from raftune.measurement import Outcome, Rematch, Status
from raftune.workload import Candidate, InvalidRecord, Workload

MESSAGE_LIMIT = 2000
"""Characters of a failure's message that are kept."""


@dataclass(frozen=True, slots=True)
class Winner:
    """What to run for a workload. ``ratio`` is winner time over default time, 1.0 when the winner is the default."""

    candidate: Candidate
    time_us: float
    default: Candidate
    default_us: float
    ratio: float
    is_default: bool
    recorded_at: str


@dataclass(frozen=True, slots=True)
class LoggedWinner:
    """A winner together with what it is the winner for."""

    workload: Workload
    device: Device
    winner: Winner


@dataclass(frozen=True, slots=True)
class Spent:
    """What runs of one key have used: wall seconds (measurements and rematches), and measurements taken."""

    seconds: float
    trials: int


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """The latest verdict on one candidate, for the cost model. ``is_default``: it is what the ratio is taken over."""

    workload: Workload
    candidate: Candidate
    device_digest: str
    outcome: Outcome
    is_default: bool = False
    device: Device | None = None


def bounded(message: str) -> str:
    """``message`` as storable text of at most :data:`MESSAGE_LIMIT` characters: its start and its end."""
    text = message.encode("utf-8", "replace").decode("utf-8")
    if len(text) <= MESSAGE_LIMIT:
        return text
    half = MESSAGE_LIMIT // 2 - 3
    return f"{text[:half]} ... {text[-half:]}"


def read_json(text: Any) -> Any:
    """Parse a JSON column; raises :class:`InvalidRecord`."""
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRecord(f"not JSON: {error}") from error


def read_object(text: Any) -> dict[str, Any]:
    """Parse a JSON column that holds an object; raises :class:`InvalidRecord`."""
    value = read_json(text)
    if not isinstance(value, dict):
        raise InvalidRecord(f"not an object: {text!r:.80}")
    return value


def read_candidate(row: Mapping[str, Any], prefix: str = "") -> Candidate:
    """The candidate in the columns ``dialect``, ``version``, ``config``, ``digest`` (each with ``prefix``)."""
    config = read_json(row[f"{prefix}config"])
    if not isinstance(config, dict):
        raise InvalidRecord(f"config is not an object: {row[f'{prefix}config']!r}")
    candidate = Candidate(str(row[f"{prefix}dialect"]), str(row[f"{prefix}version"]), config)
    _check_digest("candidate", lambda: candidate.digest, row[f"{prefix}digest"])
    return candidate


def read_workload(spec: Any, digest: Any) -> Workload:
    try:
        workload = Workload.from_json(read_json(spec))
    except RecursionError as error:
        raise InvalidRecord("workload is nested too deeply") from error
    _check_digest("workload", lambda: workload.digest, digest)
    return workload


def read_device(spec: Any, digest: Any) -> Device:
    value = read_json(spec)
    try:
        device = Device(
            kind=str(value["kind"]),
            model=str(value["model"]),
            cores=int(value["cores"]),
            vector=tuple(str(v) for v in value["vector"]),
            threads=int(value["threads"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRecord(f"not a device: {error!r}") from error
    _check_digest("device", lambda: device.digest, digest)
    return device


def read_outcome(row: Mapping[str, Any]) -> Outcome:
    status = _status(row)
    outcome = Outcome(
        status=status,
        time_us=_number(row, "time_us"),
        low_us=_number(row, "low_us"),
        high_us=_number(row, "high_us"),
        repeats=int(_number(row, "repeats") or 0),
        max_error=_number(row, "max_error"),
        message=str(row["message"]),
        build_s=_number(row, "build_s") or 0.0,
        cost_s=_number(row, "cost_s") or 0.0,
    )
    if status is Status.OK:
        _positive(row, "time_us")
    return outcome


def read_rematch(row: Mapping[str, Any]) -> Rematch:
    return Rematch(
        status=_status(row),
        time_us=_number(row, "time_us"),
        default_us=_number(row, "default_us"),
        ratio=_number(row, "ratio"),
        ratio_high=_number(row, "ratio_high"),
        rounds=int(_number(row, "rounds") or 0),
        message=str(row["message"]),
        cost_s=_number(row, "cost_s") or 0.0,
    )


def read_winner(row: Mapping[str, Any]) -> Winner:
    return Winner(
        candidate=read_candidate(row),
        time_us=_positive(row, "time_us"),
        default=read_candidate(row, "default_"),
        default_us=_positive(row, "default_us"),
        ratio=_positive(row, "ratio"),
        is_default=bool(row["is_default"]),
        recorded_at=str(row["recorded_at"]),
    )


def _status(row: Mapping[str, Any]) -> Status:
    try:
        return Status(row["status"])
    except ValueError as error:
        raise InvalidRecord(f"unknown status {row['status']!r}") from error


def _number(row: Mapping[str, Any], column: str) -> float | None:
    value = row[column]
    # SQLite stores NaN as NULL, so infinity is the only non-finite number there is: an error bound may be infinite.
    if value is None or isinstance(value, int | float):
        return value
    raise InvalidRecord(f"{column} is not a number: {value!r}")


def _positive(row: Mapping[str, Any], column: str) -> float:
    value = _number(row, column)
    if value is None or not 0 < value < math.inf:
        raise InvalidRecord(f"{column} is not a positive number: {value!r}")
    return float(value)


def _check_digest(what: str, compute: Callable[[], str], recorded: Any) -> None:
    try:
        computed = compute()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRecord(f"{what} has no canonical form: {error}") from error
    if computed != recorded:
        raise InvalidRecord(f"{what} does not match its digest {recorded!r}")
