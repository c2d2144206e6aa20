"""The element-wise operator at the end of a region, which oneDNN applies to a result while it is still in registers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from raftune.dialects.base import Kernel
from raftune.workload import Literal, Operator, Out, Workload

# aten operator -> oneDNN's name for it.
_NAMES = {
    "aten.relu.default": "relu",
    "aten.sigmoid.default": "sigmoid",
    "aten.tanh.default": "tanh",
    "aten.silu.default": "swish",
    "aten.gelu.default": "gelu",
}


@dataclass(frozen=True, slots=True)
class PostOp:
    """``name`` as torch's oneDNN operators call it (``none`` for nothing); ``algorithm`` tells the two gelus apart."""

    name: str
    algorithm: str

    @staticmethod
    def none() -> PostOp:
        return PostOp("none", "")

    @property
    def arguments(self) -> tuple[str, list[Any], str]:
        """The trailing arguments of torch's pointwise operators."""
        return self.name, [], self.algorithm

    def after(self, kernel: Kernel) -> Kernel:
        """``kernel`` followed by the operator, for a kernel that cannot fuse it."""
        import torch

        if self.name == "none":
            return kernel
        if self.name == "gelu":
            algorithm = self.algorithm
            return lambda *inputs: torch.ops.aten.gelu_.default(kernel(*inputs), approximate=algorithm)
        in_place: dict[str, Kernel] = {
            "relu": torch.relu_,
            "sigmoid": torch.sigmoid_,
            "tanh": torch.tanh_,
            "swish": torch.ops.aten.silu_.default,
        }
        function = in_place[self.name]
        return lambda *inputs: function(kernel(*inputs))


def split(workload: Workload) -> tuple[Workload, PostOp] | None:
    """A region of an operator and perhaps one element-wise operator after it: the first alone, and the second.

    ``None`` for any other region, and where the first operator's own result is needed as well.
    """
    if len(workload.operators) == 1:
        return workload, PostOp.none()
    if len(workload.operators) != 2 or workload.outputs != (Out(1, 0),):
        return None
    first, second = workload.operators
    if second.op not in _NAMES or second.args != (Out(0, 0),):
        return None
    core = replace(workload, operators=(first,), outputs=(Out(0, 0),))
    return core, PostOp(_NAMES[second.op], _algorithm(second))


def _algorithm(operator: Operator) -> str:
    if operator.op != "aten.gelu.default":
        return ""
    value = dict(operator.kwargs).get("approximate", "none")
    assert not isinstance(value, Literal)
    return str(value)
