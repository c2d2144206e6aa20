"""MetaSchedule's design space as candidates: a sampled schedule is a trace of named primitives with its decisions, as JSON."""

from __future__ import annotations

import importlib
import inspect
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
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


def sample_traces(lowered: Lowered, host: HostTarget, count: int, seed: int) -> list[Any]:
    """Up to ``count`` different traces that TVM's postprocessors accept, the same for the same seed."""
    try:
        spaces = _context(lowered, host, seed).generate_design_space()
    except ScheduleError:
        return []  # the rules do not cover every region, such as a product whose rows are then normalized
    rng = random.Random(seed)
    found: dict[str, Any] = {}
    for _ in range(count * _ATTEMPTS_PER_TRACE):
        if len(found) == count:
            break
        space = spaces[rng.randrange(len(spaces))]
        schedule = _schedule(lowered, seed=rng.randrange(1, 2**30))
        try:
            # Without its decisions a trace draws new ones from the schedule's own generator.
            Trace(list(space.trace.insts), {}).apply_to_schedule(schedule, remove_postproc=True)
            trace = _plain(schedule.trace.as_json(remove_postproc=True))
            if repr(trace) in found or not _postprocess(lowered, host, schedule):
                continue
            check_size(schedule.mod, host.lanes())
        except (ScheduleError, BuildError):
            continue  # these decisions do not go together, or ask for too much code: draw again
        found[repr(trace)] = trace
    return list(found.values())


def replay(lowered: Lowered, host: HostTarget, trace: Any) -> Any:
    """The schedule that a trace of :func:`sample_traces` describes; raises :class:`BuildError` if it does not fit."""
    check_trace(trace)
    schedule = _schedule(lowered, seed=1)
    try:
        Trace.apply_json_to_schedule(trace, schedule)
        accepted = _postprocess(lowered, host, schedule)
    except Exception as error:  # TVM raises whatever its checks met: here it becomes a failed candidate
        raise BuildError(f"trace does not apply: {type(error).__name__}: {str(error)[:500]}") from error
    if not accepted:
        raise BuildError("TVM's postprocessors refuse the trace")
    return schedule


def _schedule(lowered: Lowered, seed: int) -> Any:
    return s_tir.Schedule(lowered.function, seed=seed, error_render_level="none")


def _postprocess(lowered: Lowered, host: HostTarget, schedule: Any) -> bool:
    return all(step.apply(schedule) for step in _context(lowered, host, 1).space_generator.postprocs)


def load() -> None:
    """Import MetaSchedule and its intrinsics once, some seconds instead of half a minute; every TuneContext does it too."""
    with _cheap_stack():
        importlib.import_module("tvm.s_tir.tensor_intrin")
        importlib.import_module("tvm.s_tir.meta_schedule")


def _context(lowered: Lowered, host: HostTarget, seed: int) -> Any:
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
    generator = ms.space_generator.PostOrderApply(sch_rules=rules, postprocs=postprocs, mutator_probs={})
    return ms.TuneContext(
        lowered.function, target=host.target, space_generator=generator, rand_state=max(1, seed % 2**30), num_threads=1
    )


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
