"""The tuning log's interface: record outcomes as they arrive, ask for winners."""

from __future__ import annotations

import os
import sqlite3
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from sqlite_utils import Database

from raftune.device import Device
from raftune.log import connection, queries
from raftune.log.errors import LogError, LogWarning
from raftune.log.records import (
    LoggedWinner,
    Spent,
    TrainingRow,
    Winner,
    bounded,
    read_candidate,
    read_device,
    read_object,
    read_outcome,
    read_rematch,
    read_winner,
    read_workload,
)
from raftune.log.schema import immediate
from raftune.measurement import Outcome, Policy, Rematch
from raftune.workload import Candidate, InvalidRecord, Workload, canonical_json

T = TypeVar("T")
Accept = Callable[[Candidate], bool]


def _always(candidate: Candidate) -> bool:
    del candidate
    return True


class TuningLog:
    """One tuning log file. Each ``record`` call is one committed transaction, safe against the death of the process.

    ``read_only=True`` never writes, and works on read-only media. Raises :class:`LogError` when the file cannot be used.
    Rows that cannot be understood are skipped with a :class:`LogWarning`. Methods may be called from several threads.
    """

    def __init__(self, path: str | os.PathLike[str], read_only: bool = False) -> None:
        self.path = Path(path)
        self.read_only = read_only
        self._lock = threading.RLock()
        opener = connection.open_for_reading if read_only else connection.open_for_writing
        self._db: Database = opener(self.path)

    def close(self) -> None:
        with self._lock:
            if self.read_only:
                self._db.close()
            else:
                connection.close(self._db)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    # Writing

    def record(
        self,
        workload: Workload,
        candidate: Candidate,
        device: Device,
        policy: Policy,
        outcome: Outcome,
        run: int | None = None,
        *,
        is_default: bool = False,
    ) -> None:
        """Add one outcome. ``is_default`` says that ``candidate`` is what PyTorch would run for ``workload``."""
        with self._writing():
            workload_id, candidate_id = self._workload(workload), self._candidate(candidate)
            self._insert(
                "measurement",
                workload_id=workload_id,
                candidate_id=candidate_id,
                device_id=self._device(device),
                policy_id=self._policy(policy),
                run_id=run,
                status=outcome.status.value,
                time_us=outcome.time_us,
                low_us=outcome.low_us,
                high_us=outcome.high_us,
                repeats=outcome.repeats,
                max_error=outcome.max_error,
                build_s=outcome.build_s,
                cost_s=outcome.cost_s,
                message=bounded(outcome.message),
                recorded_at=_now(),
            )
            if is_default:
                self._mark_default(workload_id, candidate_id)

    def record_rematch(
        self,
        workload: Workload,
        candidate: Candidate,
        default: Candidate,
        device: Device,
        policy: Policy,
        rematch: Rematch,
        run: int | None = None,
    ) -> None:
        """Add the result of one candidate against the default, which is thereby known to be the default."""
        with self._writing():
            workload_id, default_id = self._workload(workload), self._candidate(default)
            self._insert(
                "rematch",
                workload_id=workload_id,
                candidate_id=self._candidate(candidate),
                default_id=default_id,
                device_id=self._device(device),
                policy_id=self._policy(policy),
                run_id=run,
                status=rematch.status.value,
                time_us=rematch.time_us,
                default_us=rematch.default_us,
                ratio=rematch.ratio,
                ratio_high=rematch.ratio_high,
                rounds=rematch.rounds,
                message=bounded(rematch.message),
                cost_s=rematch.cost_s,
                recorded_at=_now(),
            )
            self._mark_default(workload_id, default_id)

    def start_run(self, key: str, settings: Mapping[str, Any]) -> int:
        """Begin a run; its number attributes rows to it. Runs with one ``key`` share one budget (:meth:`spent`)."""
        with self._writing():
            return self._insert("run", key=key, settings=canonical_json(dict(settings)), started_at=_now())

    def record_tasks(self, run: int, tasks: Iterable[tuple[Workload, float]]) -> None:
        """Note what a run tunes: workloads with their weights (how often each runs in a step)."""
        with self._writing():
            for workload, weight in tasks:
                row = {"run_id": run, "workload_id": self._workload(workload), "weight": float(weight)}
                self._db.table("task").insert(row, pk=("run_id", "workload_id"), replace=True)

    def record_race(self, key: str, device: Device, result: Mapping[str, Any]) -> None:
        """Add the result of racing a whole step; ``result`` must be plain JSON."""
        with self._writing():
            self._insert(
                "race", key=key, device_id=self._device(device), result=canonical_json(dict(result)), recorded_at=_now()
            )

    # Reading

    def outcomes(self, workload: Workload, device: Device, policy: Policy) -> dict[str, tuple[Candidate, Outcome]]:
        """The latest final outcome of each candidate, by candidate digest. A noisy outcome is not final."""
        key = {"workload": workload.digest, "device": device.digest, "policy": policy.digest}
        return self._latest("measurement", self._query(queries.OUTCOMES, key), read_outcome)

    def rematches(
        self, workload: Workload, device: Device, policy: Policy, default: Candidate | None = None
    ) -> dict[str, tuple[Candidate, Rematch]]:
        """The latest final rematch of each candidate, by candidate digest; with ``default``, only those against it.

        After an upgrade of PyTorch the default is another candidate, and earlier rematches say nothing about it.
        """
        key = {
            "workload": workload.digest,
            "device": device.digest,
            "policy": policy.digest,
            "default": default.digest if default is not None else None,
        }
        return self._latest("rematch", self._query(queries.REMATCHES, key), read_rematch)

    def winner(self, workload: Workload, device: Device, accept: Accept = _always) -> Winner | None:
        """What to run, or ``None`` when the log does not know.

        The candidate with the lowest ratio among those whose latest outcome is ok and whose latest rematch against the
        default has ``ratio_high <= 1 - margin`` of its policy; else the default if its latest outcome is ok. Candidates and
        defaults that ``accept`` refuses (not installed, another version) are passed over.
        """
        row = self._first(
            queries.WORKLOAD_AND_DEVICE,
            {"workload": workload.digest, "device": device.digest},
        )
        if row is None:
            return None
        if row["spec"] != workload.canonical:
            self._skip(f"workload {workload.digest}: its text is not what its digest was computed from")
            return None
        return self._pick(row["workload_id"], row["device_id"], accept)

    def winners(self, accept: Accept = _always) -> Iterator[LoggedWinner]:
        """The winner of every workload on every device that the log knows one for."""
        workloads: dict[str, Workload | None] = {}
        devices: dict[str, Device | None] = {}
        for row in self._query(queries.PAIRS):
            workload = self._memoized(workloads, row, "workload", read_workload)
            device = self._memoized(devices, row, "device", read_device)
            if workload is None or device is None:
                continue
            winner = self._pick(row["workload_id"], row["device_id"], accept)
            if winner is not None:
                yield LoggedWinner(workload, device, winner)

    def spent(self, key: str) -> Spent:
        """What all runs with ``key`` have used so far, killed ones included."""
        row = self._first(queries.SPENT, {"key": key})
        return Spent(float(row["seconds"]), int(row["trials"])) if row is not None else Spent(0.0, 0)

    def weights(self) -> dict[str, float]:
        """Weight by workload digest: how often it runs in a step, from the latest run that had it as a task."""
        return {row["digest"]: float(row["weight"]) for row in self._query(queries.WEIGHTS)}

    def race(self, key: str, device: Device) -> dict[str, Any] | None:
        """The latest race of ``key`` on ``device``."""
        row = self._first(
            queries.LATEST_RACE,
            {"key": key, "device": device.digest},
        )
        if row is None:
            return None
        return self._understood(f"race {row['id']}", partial(read_object, row["result"]))

    def training_rows(self, device: Device | None = None, op: str | None = None) -> Iterator[TrainingRow]:
        """The latest final outcome of every candidate; of one device or of all, of workloads named ``op`` or of all."""
        workloads: dict[str, Workload | None] = {}
        devices: dict[str, Device | None] = {}
        for row in self._query(queries.TRAINING, {"device": device.digest if device is not None else None, "op": op}):
            workload = self._memoized(workloads, row, "workload", read_workload)
            where = self._memoized(devices, row, "device", read_device)
            if workload is None or where is None:
                continue
            candidate = self._understood(f"measurement {row['id']}", partial(read_candidate, row))
            outcome = self._understood(f"measurement {row['id']}", partial(read_outcome, row))
            if candidate is not None and outcome is not None:
                yield TrainingRow(workload, candidate, where.digest, outcome, bool(row["is_default"]), where)

    # Inside

    def _pick(self, workload_id: int, device_id: int, accept: Accept) -> Winner | None:
        for row in self._query(queries.CONTENDERS, {"workload_id": workload_id, "device_id": device_id}):
            winner = self._understood(f"winner of workload {workload_id}", partial(read_winner, row))
            if winner is not None and accept(winner.candidate) and (winner.is_default or accept(winner.default)):
                return winner
        return None

    def _latest(
        self, table: str, rows: list[dict[str, Any]], read: Callable[[Mapping[str, Any]], T]
    ) -> dict[str, tuple[Candidate, T]]:
        found: dict[str, tuple[Candidate, T]] = {}
        for row in rows:
            candidate = self._understood(f"{table} {row['id']}", partial(read_candidate, row))
            value = self._understood(f"{table} {row['id']}", partial(read, row))
            if candidate is not None and value is not None:
                found[candidate.digest] = (candidate, value)
        return found

    def _memoized(
        self, known: dict[str, T | None], row: Mapping[str, Any], what: str, read: Callable[[Any, Any], T]
    ) -> T | None:
        digest = row[f"{what}_digest"]
        if digest not in known:
            known[digest] = self._understood(f"{what} {digest}", partial(read, row[f"{what}_spec"], digest))
        return known[digest]

    def _understood(self, what: str, read: Callable[[], T]) -> T | None:
        try:
            return read()
        except (InvalidRecord, ArithmeticError, ValueError, RecursionError) as error:
            self._skip(f"{what}: {error}")
            return None

    def _skip(self, reason: str) -> None:
        warnings.warn(f"tuning log {self.path}: skipped {reason}", LogWarning, stacklevel=4)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        if self.read_only:
            raise LogError(f"tuning log {self.path} was opened read-only")
        with self._lock:
            try:
                with immediate(self._db):
                    yield
            except sqlite3.Error as error:
                raise LogError(f"cannot write to tuning log {self.path}: {error}") from error

    def _query(self, sql: str, parameters: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        # All rows at once: an open cursor would hold a read lock for as long as the caller takes.
        with self._lock:
            try:
                return list(self._db.query(sql, dict(parameters or {})))
            except sqlite3.Error as error:
                raise LogError(f"cannot read tuning log {self.path}: {error}") from error

    def _first(self, sql: str, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
        rows = self._query(sql, parameters)
        return rows[0] if rows else None

    def _insert(self, table: str, **row: Any) -> int:
        key: Any = self._db.table(table).insert(row, pk="id").last_pk
        return int(key)

    def _mark_default(self, workload_id: int, candidate_id: int) -> None:
        row = {"workload_id": workload_id, "candidate_id": candidate_id}
        self._db.table("default_candidate").insert(row, pk=("workload_id", "candidate_id"), ignore=True)

    def _id(self, table: str, digest: str, rest: dict[str, Any]) -> int:
        return int(self._db.table(table).lookup({"digest": digest}, rest))

    def _workload(self, workload: Workload) -> int:
        return self._id("workload", workload.digest, {"op": workload.op, "spec": workload.canonical})

    def _candidate(self, candidate: Candidate) -> int:
        rest = {"dialect": candidate.dialect, "version": candidate.version, "config": candidate.canonical_config}
        return self._id("candidate", candidate.digest, rest)

    def _device(self, device: Device) -> int:
        rest = {
            "kind": device.kind,
            "model": device.model,
            "cores": device.cores,
            "threads": device.threads,
            "spec": canonical_json(device.to_json()),
        }
        return self._id("device", device.digest, rest)

    def _policy(self, policy: Policy) -> int:
        return self._id("policy", policy.digest, {"margin": policy.margin, "spec": policy.canonical})


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
