"""Which regions the hand schedule computes in tiles: a product or convolution, and what is done to its elements.

Needs no TVM.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from raftune.dialects.chains import PRODUCTS, SCALES
from raftune.dialects.convolutions import Convolution
from raftune.dialects.epilogue import ACTIVATIONS
from raftune.dialects.tvm.schedule.config import COLUMNS, convolution_tilings, tilings
from raftune.workload import Config, In, Operator, Out, Workload

CONVOLUTIONS = ("aten.convolution.default", "aten.convolution_backward.default")
# What the loop that stores a product's tiles may do to them on the way, forward and backward.
ACTIVATIONS_BACKWARD = (
    "aten.gelu_backward.default",
    "aten.sigmoid_backward.default",
    "aten.silu_backward.default",
    "aten.tanh_backward.default",
    "aten.threshold_backward.default",
)
_RESHAPES = ("aten.view.default", "aten._unsafe_view.default")
_ELEMENTWISE = frozenset({*ACTIVATIONS, *ACTIVATIONS_BACKWARD, *SCALES, "aten.add.Tensor"})
_ITEMSIZE = {"float32": 4, "float64": 8}


@dataclass(frozen=True, slots=True)
class Tiled:
    """``m`` rows by ``n`` columns of elements of ``itemsize`` bytes; ``work`` counts multiply-adds.

    Of a ``convolution`` a config chooses what rows and columns are; ``m`` and ``n`` are its pixels of a line and its channels.
    """

    m: int
    n: int
    itemsize: int
    work: int
    convolution: bool = False
    unpacked: bool = False

    @staticmethod
    def of(workload: Workload) -> Tiled | None:
        """``None`` if the region has no such core of floats, or does something else with it."""
        core = workload.operators[0]
        if core.op in PRODUCTS:
            return _product(workload)
        return _convolution(workload) if core.op in CONVOLUTIONS else None

    def configs(self, lanes: int) -> list[Config]:
        """The parameters to try beside the default's, for ``lanes`` elements a vector."""
        if self.convolution:
            found = convolution_tilings(self.m, self.n, lanes, self.itemsize)
            return [tiling.to_config() | {"columns": columns} for columns in COLUMNS for tiling in found]
        # Without a packed panel, vectors of a transposed operand would be gathered an element at a time.
        return [t.to_config() for t in tilings(self.m, self.n, lanes, self.itemsize) if t.pack or self.unpacked]


def has_core(workload: Workload) -> bool:
    """Whether there is a product or convolution in the region: anything but :class:`Tiled` would be a plain loop nest."""
    return any(operator.op in PRODUCTS or operator.op in CONVOLUTIONS for operator in workload.operators)


def is_tileable(workload: Workload) -> bool:
    """Whether the region is a product or convolution, of which each element may then go on by itself."""
    core, *rest = workload.operators
    if core.op not in PRODUCTS and core.op not in CONVOLUTIONS:
        return False
    if not rest:
        return True
    if len(workload.outputs) != 1 or workload.outputs[0].node != len(rest) or core.op == CONVOLUTIONS[1]:
        return False
    stored = workload.results[0]
    if core.op in CONVOLUTIONS:
        convolution = _alone(workload)
        return (
            convolution is not None
            and all(operator.op in _ELEMENTWISE for operator in rest)
            and stored.shape == (convolution.x.shape[0], convolution.w.shape[0], *convolution.output_spatial)
        )
    first = PRODUCTS[core.op]
    left, right = core.args[first], core.args[first + 1]
    allowed = _ELEMENTWISE | set(_RESHAPES)
    if not (isinstance(left, In) and isinstance(right, In) and all(operator.op in allowed for operator in rest)):
        return False
    rows, columns = workload.inputs[left.index], workload.inputs[right.index].shape[-1]
    return stored.shape[-1:] == (columns,) and stored.numel * rows.shape[-1] == rows.numel * columns


def _product(workload: Workload) -> Tiled | None:
    core: Operator = workload.operators[0]
    if not is_tileable(workload) or len(workload.outputs) != 1:
        return None
    first = PRODUCTS[core.op]
    left, right = core.args[first], core.args[first + 1]
    if not (isinstance(left, In) and isinstance(right, In)):
        return None
    rows, columns = workload.inputs[left.index], workload.inputs[right.index]
    if rows.dtype not in _ITEMSIZE:
        return None
    return Tiled(
        m=rows.shape[-2],
        n=columns.shape[-1],
        itemsize=_ITEMSIZE[rows.dtype],
        work=workload.results[0].numel * rows.shape[-1],
        unpacked=columns.stride[-1] == 1,
    )


def _convolution(workload: Workload) -> Tiled | None:
    convolution = _alone(workload)
    if convolution is None or not is_tileable(workload) or convolution.x.dtype not in _ITEMSIZE:
        return None
    # The larger of the gradients that are used says what is worth trying.
    backward = convolution.mask[0] and not convolution.mask[1]
    line = convolution.x.shape[-1] if backward else convolution.output_spatial[-1]
    channels = convolution.w.shape[1] if backward else convolution.w.shape[0] // convolution.groups
    passes: Sequence[bool] = convolution.mask[:2] if convolution.is_backward else (True,)
    return Tiled(
        line, channels, _ITEMSIZE[convolution.x.dtype], convolution.size // convolution.groups * sum(passes), convolution=True
    )


def _alone(workload: Workload) -> Convolution | None:
    """The convolution of a region without what comes after it."""
    core = workload.operators[0]
    if len(workload.operators) == 1:
        return Convolution.of(workload)
    return Convolution.of(replace(workload, operators=(core,), outputs=(Out(0, 0),)))


def elements(workload: Workload) -> int:
    """Elements read and written."""
    return sum(math.prod(spec.shape) for spec in (*workload.inputs, *workload.results))
