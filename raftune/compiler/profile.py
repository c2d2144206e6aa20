"""Where the time of a compiled step goes: per task, with what the machine could do at most, and what is left to gain."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.fx

from raftune.compiler.eager import kept_state
from raftune.compiler.executor import Program
from raftune.compiler.step import CompiledStep
from raftune.cost_model.flops import bytes_moved, flops
from raftune.dialects import registry
from raftune.dialects.base import BuildError, Kernel
from raftune.dialects.registry import DEFAULT_DIALECT
from raftune.graph import region_of, workload_from_call
from raftune.workload import Workload

_PEAK_TRIES = 12
# A product that fills the vector units, and an array that no cache holds.
_PEAK_SIZE = 1024
_PEAK_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Peaks:
    """The most that this process reached here: float32 arithmetic in GFLOP/s, and memory traffic, read and written, in GB/s."""

    gflops: float
    gbytes: float

    def floor_us(self, workload: Workload) -> float:
        """Microseconds that one call takes at least, from memory: the roofline. A result that a cache holds may beat it."""
        return max(flops(workload) / self.gflops, bytes_moved(workload) / self.gbytes) / 1e3


@dataclass(frozen=True, slots=True)
class Row:
    """One task in the step. Times are milliseconds of one step, over all ``count`` calls; ``share`` is of the whole step.

    ``floor_ms`` is what the roofline allows, ``headroom_ms`` the rest. Without a workload (views, random numbers, factories)
    the row says what it took, and nothing about what it could take.
    """

    workload: Workload | None
    dialect: str
    count: int
    ms: float
    share: float
    gflops: float | None = None
    gbytes: float | None = None
    floor_ms: float | None = None

    @property
    def headroom_ms(self) -> float:
        return 0.0 if self.floor_ms is None else max(0.0, self.ms - self.floor_ms)


@dataclass(frozen=True, slots=True)
class Span:
    """One node of one step: ``start_us`` after the step's start, and how long."""

    name: str
    dialect: str
    start_us: float
    us: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Rows with the most to gain first. ``step_ms`` is the step without the profiler; as all times here, a median."""

    step_ms: float
    peaks: Peaks
    rows: tuple[Row, ...]
    spans: tuple[Span, ...]

    def to_json(self) -> dict[str, Any]:
        rows = [
            {
                "op": "other" if row.workload is None else row.workload.op,
                "digest": None if row.workload is None else row.workload.digest,
                "headroom_ms": row.headroom_ms,
            }
            | {name: value for name, value in asdict(row).items() if name != "workload"}
            for row in self.rows
        ]
        return {"step_ms": self.step_ms, "peaks": asdict(self.peaks), "rows": rows}

    def to_trace(self) -> dict[str, Any]:
        """One step in the trace event format that Perfetto and Chrome read (times in microseconds)."""
        events = [
            {"name": s.name, "cat": s.dialect, "ph": "X", "ts": s.start_us, "dur": s.us, "pid": 0, "tid": 0} for s in self.spans
        ]
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def measure_peaks() -> Peaks:
    """What this process's threads reach here, the best of a dozen tries.

    Arithmetic is that of a large product by whichever dialect does it best: no single library is at its best everywhere.
    """
    a, b = torch.ones(_PEAK_SIZE, _PEAK_SIZE), torch.ones(_PEAK_SIZE, _PEAK_SIZE)
    source, target = torch.ones(_PEAK_BYTES // 8), torch.ones(_PEAK_BYTES // 8)
    product = min(
        _best_ns(partial(kernel, a, b)) for kernel in _products(workload_from_call(torch.ops.aten.mm.default, (a, b), {}))
    )
    copy = _best_ns(lambda: target.copy_(source))
    return Peaks(2.0 * _PEAK_SIZE**3 / product, float(_PEAK_BYTES) / copy)


def _products(workload: Workload) -> list[Kernel]:
    """The first candidate of every dialect that has one."""
    first: dict[str, Kernel] = {}
    for candidate in registry.candidates(workload):
        if candidate.dialect not in first:
            with suppress(BuildError):
                first[candidate.dialect] = registry.load(workload, candidate)
    return list(first.values())


def profile_step(step: CompiledStep, inputs: Any, *, rounds: int = 15, peaks: Peaks | None = None) -> Profile:
    """Time every node of the compiled step in ``rounds`` steps; model, optimizer and random state are put back afterwards."""
    peaks = peaks or measure_peaks()
    source = step.graph.source
    bound = step.graph.bind()
    stamps: list[tuple[torch.fx.Node | None, int]] = []

    def tick(node: torch.fx.Node | None) -> None:
        stamps.append((node, time.perf_counter_ns()))

    runs: list[list[tuple[torch.fx.Node | None, int]]] = []
    whole: list[float] = []
    with kept_state(source.model, source.optimizer):
        for _ in range(2):
            step.run_compiled(inputs)
        traced = step.program.traced(tick)
        for _ in range(rounds):
            start = time.perf_counter_ns()
            step.run_compiled(inputs)
            whole.append((time.perf_counter_ns() - start) / 1e6)
            stamps.clear()
            bound.run(lambda *tensors: traced(list(tensors)), inputs)
            runs.append(list(stamps))
    step_ms = statistics.median(whole)
    nodes = [node for node, _ in runs[0][1:] if node is not None]
    taken = [[(after[1] - before[1]) / 1e3 for before, after in pairwise(run)] for run in runs]
    medians = [statistics.median(times) for times in zip(*taken, strict=True)]
    typical = min(range(rounds), key=lambda i: abs(sum(taken[i]) - statistics.median(map(sum, taken))))
    dialects = step.program.dialects
    rows = _rows(nodes, medians, step.program, step_ms, peaks)
    origin = runs[typical][0][1]
    spans = [
        Span(node.name, dialects.get(node, DEFAULT_DIALECT), (begin - origin) / 1e3, us)
        for node, (_, begin), us in zip(nodes, runs[typical], taken[typical], strict=False)
    ]
    return Profile(step_ms, peaks, rows, tuple(spans))


def _rows(nodes: list[torch.fx.Node], us: list[float], program: Program, step_ms: float, peaks: Peaks) -> tuple[Row, ...]:
    times: dict[tuple[Workload | None, str], list[float]] = defaultdict(list)
    bound = {kernel.first: kernel for kernel in program.bound}
    inside = program.dialects.keys() - bound.keys()
    for node, spent in zip(nodes, us, strict=True):
        if node in inside:  # its region ran at the first node
            continue
        if node in bound:
            times[bound[node].workload, bound[node].dialect].append(spent)
            continue
        region = region_of(node)
        times[None if region is None else region.workload, DEFAULT_DIALECT].append(spent)
    rows = []
    for (workload, dialect), calls in times.items():
        ms, count = sum(calls) / 1e3, len(calls)
        if workload is None:
            rows.append(Row(None, dialect, count, ms, ms / step_ms))
            continue
        rows.append(
            Row(
                workload,
                dialect,
                count,
                ms,
                ms / step_ms,
                gflops=count * flops(workload) / ms / 1e6,
                gbytes=count * bytes_moved(workload) / ms / 1e6,
                floor_ms=count * peaks.floor_us(workload) / 1e3,
            )
        )
    return tuple(sorted(rows, key=lambda row: (-row.headroom_ms, -row.ms)))


def _best_ns(call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(_PEAK_TRIES):
        start = time.perf_counter_ns()
        call()
        best = min(best, time.perf_counter_ns() - start)
    return best
