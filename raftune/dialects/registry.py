"""Which dialects there are, which may be used, and in which order: built-in ones and those of the entry-point group."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import entry_points

from raftune.device import target
from raftune.dialects.base import BuildError, Dialect, Kernel
from raftune.pattern import Declared
from raftune.workload import Candidate, Config, Workload

ENTRY_POINT_GROUP = "raftune.dialects"

# PyTorch's own operators: the default that every other candidate must beat, and what runs where nothing is known.
DEFAULT_DIALECT = "aten"

_preference: ContextVar[tuple[str, ...] | None] = ContextVar("raftune_dialects", default=None)
_stand_ins: ContextVar[Mapping[str, Dialect] | None] = ContextVar("raftune_stand_ins", default=None)


class UnknownDialect(LookupError):
    """A dialect was named that is not installed."""


@dataclass(frozen=True, slots=True)
class DialectInfo:
    """One row of ``raftune dialects``."""

    name: str
    version: str
    available: bool
    reason: str


@cache
def installed() -> dict[str, Dialect]:
    """Every installed dialect by name, highest priority first. An entry point that fails to load is a warning, not an error."""
    found: dict[str, Dialect] = {}
    for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda p: p.name):
        try:
            dialect = point.load()()
            found[dialect.name] = dialect
        except Exception as error:  # a third party's code: whatever it raises must not take the others down
            warnings.warn(f"dialect {point.name!r} ({point.value}) failed to load: {error!r}", stacklevel=2)
    return dict(sorted(found.items(), key=lambda item: (-item[1].priority, item[0])))


def get(name: str) -> Dialect:
    """The dialect called ``name``; raises :class:`UnknownDialect` with the installed names."""
    present = _present()
    try:
        return present[name]
    except KeyError:
        raise UnknownDialect(f"unknown dialect {name!r}; installed: {', '.join(present)}") from None


def _present() -> Mapping[str, Dialect]:
    stand_ins = _stand_ins.get()
    return installed() if stand_ins is None else stand_ins


@contextmanager
def standing_in(dialects: Sequence[Dialect]) -> Iterator[None]:
    """Within the block exactly ``dialects``, highest priority first, are there instead of the installed ones."""
    token = _stand_ins.set({dialect.name: dialect for dialect in dialects})
    try:
        yield
    finally:
        _stand_ins.reset(token)


def enabled() -> list[Dialect]:
    """The dialects that may be used now: available ones, narrowed and ordered by :func:`with_dialects`.

    The default dialect is always among them, since a default must exist for every workload.
    """
    names = _preference.get()
    chosen = list(_present()) if names is None else [*names, *([DEFAULT_DIALECT] if DEFAULT_DIALECT not in names else [])]
    return [d for d in map(get, chosen) if _reason_against(d) is None]


def _reason_against(dialect: Dialect) -> str | None:
    """Why a dialect cannot be used for the present target."""
    kind = target().kind
    if kind not in dialect.device_kinds:
        return f"it has kernels for {' and '.join(sorted(dialect.device_kinds))}, not for {kind}"
    return dialect.unavailable()


@contextmanager
def with_dialects(names: Sequence[str]) -> Iterator[None]:
    """Prefer exactly these dialects, in this order, within the block (as RAF's ``with_dialect``)."""
    for name in names:
        get(name)
    token = _preference.set(tuple(dict.fromkeys(names)))
    try:
        yield
    finally:
        _preference.reset(token)


def candidate(dialect: Dialect, config: Config) -> Candidate:
    return Candidate(dialect.name, dialect.version(), dict(config))


def default_candidate(workload: Workload) -> Candidate:
    """What PyTorch would run for the workload: the first candidate of the default dialect."""
    dialect = get(DEFAULT_DIALECT)
    return candidate(dialect, dialect.candidates(workload)[0])


def candidates(workload: Workload) -> list[Candidate]:
    """Every enumerable candidate of the enabled dialects; the default comes first."""
    found = [default_candidate(workload)]
    for dialect in enabled():
        if dialect.supports(workload):
            found.extend(candidate(dialect, config) for config in dialect.candidates(workload))
    return list(dict.fromkeys(found))


def has_alternative(workload: Workload) -> bool:
    """Whether an enabled dialect offers anything besides the default."""
    return any(_offers(dialect, workload) for dialect in enabled())


def patterns() -> list[Declared]:
    """The patterns of the enabled dialects; a match is accepted where its dialect offers something besides the default."""
    return [Declared(pattern, partial(_offers, dialect)) for dialect in enabled() for pattern in dialect.patterns()]


def _offers(dialect: Dialect, workload: Workload) -> bool:
    if dialect.name == DEFAULT_DIALECT:
        return len(dialect.candidates(workload)) > 1
    return dialect.supports(workload)


def build(workload: Workload, chosen: Candidate) -> Kernel:
    """Build ``chosen`` with the installed dialect, after checking that it is here, usable, and of the version it was made with.

    Raises :class:`UnknownDialect` or :class:`BuildError`.
    """
    return _checked(workload, chosen).build(workload, chosen.config)


def load(workload: Workload, chosen: Candidate) -> Kernel:
    """:func:`build` for a compiler, which need not compile what was compiled before (:meth:`Dialect.load`)."""
    return _checked(workload, chosen).load(workload, chosen.config)


def prepare(workload: Workload, chosen: Candidate) -> None:
    """Keep on disk what takes long of building ``chosen``: :func:`load` is quick elsewhere (:meth:`Dialect.prepare`)."""
    _checked(workload, chosen).prepare(workload, chosen.config)


def _checked(workload: Workload, chosen: Candidate) -> Dialect:
    dialect = get(chosen.dialect)
    if (reason := _reason_against(dialect)) is not None:
        raise BuildError(f"dialect {chosen.dialect} is not available: {reason}")
    if dialect.version() != chosen.version:
        raise BuildError(
            f"dialect {chosen.dialect} is version {dialect.version()}, the candidate was made with {chosen.version}"
        )
    if not dialect.supports(workload):
        raise BuildError(f"dialect {chosen.dialect} does not support {workload.op} with these specs")
    return dialect


def describe() -> list[DialectInfo]:
    """Name, version and availability of every installed dialect."""
    rows = []
    for dialect in installed().values():
        reason = _reason_against(dialect)
        rows.append(DialectInfo(dialect.name, dialect.version(), reason is None, reason or ""))
    return rows
