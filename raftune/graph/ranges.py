"""Which values an operator's tensor arguments may take, so that random inputs are valid and finite.

Derived from the operator and its shapes alone, never from a run's data: the tuner and the compiler must agree on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._ops import OpOverload

Range = tuple[float | int | None, float | int | None]
_RangeOf = Callable[[Mapping[str, Any]], Range | None]

# Away from zero, where reciprocals, roots and logarithms are well conditioned.
_POSITIVE: Range = (0.25, 2.0)
# Any integer is valid for an element-wise operator; small ones do not overflow.
_POINTWISE_INTEGERS: Range = (0, 127)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class UnknownRange(LookupError):
    """An integer argument whose valid values are not known: the operator is not tuned."""


def _fixed(low: float | int | None, high: float | int | None) -> _RangeOf:
    return lambda _args: (low, high)


def _rows_of(name: str) -> _RangeOf:
    return lambda args: (0, max(args[name].shape[0] - 1, 0))


def _classes_of(name: str) -> _RangeOf:
    return lambda args: (0, max(args[name].shape[1 if args[name].dim() > 1 else 0] - 1, 0))


def _along_dim(args: Mapping[str, Any]) -> Range:
    return (0, max(args["self"].shape[args["dim"]] - 1, 0) if args["self"].dim() else 0)


def _window(args: Mapping[str, Any]) -> Range:
    return (0, max(args["self"].shape[-1] * args["self"].shape[-2] - 1, 0))


def _smallest_indexed(args: Mapping[str, Any]) -> Range:
    sizes = [size for size, index in zip(args["self"].shape, args["indices"], strict=False) if index is not None]
    return (0, max(min(sizes, default=1) - 1, 0))


_POSITIVE_ARG = _fixed(*_POSITIVE)


def _positive_unless_polynomial(args: Mapping[str, Any]) -> Range | None:
    # A fractional or negative power of a negative number or of zero is not finite.
    return None if float(args["exponent"]).is_integer() and args["exponent"] >= 0 else _POSITIVE


_TABLE: dict[str, dict[str, _RangeOf]] = {
    "aten::embedding": {"indices": _rows_of("weight")},
    "aten::embedding_dense_backward": {"indices": lambda args: (0, max(args["num_weights"] - 1, 0))},
    "aten::nll_loss_forward": {"target": _classes_of("self")},
    "aten::nll_loss_backward": {"target": _classes_of("self"), "total_weight": _fixed(1.0, 8.0)},
    "aten::nll_loss2d_forward": {"target": _classes_of("self")},
    "aten::nll_loss2d_backward": {"target": _classes_of("self"), "total_weight": _fixed(1.0, 8.0)},
    "aten::gather": {"index": _along_dim},
    "aten::scatter": {"index": _along_dim},
    "aten::scatter_add": {"index": _along_dim},
    "aten::index_select": {"index": _along_dim},
    "aten::index_add": {"index": _along_dim},
    "aten::index": {"indices": _smallest_indexed},
    "aten::index_put": {"indices": _smallest_indexed},
    "aten::max_pool2d_with_indices_backward": {"indices": _window},
    "aten::rsqrt": {"self": _POSITIVE_ARG},
    "aten::sqrt": {"self": _POSITIVE_ARG},
    "aten::log": {"self": _POSITIVE_ARG},
    "aten::log2": {"self": _POSITIVE_ARG},
    "aten::log1p": {"self": _POSITIVE_ARG},
    "aten::reciprocal": {"self": _POSITIVE_ARG},
    "aten::div": {"other": _POSITIVE_ARG},
    "aten::pow": {"self": _positive_unless_polynomial},
    "aten::_softmax_backward_data": {"output": _fixed(0.0, 1.0)},
    "aten::tanh_backward": {"output": _fixed(-1.0, 1.0)},
    "aten::sigmoid_backward": {"output": _fixed(0.0, 1.0)},
    "aten::native_batch_norm": {"running_var": _POSITIVE_ARG},
    "aten::_native_batch_norm_legit": {"running_var": _POSITIVE_ARG},
    "aten::_native_batch_norm_legit_functional": {"running_var": _POSITIVE_ARG},
    "aten::_native_batch_norm_legit_no_training": {"running_var": _POSITIVE_ARG},
    "aten::native_batch_norm_backward": {"running_var": _POSITIVE_ARG, "save_invstd": _POSITIVE_ARG},
    "aten::native_layer_norm_backward": {"rstd": _POSITIVE_ARG},
    "aten::native_group_norm_backward": {"rstd": _POSITIVE_ARG},
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": {"logsumexp": _fixed(3.0, 5.0)},
    "aten::_fused_adamw_": {
        "exp_avg_sqs": _fixed(0.01, 1.0),
        "max_exp_avg_sqs": _fixed(0.01, 1.0),
        "state_steps": _fixed(1.0, 100.0),
        "lr": _fixed(1e-4, 1e-2),
    },
    "aten::_fused_sgd_": {"lr": _fixed(1e-4, 1e-2)},
}
_TABLE["aten::_fused_adam_"] = _TABLE["aten::_fused_adamw_"]


def value_range(op: OpOverload, name: str, dtype: torch.dtype, args: Mapping[str, Any]) -> Range:
    """Inclusive bounds of the tensor argument ``name`` (its elements, if a list) of ``op``, called with ``args`` by name.

    Raises :class:`UnknownRange` for an integer argument of an operator that would be invalid for arbitrary integers.
    """
    known = _TABLE.get(op._schema.name, {}).get(name)
    if known is not None and isinstance(args.get("exponent", 0), int | float):
        found = known(args)
        if found is not None:
            return found
    if dtype in _INTEGERS:
        if torch.Tag.pointwise in op.tags or op._schema.name in ("aten::clone", "aten::_to_copy", "aten::sum", "aten::cat"):
            return _POINTWISE_INTEGERS
        raise UnknownRange(f"{op}: valid integers for {name!r} are not known")
    return (None, None)
