"""MetaSchedule's design space as candidates: a sampled schedule is a trace of named primitives with its decisions, as JSON."""

from __future__ import annotations

import importlib
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, ModuleType
from typing import Any

from tvm import s_tir
from tvm.s_tir import ScheduleError, Trace

from raftune.dialects.base import BuildError
from raftune.dialects.tvm.lowering.lower import Lowered
from raftune.dialects.tvm.schedule.guard import check_size
from raftune.dialects.tvm.schedule.traces import check_trace
from raftune.dialects.tvm.target import HostTarget

_MAX_JOBS_PER_CORE = 16
_ATTEMPTS_PER_TRACE = 8
# Most of the time of importing the intrinsics goes into those of graphics processors, which no processor's space uses.
_NO_INTRINSICS = ("tvm.s_tir.tensor_intrin.cuda", "tvm.s_tir.tensor_intrin.rocm")


def sample_traces(lowered: Lowered, host: HostTarget, count: int, seed: int) -> list[Any]:
    """Up to ``count`` different traces that TVM's postprocessors accept, the same for the same seed."""
    context = _context(lowered.function, host, seed)
    try:
        spaces = context.generate_design_space()
    except ScheduleError:
        return []  # the rules do not cover every region, such as a product whose rows are then normalized
    rng = random.Random(seed)

    def draw() -> Trace:
        # Without its decisions a trace draws new ones from the schedule's own generator.
        return Trace(list(spaces[rng.randrange(len(spaces))].trace.insts), {})

    return _accepted(lowered, host, context, draw, count, rng)


def vary_traces(lowered: Lowered, host: HostTarget, parents: Sequence[Any], count: int, seed: int) -> list[Any]:
    """The ``parents`` that apply, and up to ``count`` traces, each one or two of MetaSchedule's mutations away from one.

    A parent may be another workload's: tile sizes that do not divide their loops are replaced by TVM.
    """
    context = _context(lowered.function, host, seed)
    traces = []
    for parent in parents:
        with suppress(BuildError):  # a recorded trace that no longer applies has no descendants
            traces.append(_replayed(lowered.function, parent).trace)
    mutators = list(context.space_generator.mutator_probs.items())
    if not traces or not mutators:
        return []
    rng = random.Random(seed)
    from tvm.s_tir.meta_schedule import _ffi_api

    unchanged = iter(traces)

    def mutate() -> Trace | None:
        if (parent := next(unchanged, None)) is not None:
            return parent
        trace = traces[rng.randrange(len(traces))]
        for _ in range(rng.choice((1, 1, 2))):
            (mutator,) = rng.choices([m for m, _ in mutators], [float(weight) for _, weight in mutators])
            # As Mutator.apply, which draws from a generator that nobody can seed.
            trace = _ffi_api.MutatorApply(mutator, trace, rng.randrange(1, 2**30)) or trace
        return trace

    return _accepted(lowered, host, context, mutate, len(traces) + count, rng)


def replay(lowered: Lowered, host: HostTarget, trace: Any) -> Any:
    """The schedule that a trace of :func:`sample_traces` describes; raises :class:`BuildError` if it does not fit."""
    return replay_on(lowered.function, host, trace)


def replay_on(function: Any, host: HostTarget, trace: Any) -> Any:
    """As :func:`replay`, for a function or module whose blocks have the names that the trace has."""
    schedule = _replayed(function, trace)
    try:
        accepted = _postprocess(_context(function, host, 1), schedule)
    except Exception as error:  # as below
        raise BuildError(f"trace cannot be finished: {type(error).__name__}: {str(error)[:500]}") from error
    if not accepted:
        raise BuildError("TVM's postprocessors refuse the trace")
    return schedule


def _replayed(function: Any, trace: Any) -> Any:
    check_trace(trace)
    schedule = _schedule(function, seed=1)
    try:
        Trace.apply_json_to_schedule(trace, schedule)
    except Exception as error:  # TVM raises whatever its checks met: here it becomes a failed candidate
        raise BuildError(f"trace does not apply: {type(error).__name__}: {str(error)[:500]}") from error
    return schedule


def _accepted(
    lowered: Lowered,
    host: HostTarget,
    context: Any,
    propose: Callable[[], Trace | None],
    count: int,
    rng: random.Random,
) -> list[Any]:
    """Different proposals, as JSON, that can be scheduled and are not too much code."""
    seen: set[str] = set()
    found: list[Any] = []
    for _ in range(count * _ATTEMPTS_PER_TRACE):
        if len(found) == count:
            break
        proposal = propose()
        schedule = _schedule(lowered.function, seed=rng.randrange(1, 2**30))
        if proposal is None:
            continue
        try:
            proposal.apply_to_schedule(schedule, remove_postproc=True)
            trace = plain_trace(schedule)
            if repr(trace) in seen or not _postprocess(context, schedule):
                continue
            check_size(schedule.mod, host.lanes())
        except (ScheduleError, BuildError):
            continue  # these decisions do not go together, or ask for too much code: draw again
        seen.add(repr(trace))
        found.append(trace)
    return found


def plain_trace(schedule: Any) -> Any:
    """The schedule's trace as a config holds it: JSON, without what postprocessors did."""
    return _plain(schedule.trace.as_json(remove_postproc=True))


def _schedule(function: Any, seed: int) -> Any:
    return s_tir.Schedule(function, seed=seed, error_render_level="none")


def _postprocess(context: Any, schedule: Any) -> bool:
    schedule.enter_postproc()  # what follows can be told from the decisions in the trace
    return all(step.apply(schedule) for step in context.space_generator.postprocs)


def load() -> None:
    """Import MetaSchedule and its intrinsics once, a second instead of half a minute; every TuneContext does it too."""
    with _cheap_stack(), _without(*_NO_INTRINSICS):
        importlib.import_module("tvm.s_tir.tensor_intrin")
        importlib.import_module("tvm.s_tir.meta_schedule")


def _context(function: Any, host: HostTarget, seed: int) -> Any:
    load()
    from tvm.s_tir import meta_schedule as ms

    rule, post = ms.schedule_rule, ms.postproc
    jobs = _MAX_JOBS_PER_CORE if host.threads > 1 else -1  # -1: no parallel loops
    rules = [
        rule.InlineConstantScalars(),
        rule.AutoInline(
            into_producer=False,
            into_consumer=True,
            inline_const_tensor=True,
            disallow_if_then_else=True,
            require_injective=True,
            require_ordered=True,
            disallow_op=["tirx.exp"],
        ),
        rule.AddRFactor(max_jobs_per_core=_MAX_JOBS_PER_CORE, max_innermost_factor=64),
        rule.MultiLevelTiling(
            structure="SSRSRS",
            max_innermost_factor=64,
            reuse_write=rule.ReuseType(req="may", levels=[1, 2], scope="global"),
        ),
        rule.ParallelizeVectorizeUnroll(
            max_jobs_per_core=jobs,
            max_vectorize_extent=host.lanes() * 4,
            unroll_max_steps=[0, 16, 64, 512],
            unroll_explicit=True,
        ),
        rule.RandomComputeLocation(),
    ]
    postprocs = [post.DisallowDynamicLoop(), post.RewriteParallelVectorizeUnroll(), post.RewriteReductionBlock()]
    mutate = ms.mutator
    mutators = {
        mutate.MutateTileSize(): 0.85,
        mutate.MutateComputeLocation(): 0.05,
        mutate.MutateUnroll(): 0.05,
        **({mutate.MutateParallel(max_jobs_per_core=jobs): 0.05} if jobs > 0 else {}),
    }
    generator = ms.space_generator.PostOrderApply(sch_rules=rules, postprocs=postprocs, mutator_probs=mutators)
    return ms.TuneContext(
        function, target=host.target, space_generator=generator, rand_state=max(1, seed % 2**30), num_threads=1
    )


@contextmanager
def _without(*names: str) -> Iterator[None]:
    """Importing these modules does nothing meanwhile; afterwards it does, as if nobody had asked before."""
    stubs = {name: ModuleType(name) for name in names if name not in sys.modules}
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name, stub in stubs.items():
            if sys.modules.get(name) is stub:
                del sys.modules[name]
            package, _, last = name.rpartition(".")
            if vars(sys.modules.get(package, stub)).get(last) is stub:
                delattr(sys.modules[package], last)


@contextmanager
def _cheap_stack() -> Iterator[None]:
    """TVM's script parser asks ``inspect.stack`` for the callers' variables at every decorator; with source lines, which it
    does not use, importing the tensor intrinsics takes 20 s instead of 3 s.
    """
    original = inspect.stack

    def frames_only(context: int = 1) -> list[inspect.FrameInfo]:
        del context
        found = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            found.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None))
            frame = frame.f_back
        return found

    inspect.stack = frames_only
    try:
        yield
    finally:
        inspect.stack = original


def _plain(value: Any) -> Any:
    """TVM's containers and numbers as Python's own."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, Sequence):
        return [_plain(v) for v in value]
    return _plain(value.value)
