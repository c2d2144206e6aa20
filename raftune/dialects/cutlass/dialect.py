"""CUTLASS: our own templates over its headers, compiled for what a config chooses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from raftune.device import target
from raftune.dialects.base import BuildError, Dialect, Kernel, Unsupported
from raftune.dialects.cutlass import compile as compiler
from raftune.dialects.cutlass import toolchain
from raftune.dialects.cutlass.enumerate import Gpu, convolution_schedules, gemm_schedules
from raftune.dialects.cutlass.kernel import Operands, convolution_kernel, gemm_kernel
from raftune.dialects.cutlass.library import Library
from raftune.dialects.cutlass.problem import BACKWARD_PATTERN, ConvolutionProblem, GemmProblem, problem_of, rearranged
from raftune.dialects.cutlass.schema import Sm80Convolution, Sm80Gemm, Sm90Gemm, parse, to_config
from raftune.dialects.cutlass.spec import KernelSpec, convolution_spec, gemm_spec
from raftune.dialects.epilogue import PATTERNS
from raftune.pattern import Pattern
from raftune.workload import Config, Workload

_OLDEST = 80


class CutlassDialect(Dialect):
    """Products and convolutions for the tensor cores of compute capability 8.0 and later, with what follows them fused in.

    The config of a backward with two gradients has one schedule for each: ``{"input": ..., "weight": ...}``.
    """

    name: ClassVar[str] = "cutlass"
    priority: ClassVar[int] = 80
    device_kinds: ClassVar[frozenset[str]] = frozenset({"cuda"})

    def version(self) -> str:
        return f"{toolchain.CUTLASS}+{toolchain.templates_digest()}"

    def unavailable(self) -> str | None:
        gpu = _gpu()
        if gpu is not None and gpu.capability < _OLDEST:
            return f"its kernels need compute capability {_OLDEST / 10}, the device has {gpu.capability / 10}"
        return None

    def supports(self, workload: Workload) -> bool:
        return problem_of(workload) is not None

    def patterns(self) -> Sequence[Pattern]:
        return (*PATTERNS, BACKWARD_PATTERN)

    def candidates(self, workload: Workload) -> Sequence[Config]:
        problem, gpu = problem_of(workload), _gpu()
        if problem is None or gpu is None:
            return ()
        if isinstance(problem, GemmProblem):
            return [to_config(schedule) for schedule in gemm_schedules(problem, gpu)]
        found = {name: [to_config(s) for s in convolution_schedules(problem, name, gpu)] for name in problem.passes}
        if len(found) == 1:
            return next(iter(found.values()))
        # One gradient's schedule at a time beside the most promising of the other.
        first, second = found["input"], found["weight"]
        pairs = [(a, second[0]) for a in first if second] + [(first[0], b) for b in second[1:] if first]
        return [{"input": a, "weight": b} for a, b in pairs]

    def prepare(self, workload: Workload, config: Config) -> None:
        for spec in kernels(workload, config):
            compiler.compiled(spec, _arch(spec))

    def prepare_all(self, candidates: Sequence[tuple[Workload, Config]]) -> list[BuildError | None]:
        """Several kernels a source file, and several compilers at once."""
        wanted: list[list[KernelSpec] | BuildError] = []
        by_arch: dict[str, list[KernelSpec]] = {}
        for workload, config in candidates:
            try:
                specs = kernels(workload, config)
                for spec in specs:
                    by_arch.setdefault(_arch(spec), []).append(spec)
                wanted.append(specs)
            except BuildError as error:
                wanted.append(error)
        made = {spec: result for arch, specs in by_arch.items() for spec, result in compiler.compile_all(specs, arch).items()}
        return [specs if isinstance(specs, BuildError) else _first_error(made, specs) for specs in wanted]

    def build(self, workload: Workload, config: Config) -> Kernel:
        problem = _problem(workload)
        if isinstance(problem, GemmProblem):
            schedule = parse(config)
            spec, a, b = gemm_spec(problem, schedule, workload.inputs)
            library = Library(compiler.compiled(spec, _arch(spec)), spec)
            slices = schedule.slices if isinstance(schedule, Sm80Gemm) else 1
            return gemm_kernel(workload, problem, Operands(a, b), library, slices)
        passes = {}
        for name, spec in _passes(problem, config).items():
            assert isinstance(spec.schedule, Sm80Convolution)
            passes[name] = (Library(compiler.compiled(spec, _arch(spec)), spec), spec.schedule.slices)
        return convolution_kernel(workload, problem, passes)

    def features(self, workload: Workload, config: Config) -> Mapping[str, float]:
        """Logarithms (base 2) of tiles, waves and what is rearranged; the generation of the kernel."""
        problem = problem_of(workload)
        if problem is None:
            return {}
        found = {"rearranged": math.log2(1 + rearranged(problem, workload.inputs))}
        parts = [config] if "kernel" in config else [part for part in config.values() if isinstance(part, Mapping)]
        for part in parts:
            schedule = parse(part)
            prefix = "" if len(parts) == 1 else "input " if part is config.get("input") else "weight "
            found[f"{prefix}block"] = math.log2(math.prod(schedule.tile[:2]))
            found[f"{prefix}aspect"] = math.log2(schedule.tile[0] / schedule.tile[1])
            found[f"{prefix}wgmma"] = float(isinstance(schedule, Sm90Gemm))
            if isinstance(problem, GemmProblem):
                tiles = math.ceil(problem.m / schedule.tile[0]) * math.ceil(problem.n / schedule.tile[1])
                found["tiles"] = math.log2(problem.batch * tiles)
        return found


def kernels(workload: Workload, config: Config) -> list[KernelSpec]:
    """What has to be compiled for a candidate. Raises :class:`BuildError` for a config that does not fit the workload."""
    problem = _problem(workload)
    if isinstance(problem, GemmProblem):
        return [gemm_spec(problem, parse(config), workload.inputs)[0]]
    return list(_passes(problem, config).values())


def _first_error(made: Mapping[KernelSpec, Path | BuildError], specs: Sequence[KernelSpec]) -> BuildError | None:
    return next((result for spec in specs if isinstance(result := made[spec], BuildError)), None)


def _passes(problem: ConvolutionProblem, config: Config) -> dict[str, KernelSpec]:
    if len(problem.passes) == 1:
        name = problem.passes[0]
        return {name: convolution_spec(problem, parse(config), name)}
    if sorted(config) != sorted(problem.passes) or not all(isinstance(part, Mapping) for part in config.values()):
        raise BuildError(f"config has {sorted(config)!r}: expected one schedule each for {', '.join(problem.passes)}")
    return {name: convolution_spec(problem, parse(config[name]), name) for name in problem.passes}


def _problem(workload: Workload) -> GemmProblem | ConvolutionProblem:
    problem = problem_of(workload)
    if problem is None:
        raise Unsupported(f"there is no CUTLASS template for {workload.op} with these specs")
    return problem


def _gpu() -> Gpu | None:
    device = target()
    capability = device.capability
    return None if capability is None else Gpu(capability, device.cores, "tf32" in device.vector)


def _arch(spec: KernelSpec) -> str:
    """wgmma exists on the very architecture only, which has a name of its own."""
    gpu = _gpu()
    if gpu is None:
        raise Unsupported("CUTLASS's kernels run on CUDA devices; what is tuned for here is the CPU")
    if isinstance(spec.schedule, Sm90Gemm):
        if gpu.capability != 90:
            raise Unsupported(f"config kernel={spec.schedule.kernel!r} needs compute capability 9.0, not {gpu.capability / 10}")
        return "sm_90a"
    return f"sm_{gpu.capability}"
