"""The optimizer's update as one functional ATen operator over all parameters of a group.

The fused operators compute what ``torch.optim``'s default implementations compute; they read the learning rate from a
tensor, so that a scheduler does not need a new graph, and the Adam family's step count after it was incremented.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raftune.graph.errors import UnsupportedOptimizer

OptimizerFactory = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]
StateKey = tuple[str, str]
"""A parameter's name and a key of its optimizer state, such as ``("fc.weight", "exp_avg")``."""

# name of the operator: how many of its arguments are lists of tensors, each of which it returns updated
_FUSED = {"_fused_sgd": 3, "_fused_adam": 5, "_fused_adamw": 5}
STEP = "step"
_ADAM_FAMILY = (torch.optim.Adam, torch.optim.AdamW)


@dataclass(frozen=True)
class GroupPlan:
    """How one parameter group is updated: the operator, its settings, and the state each parameter has.

    ``watched`` are the values of the group's settings at capture; they are constants of the graph. ``moments`` are the
    state tensors shaped like the parameter, in the operator's argument order. ``lr_dtype`` is the learning rate's.
    """

    index: int
    operator: torch._ops.OpOverload
    names: tuple[str, ...]
    lr_dtype: torch.dtype
    moments: tuple[str, ...]
    has_step: bool
    settings: tuple[tuple[str, Any], ...]
    watched: tuple[tuple[str, Any], ...]

    @property
    def state_keys(self) -> tuple[str, ...]:
        return (*((STEP,) if self.has_step else ()), *self.moments)

    def changed_setting(self, group: Mapping[str, Any]) -> str | None:
        """The first setting of the live group that no longer has the captured value."""
        for key, value in self.watched:
            if _setting(group.get(key)) != value:
                return f"{key} of parameter group {self.index} is now {group.get(key)!r}, captured as {value!r}"
        return None


def _returns_like(lists: int) -> Callable[..., tuple[list[Tensor], ...]]:
    def fake(*arguments: Any, **_: Any) -> tuple[list[Tensor], ...]:
        return tuple([torch.empty_like(tensor) for tensor in tensors] for tensors in arguments[:lists])

    return fake


# Without these, PyTorch (seen in 2.13) learns the results' layouts by running the real update over zeros: time, and memory for
# eight more copies of all parameters.
for _name, _lists in _FUSED.items():
    torch.library.register_fake(f"aten::{_name}.tensor_lr", _returns_like(_lists))


def plan_groups(optimizer: torch.optim.Optimizer, named: Mapping[str, Tensor]) -> list[GroupPlan]:
    """One plan per parameter group, or :class:`UnsupportedOptimizer` naming what has no update in the graph."""
    kind = type(optimizer)
    if kind is not torch.optim.SGD and kind not in _ADAM_FAMILY:
        raise UnsupportedOptimizer(
            f"only torch.optim.SGD, Adam and AdamW are captured, not {kind.__module__}.{kind.__qualname__}"
        )
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise UnsupportedOptimizer(f"{kind.__name__} has step hooks, which a captured step would not call")
    name_of = {id(parameter): name for name, parameter in named.items()}
    plans = []
    for index, group in enumerate(optimizer.param_groups):
        names = []
        for parameter in group["params"]:
            if id(parameter) not in name_of:
                shape = tuple(parameter.shape)
                raise UnsupportedOptimizer(f"parameter group {index} holds a parameter of shape {shape} that the model has not")
            _check_parameter(name_of[id(parameter)], parameter)
            names.append(name_of[id(parameter)])
        _reject(group, index, "differentiable", "capturable")
        make = _plan_sgd if kind is torch.optim.SGD else _plan_adam
        plans.append(make(index, group, tuple(names)))
    return plans


def new_state(parameter: Tensor, key: str) -> Tensor:
    """The value that ``torch.optim`` would give ``state[parameter][key]`` before the first step."""
    if key == STEP:
        return torch.zeros((), dtype=torch.float32)
    return torch.zeros_like(parameter, memory_format=torch.preserve_format)


def apply_update(
    plan: GroupPlan,
    parameters: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    states: Mapping[StateKey, Tensor],
    lr: Tensor,
) -> tuple[dict[str, Tensor], dict[StateKey, Tensor]]:
    """New parameters and new state of one group; parameters without a gradient are left out, as ``torch.optim`` does."""
    new_parameters: dict[str, Tensor] = {}
    new_states: dict[StateKey, Tensor] = {}
    for names in _by_dtype_and_device([n for n in plan.names if n in gradients], parameters):
        moments = [[states[name, key] for name in names] for key in plan.moments]
        selves = [parameters[name] for name in names]
        grads = [_laid_out_like(gradients[name], parameters[name]) for name in names]
        if plan.has_step:
            steps = torch._foreach_add([states[name, STEP] for name in names], 1)
            new_states.update({(name, STEP): step for name, step in zip(names, steps, strict=True)})
            maxima = moments[2] if len(moments) == 3 else []
            results = plan.operator(selves, grads, moments[0], moments[1], maxima, list(steps), lr=lr, **dict(plan.settings))
        else:
            results = plan.operator(selves, grads, moments[0] if moments else [], lr=lr, **dict(plan.settings))
        new_parameters.update(zip(names, results[0], strict=True))
        for key, values in zip(plan.moments, results[2:], strict=False):
            new_states.update({(name, key): value for name, value in zip(names, values, strict=True)})
    return new_parameters, new_states


def _plan_sgd(index: int, group: Mapping[str, Any], names: tuple[str, ...]) -> GroupPlan:
    _require_numbers(group, index, "momentum", "dampening", "weight_decay")
    # The first step's buffer is the plain gradient. Zeros give that too, but only without dampening.
    if group["momentum"] != 0 and group["dampening"] != 0:
        raise UnsupportedOptimizer(f"dampening={group['dampening']!r} in parameter group {index}: only 0 is captured")
    return GroupPlan(
        index=index,
        operator=torch.ops.aten._fused_sgd.tensor_lr,
        names=names,
        lr_dtype=_lr_dtype(group),
        moments=("momentum_buffer",) if group["momentum"] != 0 else (),
        has_step=False,
        settings=(
            ("weight_decay", float(group["weight_decay"])),
            ("momentum", float(group["momentum"])),
            ("dampening", 0.0),
            ("nesterov", bool(group["nesterov"])),
            ("maximize", bool(group["maximize"])),
            ("is_first_step", False),
        ),
        watched=_watch(group, "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    )


def _plan_adam(index: int, group: Mapping[str, Any], names: tuple[str, ...]) -> GroupPlan:
    _require_numbers(group, index, "eps", "weight_decay")
    if any(isinstance(beta, Tensor) for beta in group["betas"]):
        raise UnsupportedOptimizer(f"betas of parameter group {index} are tensors: only plain numbers are captured")
    if torch.get_default_dtype() == torch.float64:
        raise UnsupportedOptimizer("step counts are float64 under the default dtype float64: the fused update needs float32")
    # Without weight decay Adam and AdamW are the same update; naming it one way lets them share tuned results.
    decoupled = group["decoupled_weight_decay"] or group["weight_decay"] == 0
    return GroupPlan(
        index=index,
        operator=torch.ops.aten._fused_adamw.tensor_lr if decoupled else torch.ops.aten._fused_adam.tensor_lr,
        names=names,
        lr_dtype=_lr_dtype(group),
        moments=("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ())),
        has_step=True,
        settings=(
            ("beta1", float(group["betas"][0])),
            ("beta2", float(group["betas"][1])),
            ("weight_decay", float(group["weight_decay"])),
            ("eps", float(group["eps"])),
            ("amsgrad", bool(group["amsgrad"])),
            ("maximize", bool(group["maximize"])),
        ),
        watched=_watch(group, "betas", "eps", "weight_decay", "amsgrad", "maximize", "decoupled_weight_decay"),
    )


def _watch(group: Mapping[str, Any], *keys: str) -> tuple[tuple[str, Any], ...]:
    return tuple((key, _setting(group[key])) for key in keys)


def _setting(value: Any) -> Any:
    # A checkpoint read from JSON has its betas as a list.
    return tuple(value) if isinstance(value, list) else value


def _lr_dtype(group: Mapping[str, Any]) -> torch.dtype:
    # float32 wherever it is exact enough, so that tuned results are shared.
    return torch.float64 if any(p.dtype == torch.float64 for p in group["params"]) else torch.float32


def _reject(group: Mapping[str, Any], index: int, *keys: str) -> None:
    for key in keys:
        if group.get(key):
            raise UnsupportedOptimizer(f"{key}={group[key]!r} in parameter group {index} is not captured")


def _require_numbers(group: Mapping[str, Any], index: int, *keys: str) -> None:
    for key in keys:
        if not isinstance(group[key], int | float):
            raise UnsupportedOptimizer(f"{key} of parameter group {index} is {group[key]!r}: only plain numbers are captured")


def _check_parameter(name: str, parameter: Tensor) -> None:
    # The fused operators walk the memory of parameter, gradient and state side by side.
    if not torch.ops.aten.is_non_overlapping_and_dense.default(parameter):
        strides = tuple(parameter.stride())
        raise UnsupportedOptimizer(f"parameter {name!r} has gaps or overlaps in memory (strides {strides}); make it contiguous")
    if not parameter.is_floating_point():
        raise UnsupportedOptimizer(f"parameter {name!r} is {parameter.dtype}: only real floating-point parameters are captured")


def _by_dtype_and_device(names: Sequence[str], parameters: Mapping[str, Tensor]) -> list[list[str]]:
    groups: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for name in names:
        groups.setdefault((parameters[name].dtype, parameters[name].device), []).append(name)
    return list(groups.values())


def _laid_out_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient in the parameter's memory layout, which backward() would have given ``.grad`` as well."""
    pairs = zip(parameter.shape, gradient.stride(), parameter.stride(), strict=True)
    if all(size == 1 or have == want for size, have, want in pairs):
        return gradient
    if parameter.is_contiguous():
        return gradient.clone(memory_format=torch.contiguous_format)
    layout = torch.empty_strided(parameter.shape, parameter.stride(), dtype=gradient.dtype, device=gradient.device)
    copied: Tensor = torch.ops.aten.copy.default(layout, gradient)
    return copied
