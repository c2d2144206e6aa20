"""The ``tvm`` dialect: operators lowered to TVM and compiled with LLVM for this processor."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version
from typing import Any, ClassVar

from raftune.dialects.base import BuildError, Dialect, Kernel, Unsupported
from raftune.dialects.chains import PRODUCTS, SCALES
from raftune.dialects.epilogue import ACTIVATIONS, PATTERNS
from raftune.dialects.tvm import library
from raftune.dialects.tvm.kernel import make_kernel
from raftune.dialects.tvm.layout import fits, is_permuted_dense
from raftune.dialects.tvm.lowering import registry
from raftune.dialects.tvm.schedule.config import MatmulTiling, default_tiling, tilings
from raftune.dialects.tvm.schedule.traces import check_trace, trace_features
from raftune.dialects.tvm.target import host_processor, vector_bytes
from raftune.dialects.tvm.team import has_team, join_kept_team, join_team
from raftune.pattern import ANY, Pattern, op
from raftune.workload import Candidate, Config, In, Operator, Workload

_DTYPES = frozenset({"float32", "float64", "int64", "int32", "int16", "int8", "uint8", "bool"})
_ITEMSIZE = {"float32": 4, "float64": 8}
# To be raised when kernels come to mean something else, so that what was measured of them before is not taken for them. 2: data
# at any address, amax and amin keep NaN, erf reaches one.
_LOWERING = 2
# Waking the thread pool costs some microseconds; less work than this is done by the calling thread.
_PARALLEL_WORK = 32768
# What the loop that stores a product's tiles may do to them on the way, forward and backward.
_ACTIVATIONS_BACKWARD = (
    "aten.gelu_backward.default",
    "aten.sigmoid_backward.default",
    "aten.silu_backward.default",
    "aten.tanh_backward.default",
    "aten.threshold_backward.default",
)
_RESHAPES = ("aten.view.default", "aten._unsafe_view.default")
_EPILOGUES = frozenset({*ACTIVATIONS, *_ACTIVATIONS_BACKWARD, *SCALES, *_RESHAPES, "aten.add.Tensor"})
_BACKWARD = Pattern(op(*_ACTIVATIONS_BACKWARD)(op(*PRODUCTS)(), ANY))
_KEYS = {
    "default": {"schedule"},
    "tiled": {"schedule", "tile_m", "tile_n", "pack", "order", "unroll_k"},
    "trace": {"schedule", "trace"},
}


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
        specs = (*workload.inputs, *workload.results)
        if workload.mutates or not workload.outputs:
            return False
        # The hand schedule tiles a product for what is then done to its elements; with others it would be a plain loop nest.
        if any(operator.op in PRODUCTS for operator in workload.operators) and not _is_product(workload):
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
        return (PATTERNS[0], _BACKWARD)

    def candidates(self, workload: Workload) -> Sequence[Config]:
        configs: list[Config] = [{"schedule": "default"}]
        if (size := product_size(workload)) is not None:
            m, n, itemsize = size
            rows = _has_rows(workload)
            # Without a packed panel, vectors of a transposed operand would be gathered an element at a time.
            configs += [t.to_config() for t in tilings(m, n, vector_bytes() // itemsize, itemsize) if t.pack or rows]
        return configs

    def sample(self, workload: Workload, count: int, seed: int) -> Sequence[Config]:
        """Schedules drawn from MetaSchedule's design space for this processor."""
        from raftune.dialects.tvm import target
        from raftune.dialects.tvm.lowering.builder import Builder
        from raftune.dialects.tvm.lowering.lower import lower
        from raftune.dialects.tvm.schedule.space import sample_traces

        lowered = lower(workload, Builder())
        return [{"schedule": "trace", "trace": t} for t in sample_traces(lowered, target.host_target(), count, seed)]

    def build(self, workload: Workload, config: Config) -> Kernel:
        return make_kernel(workload, self._compiled(workload, config)["main"])

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
        if expected is None or set(config) != expected:
            raise BuildError(f"config {dict(config)!r:.200} is none of the schedules {sorted(_KEYS)} with its parameters")
        size = product_size(workload)
        if kind == "tiled" and size is None:
            raise BuildError(f"a tiled schedule is for a product of floats, not {workload.op}")
        from raftune.dialects.tvm import build, target
        from raftune.dialects.tvm.lowering.builder import Builder
        from raftune.dialects.tvm.lowering.lower import lower
        from raftune.dialects.tvm.schedule.guard import check_size

        host = target.host_target()
        if kind == "trace":
            from raftune.dialects.tvm.schedule.space import replay

            lowered = lower(workload, Builder())
            schedule = replay(lowered, host, config["trace"])
        else:
            from raftune.dialects.tvm.schedule.hand import hand_schedule

            itemsize = max((_ITEMSIZE.get(spec.dtype, 4) for spec in workload.inputs), default=4)
            lanes = host.lanes(itemsize)
            asked = MatmulTiling.from_config(config, itemsize) if kind == "tiled" else None
            lowered = lower(workload, Builder(lanes, lambda m, n: asked or default_tiling(m, n, lanes, itemsize)))
            threads = host.threads if _work(workload) >= _PARALLEL_WORK else 1
            schedule = hand_schedule(lowered, lanes=lanes, threads=threads)
        check_size(schedule.mod, host.lanes())
        return build.compile_module(schedule.mod, host)

    def features(self, workload: Workload, config: Config) -> Mapping[str, float]:
        del workload
        if config.get("schedule") == "trace":
            check_trace(config["trace"])
            return {"is_trace": 1.0, **trace_features(config["trace"])}
        numbers = {key: float(value) for key, value in config.items() if isinstance(value, bool | int | float)}
        return {"is_trace": 0.0, "order_mn": float(config.get("order") == "mn"), **numbers}


def product_size(workload: Workload) -> tuple[int, int, int] | None:
    """Rows, columns and element size of the region's product, if it is one of floats (and what is done to its elements)."""
    if not _is_product(workload):
        return None
    operator: Operator = workload.operators[0]
    first = PRODUCTS[operator.op]
    left, right = operator.args[first], operator.args[first + 1]
    if not (isinstance(left, In) and isinstance(right, In)):
        return None
    spec = workload.inputs[left.index]
    if spec.dtype not in _ITEMSIZE:
        return None
    return spec.shape[-2], workload.inputs[right.index].shape[-1], _ITEMSIZE[spec.dtype]


def _is_product(workload: Workload) -> bool:
    """Whether the region is a product, of which each element may then go on by itself."""
    product, *rest = workload.operators
    if product.op not in PRODUCTS or len(workload.outputs) != 1 or workload.outputs[0].node != len(rest):
        return False
    if not rest:
        return True
    first = PRODUCTS[product.op]
    left, right = product.args[first], product.args[first + 1]
    if not (isinstance(left, In) and isinstance(right, In) and all(operator.op in _EPILOGUES for operator in rest)):
        return False
    rows, columns = workload.inputs[left.index], workload.inputs[right.index].shape[-1]
    stored = workload.results[0]
    return stored.shape[-1:] == (columns,) and stored.numel * rows.shape[-1] == rows.numel * columns


def _has_rows(workload: Workload) -> bool:
    """Whether the rows of the right operand of a product are contiguous."""
    right = workload.operators[0].args[PRODUCTS[workload.operators[0].op] + 1]
    return isinstance(right, In) and workload.inputs[right.index].stride[-1] == 1


def _work(workload: Workload) -> int:
    """Elements touched, or multiplications of a product over the vector width: about what one thread does in as many steps."""
    elements = sum(spec.numel for spec in (*workload.inputs, *workload.results))
    size = product_size(workload)
    if size is None:
        return elements
    left = workload.operators[0].args[PRODUCTS[workload.operators[0].op]]
    depth = workload.inputs[left.index].shape[-1] if isinstance(left, In) else 1
    return workload.results[0].numel * depth // vector_bytes()


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
