"""A workload as one TIR function over dense buffers: inputs in order, then outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import te, tirx

from raftune.dialects.base import BuildError, Unsupported
from raftune.dialects.torch_ops import dtype_of
from raftune.dialects.tvm.layout import DenseView, dense_view, stored_axes
from raftune.dialects.tvm.lowering import registry
from raftune.dialects.tvm.lowering.builder import Builder, dtype_name, shape_of
from raftune.workload import Arg, In, Literal, Out, TensorSpec, Workload


@dataclass(frozen=True)
class Lowered:
    """``outputs[i]`` is the block that writes output ``i``; buffers are as :mod:`raftune.dialects.tvm.layout` has them."""

    function: tirx.PrimFunc
    builder: Builder
    outputs: tuple[str, ...]


def lower(workload: Workload, builder: Builder) -> Lowered:
    """Lower every operator with its rule; raises :class:`Unsupported` where there is none."""
    views = tuple(dense_view(spec) for spec in workload.inputs)
    buffers = [
        te.placeholder(v.shape, s.dtype, name=f"in_{i}") for i, (v, s) in enumerate(zip(views, workload.inputs, strict=True))
    ]
    inputs = [_logical(builder, buffer, view, spec) for buffer, view, spec in zip(buffers, views, workload.inputs, strict=True)]
    results: list[tuple[Any, ...]] = []

    def value(arg: Arg) -> Any:
        match arg:
            case In(index):
                return inputs[index]
            case Out(node, index):
                return results[node][index]
            case Literal():
                return arg.name
            case tuple():
                return tuple(value(a) for a in arg)
            case _:
                return arg

    for operator in workload.operators:
        lowering = registry.find(operator.op)
        if lowering is None:
            raise Unsupported(f"no lowering to TVM for {operator.op}")
        made = lowering.rule(builder, *(value(a) for a in operator.args), **{k: value(a) for k, a in operator.kwargs})
        results.append(made if isinstance(made, tuple) else (made,))

    outputs: list[Any] = []
    for number, (out, spec) in enumerate(zip(workload.outputs, workload.results, strict=True)):
        tensor = results[out.node][out.index]
        _check_result(number, tensor, spec, workload)
        outputs.append(_stored(builder, tensor, spec, [*inputs, *buffers, *outputs]))
    function = at_any_address(te.create_prim_func([*buffers, *outputs])).with_attr("global_symbol", "main")
    return Lowered(function, builder, tuple(o.op.name for o in outputs))


def at_any_address(function: Any) -> Any:
    """The function for buffers at any address that their elements may have: TVM assumes multiples of 64 bytes, views do not
    keep to that, and an aligned vector load of one ends the process. Where data is aligned, the other load is as fast.
    """

    def loosened(buffer: Any) -> Any:
        kind = buffer.ty
        return tirx.decl_buffer(
            kind.shape,
            kind.dtype,
            buffer.name,
            strides=kind.strides,
            elem_offset=kind.elem_offset,
            scope=kind.storage_scope,
            data_alignment=dtype_of(dtype_name(buffer)).itemsize,
            offset_factor=kind.offset_factor,
            layout=kind.layout,
        )

    replaced = {parameter: loosened(parameter) for parameter in function.params}
    return tvm_ffi.structural_map(function, (tirx.Var, lambda var: replaced.get(var, var)), order="post")


def _logical(builder: Builder, buffer: Any, view: DenseView, spec: TensorSpec) -> Any:
    """The tensor as PyTorch sees it, over the dense buffer that is passed; an index change that schedules inline."""
    if view.is_whole:
        return buffer
    return builder.compute(spec.shape, lambda *indices: buffer(*view.index(indices)))


def _stored(builder: Builder, tensor: Any, spec: TensorSpec, taken: list[Any]) -> Any:
    """The tensor in the memory order of ``spec``; a copy where it is an input or already another output."""
    axes = stored_axes(spec)
    if axes is None:
        return builder.compute(spec.shape, tensor) if any(tensor.same_as(other) for other in taken) else tensor

    def element(*indices: Any) -> Any:
        position = dict(zip(axes, indices, strict=True))
        return tensor(*(position.get(d, 0) for d in range(len(spec.shape))))

    return builder.compute([spec.shape[a] for a in axes], element)


def _check_result(number: int, tensor: Any, spec: TensorSpec, workload: Workload) -> None:
    if shape_of(tensor) != spec.shape or dtype_name(tensor) != spec.dtype:
        raise BuildError(
            f"lowering of {workload.op} gives output {number} as {dtype_name(tensor)}{list(shape_of(tensor))}, "
            f"PyTorch {spec.dtype}{list(spec.shape)}"
        )
