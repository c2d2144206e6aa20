"""The contract of an operator dialect: one family of implementations that the tuner can enumerate, build and choose."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from raftune.pattern import Pattern
from raftune.workload import Config, Workload

Kernel = Callable[..., Any]
"""Called with one tensor per ``workload.inputs``; returns fresh tensors for ``workload.outputs`` (bare if exactly one)."""


class BuildError(RuntimeError):
    """A candidate could not be built: a compiler failed, or the config does not fit the workload."""


class BuildImpossible(BuildError):
    """Nothing can be built here: a compiler is missing, or the disk is full. It says nothing about the candidate."""


class Unsupported(BuildError):
    """The dialect cannot run this workload, or this config of it, on this device."""


class Dialect(ABC):
    """One family of implementations. Subclasses keep no per-workload state; constructing one imports nothing heavy.

    ``name`` is what logs and the command line call it. ``priority`` orders dialects where nothing was measured (higher first).
    ``takes_graphs`` says that it compiles regions of any number of operators: a whole step by it alone then takes part in the
    step's race. ``device_kinds`` are the kinds of device that it has kernels for.
    """

    name: ClassVar[str]
    priority: ClassVar[int]
    takes_graphs: ClassVar[bool] = False
    device_kinds: ClassVar[frozenset[str]] = frozenset({"cpu"})

    @abstractmethod
    def version(self) -> str:
        """The version that a measurement of this dialect is true for, found without importing the backend."""

    def unavailable(self) -> str | None:
        """Why the dialect cannot be used on this machine, in one line; ``None`` if it can."""
        return None

    @abstractmethod
    def supports(self, workload: Workload) -> bool:
        """Whether :meth:`build` can be expected to work for some config. Cheap, decides from the specs alone."""

    def patterns(self) -> Sequence[Pattern]:
        """Groups of operators for which the dialect has kernels: each match that it then supports becomes a region to tune."""
        return ()

    @abstractmethod
    def candidates(self, workload: Workload) -> Sequence[Config]:
        """The enumerable configs, most promising first: cheap, deterministic, without building or importing the backend.

        A config describes itself: names and sizes, never an index into a list that the library may reorder.
        """

    def sample(self, workload: Workload, count: int, seed: int) -> Sequence[Config]:
        """Up to ``count`` further configs from a space too large to enumerate (schedules). May be slow: runs in a worker."""
        del workload, count, seed
        return ()

    def vary(self, workload: Workload, parents: Sequence[Config], count: int, seed: int) -> Sequence[Config]:
        """The ``parents``, which may be another workload's, as they apply to this one; then up to ``count`` configs near them.

        May be slow: runs in a worker.
        """
        del workload, parents, count, seed
        return ()

    @abstractmethod
    def build(self, workload: Workload, config: Config) -> Kernel:
        """Compile the candidate. ``config`` may be a stranger's: check it, and raise :class:`BuildError` with the value.

        The kernel may rely on inputs having exactly the dtypes, shapes and strides of ``workload.inputs``. It returns the
        shapes, dtypes and strides that PyTorch's own operator returns, in memory that it neither keeps nor returns again.
        """

    def prepare(self, workload: Workload, config: Config) -> None:
        """Keep on disk what makes :meth:`load` quick in another process; as :meth:`build`, but nothing is run.

        A dialect that does nothing here, as by default, is not asked to build ahead.
        """
        del workload, config

    def prepare_all(self, candidates: Sequence[tuple[Workload, Config]]) -> list[BuildError | None]:
        """:meth:`prepare` for many, which a compiler may take together; for each what it raised, or ``None``."""
        results: list[BuildError | None] = []
        for workload, config in candidates:
            try:
                self.prepare(workload, config)
                results.append(None)
            except BuildError as error:
                results.append(error)
        return results

    def load(self, workload: Workload, config: Config) -> Kernel:
        """:meth:`build` for a compiler: may load from disk what another process compiled, and keep there what it compiles."""
        return self.build(workload, config)

    def warm_up(self) -> None:
        """Do what is done once (imports, precompiled headers), before the process builds the dialect's first candidate."""
        return

    def features(self, workload: Workload, config: Config) -> Mapping[str, float]:
        """Numbers that tell this config from its siblings, for the cost model (names must be stable within a version)."""
        del workload, config
        return {}
