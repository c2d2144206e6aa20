"""A compiled function as a callable over torch tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from raftune.dialects.base import Kernel
from raftune.dialects.torch_ops import dtype_of
from raftune.dialects.tvm.layout import DenseView, dense_view, stored_axes
from raftune.workload import TensorSpec, Workload


def make_kernel(workload: Workload, function: Callable[..., None]) -> Kernel:
    """Wrap the compiled function: dense views of the inputs, fresh outputs in PyTorch's strides."""
    takes = [None if view.is_whole else _viewer(view) for view in map(dense_view, workload.inputs)]
    makes = [_maker(spec, stored_axes(spec)) for spec in workload.results]
    if len(makes) == 1 and makes[0][1] is None:
        make = makes[0][0]
        if not any(takes):

            def direct(*inputs: torch.Tensor) -> torch.Tensor:
                output = make()
                function(*inputs, output)
                return output

            return direct

        def viewed(*inputs: torch.Tensor) -> torch.Tensor:
            output = make()
            function(*[x if take is None else take(x) for take, x in zip(takes, inputs, strict=True)], output)
            return output

        return viewed

    def general(*inputs: torch.Tensor) -> Any:
        outputs = [make() for make, _ in makes]
        dense = [output if view is None else view(output) for output, (_, view) in zip(outputs, makes, strict=True)]
        function(*[x if take is None else take(x) for take, x in zip(takes, inputs, strict=True)], *dense)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    return general


def _viewer(view: DenseView) -> Callable[[torch.Tensor], torch.Tensor]:
    if view.axes == (1, 0):
        return torch.t
    shape, stride = view.shape, view.stride
    return lambda x: x.as_strided(shape, stride)


def _maker(
    spec: TensorSpec, axes: tuple[int, ...] | None
) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], torch.Tensor] | None]:
    """Allocates an output; and the dense view of it that the function writes to, if it is not the output itself."""
    shape, stride, dtype = spec.shape, spec.stride, dtype_of(spec.dtype)
    make = lambda: torch.empty_strided(shape, stride, dtype=dtype)  # noqa: E731
    if axes is None:
        return make, None
    dense_shape = tuple(shape[a] for a in axes)
    dense_stride = tuple(stride[a] for a in axes)
    return make, lambda output: output.as_strided(dense_shape, dense_stride)
