"""Reductions, softmaxes, normalizations and embedding gradients by other operators than their own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raftune.dialects.base import BuildError, Kernel
from raftune.dialects.calls import FLOATS, Call, check_keys, choice, conform_all, select_outputs
from raftune.workload import Config, Workload

if TYPE_CHECKING:
    from torch import Tensor

_ONE_HOT_LIMIT = 512


@dataclass(frozen=True, slots=True)
class _Formulation:
    name: str
    applies: Callable[[Call], bool]
    make: Callable[[Call], Kernel]


def configs(workload: Workload) -> list[Config]:
    call = Call.of(workload)
    if call is None or not _plain(workload):
        return []
    return [{"formulation": f.name} for f in _FORMULATIONS.get(call.op, ()) if f.applies(call)]


def build(workload: Workload, config: Config) -> Kernel:
    check_keys(config, ("formulation",))
    call = Call.of(workload)
    offered = _FORMULATIONS.get(workload.op, ()) if call is not None and _plain(workload) else ()
    name = choice(config, "formulation", tuple(f.name for f in offered))
    formulation = next(f for f in offered if f.name == name)
    assert call is not None
    if not formulation.applies(call):
        raise BuildError(f"config formulation={name!r} does not apply to this {workload.op}")
    return conform_all(workload, formulation.make(call))


def _plain(workload: Workload) -> bool:
    """Floating-point results of one dtype (no widening on the way), nothing empty."""
    return all(r.dtype in FLOATS and r.numel for r in workload.results) and all(s.numel for s in workload.inputs)


def _dims(call: Call) -> list[int]:
    rank = len(call.workload.inputs[0].shape)
    return sorted(d % rank for d in call.ints(1, "dim")) or list(range(rank))


def _sums_in_place(call: Call) -> bool:
    return call.arg(3, "dtype") is None and call.workload.inputs[0].dtype == call.workload.results[0].dtype


def _sums_edge(call: Call) -> bool:
    """The reduced dimensions are all the first or all the last of a contiguous tensor: a matrix times a vector of ones."""
    spec = call.workload.inputs[0]
    dims, rank = _dims(call), len(spec.shape)
    first, last = list(range(len(dims))), list(range(rank - len(dims), rank))
    return _sums_in_place(call) and spec.is_contiguous and len(dims) < rank and dims in (first, last)


def _sum_by_product(call: Call) -> Kernel:
    import torch

    from raftune.dialects.torch_ops import dtype_of

    spec, shape = call.workload.inputs[0], call.workload.results[0].shape
    leading = _dims(call)[0] == 0
    kept = call.workload.results[0].numel
    reduced = spec.numel // kept
    ones = torch.ones(reduced, dtype=dtype_of(spec.dtype))
    if leading:
        return lambda x: torch.mv(x.view(reduced, kept).t(), ones).view(shape)
    return lambda x: torch.mv(x.view(kept, reduced), ones).view(shape)


def _sum_stepwise(order: Callable[[list[int]], list[int]]) -> Callable[[Call], Kernel]:
    def make(call: Call) -> Kernel:
        dims, shape = order(_dims(call)), call.workload.results[0].shape

        def kernel(x: Tensor) -> Tensor:
            for dim in dims:
                x = x.sum(dim, keepdim=True)
            return x.view(shape)

        return kernel

    return make


def _softmax_composed(call: Call) -> Kernel:
    import torch

    dim = call.ints(1, "dim")[0]

    def kernel(x: Tensor) -> Tensor:
        out = torch.sub(x, x.amax(dim, keepdim=True)).exp_()
        return out.div_(out.sum(dim, keepdim=True))

    return kernel


def _log_softmax_composed(call: Call) -> Kernel:
    import torch

    dim = call.ints(1, "dim")[0]
    return lambda x: torch.sub(x, x.logsumexp(dim, keepdim=True))


def _softmax_backward_composed(call: Call) -> Kernel:
    grad_at, out_at, dim = call.tensor(0, ""), call.tensor(1, ""), call.ints(2, "dim")[0]
    assert grad_at is not None
    assert out_at is not None

    def kernel(*inputs: Tensor) -> Tensor:
        out = inputs[out_at]
        product = inputs[grad_at] * out
        return product.addcmul_(out, product.sum(dim, keepdim=True), value=-1)

    return kernel


def _log_softmax_backward_composed(call: Call) -> Kernel:
    import torch

    grad_at, out_at, dim = call.tensor(0, ""), call.tensor(1, ""), call.ints(2, "dim")[0]
    assert grad_at is not None
    assert out_at is not None

    def kernel(*inputs: Tensor) -> Tensor:
        grad = inputs[grad_at]
        return torch.exp(inputs[out_at]).mul_(grad.sum(dim, keepdim=True)).neg_().add_(grad)

    return kernel


def _layer_norm_backward_separate(call: Call) -> Kernel:
    """The input's gradient by its own call, the parameters' as sums over the rows, by products with a vector of ones."""
    import torch

    from raftune.dialects.torch_ops import dtype_of

    grad_at, x_at, mean_at, rstd_at = (call.tensor(i, "") for i in (0, 1, 3, 4))
    weight_at = call.tensor(5, "")
    shape = list(call.ints(2, "normalized_shape"))
    assert grad_at is not None
    assert x_at is not None
    assert mean_at is not None
    assert rstd_at is not None
    used = {out.index for out in call.workload.outputs}
    spec = call.workload.inputs[x_at]
    columns = math.prod(shape)
    rows = spec.numel // columns
    ones = torch.ones(rows, dtype=dtype_of(spec.dtype))
    backward = torch.ops.aten.native_layer_norm_backward.default

    def results(*inputs: Tensor) -> tuple[Tensor | None, ...]:
        grad, x, mean, rstd = inputs[grad_at], inputs[x_at], inputs[mean_at], inputs[rstd_at]
        weight = None if weight_at is None else inputs[weight_at]
        of_x = backward(grad, x, shape, mean, rstd, weight, None, [True, False, False])[0] if 0 in used else None
        flat = grad.reshape(rows, columns).t()
        of_weight = None
        if 1 in used:
            normal = (x - mean).mul_(rstd).mul_(grad)
            of_weight = torch.mv(normal.view(rows, columns).t(), ones).view(shape)
        return of_x, of_weight, torch.mv(flat, ones).view(shape) if 2 in used else None

    return select_outputs(call.workload, results)


def _embedding(call: Call) -> tuple[int, int, int, int]:
    """Input numbers of gradient and indices, rows of the table, the padding row (-1: none)."""
    grad_at, index_at = call.tensor(0, ""), call.tensor(1, "")
    assert grad_at is not None
    assert index_at is not None
    return grad_at, index_at, call.ints(2, "num_weights")[0], call.ints(3, "padding_idx", (-1,))[0]


def _unscaled(call: Call) -> bool:
    return not call.flag(4, "scale_grad_by_freq")


def _embedding_index_add(call: Call) -> Kernel:
    grad_at, index_at, rows, padding = _embedding(call)

    def kernel(*inputs: Tensor) -> Tensor:
        grad, index = inputs[grad_at], inputs[index_at]
        width = grad.shape[-1]
        out = grad.new_zeros((rows, width)).index_add_(0, index.reshape(-1), grad.reshape(-1, width))
        if padding >= 0:
            out[padding].zero_()
        return out

    return kernel


def _embedding_one_hot(call: Call) -> Kernel:
    grad_at, index_at, rows, padding = _embedding(call)

    def kernel(*inputs: Tensor) -> Tensor:
        grad, index = inputs[grad_at], inputs[index_at]
        width = grad.shape[-1]
        hot = grad.new_zeros((rows, index.numel())).scatter_(0, index.reshape(1, -1).long(), 1)
        out = hot.mm(grad.reshape(-1, width))
        if padding >= 0:
            out[padding].zero_()
        return out

    return kernel


def _embedding_sorted(call: Call) -> Kernel:
    """Rows of equal index brought together, so that each row of the table is written in one run."""
    grad_at, index_at, rows, padding = _embedding(call)

    def kernel(*inputs: Tensor) -> Tensor:
        grad, index = inputs[grad_at], inputs[index_at]
        width = grad.shape[-1]
        ordered, order = index.reshape(-1).sort()
        out = grad.new_zeros((rows, width)).index_add_(0, ordered, grad.reshape(-1, width).index_select(0, order))
        if padding >= 0:
            out[padding].zero_()
        return out

    return kernel


def _always(call: Call) -> bool:
    del call
    return True


def _several(call: Call) -> bool:
    return _sums_in_place(call) and len(_dims(call)) > 1


def _has_parameters(call: Call) -> bool:
    return any(out.index > 0 for out in call.workload.outputs)


def _few_rows(call: Call) -> bool:
    return _unscaled(call) and call.ints(2, "num_weights")[0] <= _ONE_HOT_LIMIT


_FORMULATIONS: dict[str, tuple[_Formulation, ...]] = {
    "aten.sum.dim_IntList": (
        _Formulation("product_with_ones", _sums_edge, _sum_by_product),
        _Formulation("last_dim_first", _several, _sum_stepwise(lambda dims: dims[::-1])),
        _Formulation("first_dim_first", _several, _sum_stepwise(lambda dims: dims)),
    ),
    "aten._softmax.default": (_Formulation("composed", _always, _softmax_composed),),
    "aten._log_softmax.default": (_Formulation("composed", _always, _log_softmax_composed),),
    "aten._softmax_backward_data.default": (_Formulation("composed", _always, _softmax_backward_composed),),
    "aten._log_softmax_backward_data.default": (_Formulation("composed", _always, _log_softmax_backward_composed),),
    "aten.native_layer_norm_backward.default": (_Formulation("separate", _has_parameters, _layer_norm_backward_separate),),
    "aten.embedding_dense_backward.default": (
        _Formulation("index_add", _unscaled, _embedding_index_add),
        _Formulation("sorted", _unscaled, _embedding_sorted),
        _Formulation("one_hot", _few_rows, _embedding_one_hot),
    ),
}
