"""The ``tvm`` dialect: operators lowered to TVM and compiled with LLVM for this processor."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version
from typing import Any, ClassVar

from raftune.dialects.base import BuildError, Dialect, Kernel, Unsupported
from raftune.dialects.chains import PRODUCTS
from raftune.dialects.epilogue import PATTERNS
from raftune.dialects.tvm import library, scatter, tiles, update
from raftune.dialects.tvm.kernel import make_kernel
from raftune.dialects.tvm.layout import fits, is_permuted_dense
from raftune.dialects.tvm.lowering import registry
from raftune.dialects.tvm.schedule.config import COLUMNS, MatmulTiling, default_tiling
from raftune.dialects.tvm.schedule.trace_features import trace_features
from raftune.dialects.tvm.target import host_processor, vector_bytes
from raftune.dialects.tvm.team import has_team, join_kept_team, join_team
from raftune.dialects.tvm.tiles import ACTIVATIONS_BACKWARD, Tiled
from raftune.pattern import ANY, Pattern, op
from raftune.workload import Candidate, Config, Workload

_DTYPES = frozenset({"float32", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"})
_ITEMSIZE = {"float32": 4, "float64": 8}
# To be raised when kernels come to mean something else, so that what was measured of them before is not taken for them. 2: data
# at any address, amax and amin keep NaN, erf reaches one. 3: rows that are merged have nothing between them.
_LOWERING = 3
# Waking the thread pool costs some microseconds; less work than this is done by the calling thread.
_PARALLEL_WORK = 32768
_BACKWARD = Pattern(op(*ACTIVATIONS_BACKWARD)(op(*PRODUCTS)(), ANY))
_TILE_KEYS = {"schedule", "tile_m", "tile_n", "pack", "order", "unroll_k"}
_KEYS = {"default": {"schedule"}, "tiled": _TILE_KEYS, "trace": {"schedule", "trace"}}


class TvmDialect(Dialect):
    """Candidates: ``default`` (hand schedule), ``tiled`` (its parameters given), ``trace`` (a MetaSchedule trace)."""

    name: ClassVar[str] = "tvm"
    priority: ClassVar[int] = 20

    def version(self) -> str:
        return _version()

    def unavailable(self) -> str | None:
        return _unavailable()

    def warm_up(self) -> None:
        """Import TVM with MetaSchedule: some seconds."""
        from raftune.dialects.tvm.schedule import space

        space.load()

    def supports(self, workload: Workload) -> bool:
        if _direct(workload) is not None:
            return True
        specs = (*workload.inputs, *workload.results)
        if workload.mutates or not workload.outputs:
            return False
        if tiles.has_core(workload) and not tiles.is_tileable(workload):
            return False
        if not all(spec.dtype in _DTYPES and fits(spec) for spec in specs):
            return False
        if not all(is_permuted_dense(spec) for spec in workload.results):
            return False
        for operator in workload.operators:
            lowering = registry.find(operator.op)
            if lowering is None or not lowering.check(workload, operator):
                return False
        return True

    def patterns(self) -> Sequence[Pattern]:
        return (*PATTERNS, _BACKWARD)

    def candidates(self, workload: Workload) -> Sequence[Config]:
        configs: list[Config] = [{"schedule": "default"}]
        if (tiled := Tiled.of(workload)) is not None:
            configs += tiled.configs(vector_bytes() // tiled.itemsize)
        return configs

    def sample(self, workload: Workload, count: int, seed: int) -> Sequence[Config]:
        """Schedules drawn from MetaSchedule's design space for this processor."""
        if _direct(workload) is not None:
            return ()
        from raftune.dialects.tvm import target
        from raftune.dialects.tvm.lowering.builder import Builder
        from raftune.dialects.tvm.lowering.lower import lower
        from raftune.dialects.tvm.schedule.space import sample_traces

        lowered = lower(workload, Builder())
        return [{"schedule": "trace", "trace": t} for t in sample_traces(lowered, target.host_target(), count, seed)]

    def vary(self, workload: Workload, parents: Sequence[Config], count: int, seed: int) -> Sequence[Config]:
        """The traces among ``parents``, with tile sizes that fit here, and schedules a mutation or two away from them."""
        if _direct(workload) is not None:
            return ()
        from raftune.dialects.tvm import target
        from raftune.dialects.tvm.lowering.builder import Builder
        from raftune.dialects.tvm.lowering.lower import lower
        from raftune.dialects.tvm.schedule.space import vary_traces

        traces = [config["trace"] for config in parents if config.get("schedule") == "trace"]
        found = vary_traces(lower(workload, Builder()), target.host_target(), traces, count, seed)
        return [{"schedule": "trace", "trace": trace} for trace in found]

    def build(self, workload: Workload, config: Config) -> Kernel:
        return make_kernel(workload, self._compiled(workload, config)["main"])

    def prepare(self, workload: Workload, config: Config) -> None:
        name = library.name_of(workload, Candidate(self.name, self.version(), config), host_processor())
        if not library.is_kept(name):
            library.keep(name, self._compiled(workload, config).mod)

    def load(self, workload: Workload, config: Config) -> Kernel:
        name = library.name_of(workload, Candidate(self.name, self.version(), config), host_processor())
        if _can_run_kept() and (kept := library.loaded(name)) is not None:
            return make_kernel(workload, kept("main"))
        compiled = self._compiled(workload, config)
        library.keep(name, compiled.mod)
        return make_kernel(workload, compiled["main"])

    def _compiled(self, workload: Workload, config: Config) -> Any:
        kind = config.get("schedule")
        if not self.supports(workload):
            raise Unsupported(f"no lowering to TVM for {workload.op} with these specs")
        expected = _KEYS.get(kind) if isinstance(kind, str) else None
        tiled = Tiled.of(workload)
        if kind == "tiled" and tiled is not None and tiled.convolution:
            expected = _TILE_KEYS | {"columns"}
        if expected is None or set(config) != expected:
            raise BuildError(f"config {dict(config)!r:.200} is none of the schedules {sorted(_KEYS)} with its parameters")
        if kind == "tiled" and tiled is None:
            raise BuildError(f"a tiled schedule is for a product or convolution of floats, not {workload.op}")
        from raftune.dialects.tvm import build, target

        if (direct := _direct(workload)) is not None:
            if kind != "default":
                raise BuildError(f"{workload.op} has the default schedule only, not {kind!r}")
            host = target.host_target()
            threads = host.threads if tiles.elements(workload) >= _PARALLEL_WORK else 1
            return build.compile_module(direct(workload, host, threads), host)
        from raftune.dialects.tvm.lowering.builder import Builder
        from raftune.dialects.tvm.lowering.lower import lower
        from raftune.dialects.tvm.schedule.guard import check_size

        host = target.host_target()
        if kind == "trace":
            from raftune.dialects.tvm.schedule.space import replay

            schedule = replay(lower(workload, Builder()), host, config["trace"])
        else:
            from raftune.dialects.tvm.schedule.hand import hand_schedule

            itemsize = max((_ITEMSIZE.get(spec.dtype, 4) for spec in workload.inputs), default=4)
            lanes = host.lanes(itemsize)
            lowered = lower(workload, Builder(lanes, _tiling(config, tiled, lanes, itemsize), _columns(config)))
            threads = host.threads if _work(workload, tiled) >= _PARALLEL_WORK else 1
            schedule = hand_schedule(lowered, lanes=lanes, threads=threads)
        check_size(schedule.mod, host.lanes())
        return build.compile_module(schedule.mod, host)

    def features(self, workload: Workload, config: Config) -> Mapping[str, float]:
        del workload
        if config.get("schedule") == "trace":
            return {"is_trace": 1.0, **trace_features(config["trace"])}
        numbers = {key: float(value) for key, value in config.items() if isinstance(value, bool | int | float)}
        return {"is_trace": 0.0, "order_mn": float(config.get("order") == "mn"), **numbers}


def _direct(workload: Workload) -> Callable[[Workload, Any, int], Any] | None:
    """What makes the TIR of a workload that tensor expressions cannot say: it writes in place, or where its data says."""
    return next((kind.module for kind in (update, scatter) if kind.supports(workload)), None)


def _tiling(config: Config, tiled: Tiled | None, lanes: int, itemsize: int) -> Callable[[int, int], MatmulTiling]:
    """How the products of a workload are tiled: as the config says, or by default."""
    if config["schedule"] != "tiled":
        return lambda m, n: default_tiling(m, n, lanes, itemsize)
    asked = MatmulTiling.from_config(config, itemsize)
    if tiled is not None and tiled.convolution:
        return lambda m, n: asked.fitted(m, n, lanes, itemsize)
    return lambda m, n: asked


def _columns(config: Config) -> str | None:
    columns = config.get("columns")
    if columns is not None and columns not in COLUMNS:
        raise BuildError(f"columns must be one of {COLUMNS}, not {columns!r}")
    return columns


def _work(workload: Workload, tiled: Tiled | None) -> int:
    """Elements touched, or multiplications of a product over the vector width: about what one thread does in as many steps."""
    return tiles.elements(workload) if tiled is None else tiled.work // vector_bytes()


def _can_run_kept() -> bool:
    """Whether what kernels from disk call is there; TVM, once it has been imported, has it, and its threads are PyTorch's."""
    if sys.modules.get("tvm") is None:
        return join_kept_team()
    from raftune.dialects.tvm import target

    join_team(target.host_target().target)
    return True


@cache
def _version() -> str:
    # Kernels on TVM's own threads and kernels on PyTorch's are not equally fast: their records are kept apart.
    threads = "+openmp" if has_team() else ""
    try:
        return f"{distribution_version('apache-tvm')}+ffi{distribution_version('apache-tvm-ffi')}{threads}+lowering{_LOWERING}"
    except PackageNotFoundError:
        return "absent"


@cache
def _unavailable() -> str | None:
    if importlib.util.find_spec("tvm") is None or importlib.util.find_spec("tvm_ffi") is None:
        return "apache-tvm is not installed (pip install apache-tvm)"
    return None
