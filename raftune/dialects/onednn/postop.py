"""The element-wise operator at the end of a region, which oneDNN applies to a result while it is still in registers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raftune.workload import Operator

# aten operator -> oneDNN's name for it, and its numbers with their defaults.
_NAMES: dict[str, tuple[str, tuple[float, ...]]] = {
    "aten.relu.default": ("relu", ()),
    "aten.sigmoid.default": ("sigmoid", ()),
    "aten.tanh.default": ("tanh", ()),
    "aten.silu.default": ("swish", ()),
    "aten.gelu.default": ("gelu", ()),
    "aten.hardswish.default": ("hardswish", ()),
    "aten.leaky_relu.default": ("leaky_relu", (0.01,)),
    "aten.hardtanh.default": ("hardtanh", (-1.0, 1.0)),
}


@dataclass(frozen=True, slots=True)
class PostOp:
    """``name`` as torch's oneDNN operators call it (``none`` for nothing); ``algorithm`` tells the two gelus apart."""

    name: str
    scalars: tuple[float, ...] = ()
    algorithm: str = ""

    @staticmethod
    def of(operator: Operator | None) -> PostOp:
        """``operator`` is ``None`` or one of :data:`raftune.dialects.epilogue.ACTIVATIONS`."""
        if operator is None:
            return PostOp("none")
        name, defaults = _NAMES[operator.op]
        given = [float(arg) for arg in operator.args[1:] if isinstance(arg, int | float)]
        approximate = dict(operator.kwargs).get("approximate", "none") if name == "gelu" else ""
        return PostOp(name, (*given, *defaults[len(given) :]), str(approximate))

    @property
    def arguments(self) -> tuple[str, list[Any], str]:
        """The trailing arguments of torch's pointwise operators."""
        return self.name, list(self.scalars), self.algorithm
