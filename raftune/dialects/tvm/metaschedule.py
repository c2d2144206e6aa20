"""MetaSchedule with our log as its database and our cost model as its cost model. Importing this imports TVM.

``with as_metaschedule_database(log): relax.transform.MetaScheduleApplyDatabase()(module)`` lets plain TVM compile from the log:
a function of any origin finds the traces of the workload whose lowering it equals, whatever its blocks are called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import tvm
import tvm_ffi
from tvm import s_tir, tirx
from tvm.ir.utils import derived_object

from raftune.device import Device, current_device
from raftune.dialects.base import BuildError, Unsupported
from raftune.dialects.tvm.dialect import TvmDialect
from raftune.dialects.tvm.lowering.builder import Builder
from raftune.dialects.tvm.lowering.lower import at_any_address, lower
from raftune.dialects.tvm.schedule import space
from raftune.dialects.tvm.target import HostTarget, host_target
from raftune.measurement import Status
from raftune.workload import Candidate, Workload

if TYPE_CHECKING:
    from raftune.log import TuningLog

space.load()
from tvm.s_tir import meta_schedule as ms  # noqa: E402 - importing it without load() takes half a minute


@dataclass(slots=True)
class _Known:
    """A lowered workload of the log, and its traces with their times, fastest first."""

    workload: Workload
    function: Any
    traces: list[tuple[float, Any]] = field(default_factory=list)


def as_metaschedule_database(log: TuningLog, device: Device | None = None) -> Any:
    """The log's traces for ``device`` (this one by default) as a MetaSchedule database, a context manager; TVM only reads it.

    It holds what the log held when this was called. Traces recorded with another version of the dialect are left out.
    """
    host = host_target()
    digest = (device or current_device(host.threads)).digest
    version = TvmDialect().version()
    found: dict[str, _Known] = {}
    for row in log.training_rows():
        trace = row.candidate.config.get("trace")
        seconds = (row.outcome.time_us or 0.0) / 1e6
        if (row.candidate.dialect, row.candidate.version, row.device_digest) != (TvmDialect.name, version, digest):
            continue
        if trace is None or row.outcome.status is not Status.OK or not seconds:
            continue
        known = found.get(row.workload.digest)
        if known is None:
            with suppress(Unsupported, BuildError):  # a workload of an installation that could lower more
                known = found[row.workload.digest] = _Known(row.workload, lower(row.workload, Builder()).function)
        if known is not None:
            known.traces.append((seconds, trace))
    for known in found.values():
        known.traces.sort(key=lambda pair: pair[0])
    return _Database(list(found.values()), host)


class _Index:
    """Finds what a function equals, up to names, alignment and the width of its indices."""

    def __init__(self, known: Sequence[_Known]) -> None:
        self._known: dict[int, list[tuple[Any, _Known]]] = {}
        for one in known:
            normal = _normal(one.function)
            self._known.setdefault(tvm_ffi.structural_hash(normal, map_free_vars=True), []).append((normal, one))

    def find(self, module: Any) -> _Known | None:
        if len(module.functions) != 1:
            return None
        normal = _normal(next(iter(module.functions.values())))
        for other, known in self._known.get(tvm_ffi.structural_hash(normal, map_free_vars=True), ()):
            if tvm_ffi.structural_equal(normal, other, map_free_vars=True):
                return known
        return None


def _normal(function: Any) -> Any:
    narrow = tirx.transform.ForceNarrowIndexToInt32()(tvm.IRModule({"main": function.with_attr("global_symbol", "main")}))
    return at_any_address(narrow["main"]).without_attr("global_symbol")


def _blocks(function: Any) -> list[str]:
    """Names of blocks in the order in which they stand."""
    names: list[str] = []
    tvm_ffi.structural_walk(function.body, (s_tir.SBlock, lambda block: names.append(str(block.name_hint))))
    return names


@derived_object
class _Database(ms.database.PyDatabase):  # type: ignore[misc]  # TVM is untyped
    """Read-only: what TVM's own search commits stays with TVM."""

    def __init__(self, known: list[_Known], host: HostTarget) -> None:
        super().__init__()
        self._index = _Index(known)
        self._known = known
        self._host = host
        self._committed = ms.database.MemoryDatabase()

    def has_workload(self, mod: Any) -> bool:
        return self._index.find(mod) is not None or bool(self._committed.has_workload(mod))

    def commit_workload(self, mod: Any) -> Any:
        return self._committed.commit_workload(mod)

    def commit_tuning_record(self, record: Any) -> None:
        self._committed.commit_tuning_record(record)

    def get_top_k(self, workload: Any, top_k: int) -> list[Any]:
        own = list(self._committed.get_top_k(workload, top_k))
        known = self._index.find(workload.mod)
        if known is not None and len(own) < top_k:
            own += [record for _, record in zip(range(top_k - len(own)), self._records(known, workload), strict=False)]
        return sorted(own, key=lambda record: min(float(s) for s in record.run_secs or [np.inf]))[:top_k]

    def get_all_tuning_records(self) -> list[Any]:
        workloads = [(known, ms.database.Workload(tvm.IRModule({"main": known.function}))) for known in self._known]
        ours = [record for known, workload in workloads for record in self._records(known, workload)]
        return [*self._committed.get_all_tuning_records(), *ours]

    def __len__(self) -> int:
        return len(self._committed) + sum(len(known.traces) for known in self._known)

    def _records(self, known: _Known, workload: Any) -> Iterator[Any]:
        """The traces that still apply, for the blocks of the workload's own function."""
        (function,) = workload.mod.functions.values()
        names = dict(zip(_blocks(known.function), _blocks(function), strict=True))
        (symbol,) = (variable.name_hint for variable in workload.mod.functions)
        for seconds, trace in known.traces:
            with suppress(BuildError):
                schedule = space.replay_on(workload.mod, self._host, _renamed(trace, names, symbol))
                arguments = ms.arg_info.ArgInfo.from_prim_func(function)
                yield ms.database.TuningRecord(schedule.trace, workload, [seconds], self._host.target, arguments)


def _renamed(trace: Any, names: dict[str, str], symbol: str) -> Any:
    """The trace for a function with other names of blocks."""
    instructions, decisions = trace
    return [
        [
            [kind, inputs, [names.get(attributes[0], attributes[0]), symbol] if kind == "GetSBlock" else attributes, outputs]
            for kind, inputs, attributes, outputs in instructions
        ],
        decisions,
    ]


class Model(Protocol):
    """The part of :class:`raftune.cost_model.CostModel` that is asked."""

    def predict(self, workload: Workload, candidates: Sequence[Candidate]) -> Sequence[Any]:
        """Objects with a ``score``, lowest first."""


Learn = Callable[[Workload, Candidate, float | None], None]
"""Told of what TVM measured: seconds, or ``None`` if it failed."""


def as_metaschedule_cost_model(model: Model, workloads: Sequence[Workload], learn: Learn | None = None) -> Any:
    """``model`` for MetaSchedule's own search over the lowered functions of ``workloads``; other functions rate as equals."""
    known = [_Known(workload, lower(workload, Builder()).function) for workload in workloads]
    return _CostModel(model, _Index(known), learn)


@derived_object
class _CostModel(ms.cost_model.PyCostModel):  # type: ignore[misc]  # TVM is untyped
    def __init__(self, model: Model, index: _Index, learn: Learn | None) -> None:
        super().__init__()
        self._model = model
        self._index = index
        self._learn = learn

    def load(self, path: str) -> None:
        """Nothing: the model is stored with its log."""

    def save(self, path: str) -> None:
        """Nothing, as :meth:`load`."""

    def update(self, context: Any, candidates: list[Any], results: list[Any]) -> None:
        known = self._index.find(context.mod)
        if known is None or self._learn is None:
            return
        for candidate, result in zip(candidates, results, strict=True):
            seconds = None if result.run_secs is None else float(np.median([float(s) for s in result.run_secs]))
            self._learn(known.workload, _candidate(candidate), seconds)

    def predict(self, context: Any, candidates: list[Any]) -> npt.NDArray[np.float64]:
        known = self._index.find(context.mod)
        if known is None:
            return np.zeros(len(candidates))
        predictions = self._model.predict(known.workload, [_candidate(candidate) for candidate in candidates])
        # TVM wants the best to be the largest, and as a score that is positive: the throughput over the default's.
        return np.exp([-float(prediction.score) for prediction in predictions])


def _candidate(measured: Any) -> Candidate:
    config = {"schedule": "trace", "trace": space.plain_trace(measured.sch)}
    return Candidate(TvmDialect.name, TvmDialect().version(), config)
