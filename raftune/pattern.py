"""Patterns: which groups of operators a library has kernels for, written as a small graph from its last operator.

::

    linear = op("aten.mm.default", "aten.addmm.default")()
    biased = op("aten.add.Tensor", commutative=True)(linear, ANY)
    Pattern(op("aten.relu.default")(either(biased, linear)))

A pattern only names candidates for a region. Shapes, dtypes and the meaning of the views in between are for the dialect's
``supports`` to judge. Nothing of raftune and nothing of torch is imported here, besides what describes a workload.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from raftune.workload import Workload


@dataclass(frozen=True, slots=True)
class Wildcard:
    """An operand that is no member of the region: any value, or only a plain number."""

    number: bool


ANY = Wildcard(number=False)
NUMBER = Wildcard(number=True)


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """A member: a call of one of the overloads ``names`` whose leading arguments match ``operands``.

    Further arguments may be anything. A member is found through views and through the unpacking of several results. One object
    that stands in two places of a pattern means one node; two objects mean two nodes.
    """

    names: frozenset[str]
    operands: tuple[Operand, ...]
    commutative: bool


@dataclass(frozen=True, slots=True, eq=False)
class Either:
    """The first of ``alternatives`` that matches and is accepted: the one with most members belongs first."""

    alternatives: tuple[Operand, ...]


Operand = Wildcard | Op | Either


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """A region by its ``last`` operator, with the readers of its members that stand ``beside`` it, each if it is there."""

    last: Op | Either
    beside: tuple[Op, ...] = ()


@dataclass(frozen=True, slots=True)
class Declared:
    """A pattern, and whether who declared it has a kernel for a workload that matched."""

    pattern: Pattern
    accepts: Callable[[Workload], bool]


def op(*names: str, commutative: bool = False) -> Callable[..., Op]:
    """A maker of members from their operands; with ``commutative`` the first two operands may stand in either order."""
    return lambda *operands: Op(frozenset(names), operands, commutative)


def either(*alternatives: Operand) -> Either:
    return Either(alternatives)
