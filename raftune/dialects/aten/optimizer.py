"""Optimizer updates: one loop over the parameters (torch's default on a CPU), ``foreach`` operators, or the fused kernel.

The workload is ``aten._fused_adamw_.tensor_lr`` or ``aten._fused_sgd_.tensor_lr`` over all parameters of a group; the step
counts have been advanced before. Formulas: Loshchilov and Hutter, arXiv 1711.05101; Sutskever et al., ICML 2013.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from raftune.dialects.base import BuildError, Kernel, Unsupported
from raftune.dialects.calls import Call, check_keys, choice, direct
from raftune.workload import Config, In, Workload

if TYPE_CHECKING:
    from torch import Tensor

ADAMW = "aten._fused_adamw_.tensor_lr"
SGD = "aten._fused_sgd_.tensor_lr"

Group = Callable[[tuple[Any, ...]], "tuple[Tensor, ...]"]


def is_update(workload: Workload) -> bool:
    return len(workload.operators) == 1 and workload.op in (ADAMW, SGD)


def configs(workload: Workload) -> list[Config]:
    del workload
    return [{"formulation": "fused"}, {"formulation": "foreach"}]


def build(workload: Workload, config: Config) -> Kernel:
    check_keys(config, ("formulation",))
    name = choice(config, "formulation", ("default", "foreach", "fused"))
    call = Call.of(workload)
    if call is None or call.op not in (ADAMW, SGD):
        raise BuildError(f"config formulation={name!r} is for optimizer updates, not {workload.op}")
    if name == "fused":
        return direct(workload)
    if _keyword(call, "grad_scale") is not None or _keyword(call, "found_inf") is not None:
        raise Unsupported("an update with grad_scale or found_inf has the fused formulation only")
    makers = {(ADAMW, "default"): _adamw_loop, (ADAMW, "foreach"): _adamw_foreach}
    makers |= {(SGD, "default"): _sgd_loop, (SGD, "foreach"): _sgd_foreach}
    return makers[call.op, name](call)


def _group(call: Call, position: int, name: str) -> Group:
    """Where the tensors of a list argument are among the inputs."""
    value = call.arg(position, name, ())
    indices = [a.index for a in value if isinstance(a, In)] if isinstance(value, tuple) else []
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda inputs: tuple(inputs[i] for i in indices)


def _keyword(call: Call, name: str) -> Any:
    return call.arg(len(call.operator.args), name)


def _rate(call: Call) -> Callable[[tuple[Any, ...]], float]:
    rate = _keyword(call, "lr")
    if not isinstance(rate, In):
        return lambda _: float(rate)
    at = rate.index
    return lambda inputs: float(inputs[at])


def _adamw_groups(call: Call) -> list[Group]:
    names = ("self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps")
    return [_group(call, i, name) for i, name in enumerate(names)]


def _adamw_loop(call: Call) -> Kernel:
    import torch

    groups, rate = _adamw_groups(call), _rate(call)
    beta1, beta2, decay, eps = (float(_keyword(call, n)) for n in ("beta1", "beta2", "weight_decay", "eps"))
    amsgrad, maximize = bool(_keyword(call, "amsgrad")), bool(_keyword(call, "maximize"))

    def kernel(*inputs: Tensor) -> tuple[()]:
        lr = rate(inputs)
        params, grads, averages, squares, maxima, steps = (g(inputs) for g in groups)
        for i, param in enumerate(params):
            grad = -grads[i] if maximize else grads[i]
            step = float(steps[i])
            if decay:
                param.mul_(1 - lr * decay)
            average = averages[i].lerp_(grad, 1 - beta1)
            square = squares[i].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            if amsgrad:
                square = torch.maximum(maxima[i], square, out=maxima[i])
            denominator = square.sqrt().div_((1 - beta2**step) ** 0.5).add_(eps)
            param.addcdiv_(average, denominator, value=-lr / (1 - beta1**step))
        return ()

    return kernel


def _adamw_foreach(call: Call) -> Kernel:
    import torch

    groups, rate = _adamw_groups(call), _rate(call)
    beta1, beta2, decay, eps = (float(_keyword(call, n)) for n in ("beta1", "beta2", "weight_decay", "eps"))
    amsgrad, maximize = bool(_keyword(call, "amsgrad")), bool(_keyword(call, "maximize"))

    def kernel(*inputs: Tensor) -> tuple[()]:
        lr = rate(inputs)
        params, grads, averages, squares, maxima, steps = (g(inputs) for g in groups)
        counts = [float(step) for step in steps]
        if maximize:
            grads = torch._foreach_neg(grads)
        if decay:
            torch._foreach_mul_(params, 1 - lr * decay)
        torch._foreach_lerp_(averages, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        if amsgrad:
            torch._foreach_maximum_(maxima, squares)
        denominators = torch._foreach_sqrt(maxima if amsgrad else squares)
        torch._foreach_div_(denominators, [(1 - beta2**count) ** 0.5 for count in counts])
        torch._foreach_add_(denominators, eps)
        torch._foreach_addcdiv_(params, averages, denominators, [-lr / (1 - beta1**count) for count in counts])
        return ()

    return kernel


def _sgd_groups(call: Call) -> list[Group]:
    return [_group(call, i, name) for i, name in enumerate(("self", "grads", "momentum_buffer_list"))]


def _sgd_loop(call: Call) -> Kernel:
    groups, rate = _sgd_groups(call), _rate(call)
    decay, momentum, dampening = (float(_keyword(call, n)) for n in ("weight_decay", "momentum", "dampening"))
    nesterov, maximize, first = (bool(_keyword(call, n)) for n in ("nesterov", "maximize", "is_first_step"))

    def kernel(*inputs: Tensor) -> tuple[()]:
        lr = rate(inputs)
        params, grads, buffers = (g(inputs) for g in groups)
        for i, param in enumerate(params):
            grad = -grads[i] if maximize else grads[i]
            if decay:
                grad = grad.add(param, alpha=decay)
            if momentum:
                buffer = buffers[i].copy_(grad) if first else buffers[i].mul_(momentum).add_(grad, alpha=1 - dampening)
                grad = grad.add(buffer, alpha=momentum) if nesterov else buffer
            param.add_(grad, alpha=-lr)
        return ()

    return kernel


def _sgd_foreach(call: Call) -> Kernel:
    import torch

    groups, rate = _sgd_groups(call), _rate(call)
    decay, momentum, dampening = (float(_keyword(call, n)) for n in ("weight_decay", "momentum", "dampening"))
    nesterov, maximize, first = (bool(_keyword(call, n)) for n in ("nesterov", "maximize", "is_first_step"))

    def kernel(*inputs: Tensor) -> tuple[()]:
        lr = rate(inputs)
        params, grads, buffers = (g(inputs) for g in groups)
        if maximize:
            grads = torch._foreach_neg(grads)
        if decay:
            grads = torch._foreach_add(grads, params, alpha=decay)
        if momentum:
            if first:
                torch._foreach_copy_(buffers, grads)
            else:
                torch._foreach_mul_(buffers, momentum)
                torch._foreach_add_(buffers, grads, alpha=1 - dampening)
            grads = torch._foreach_add(grads, buffers, alpha=momentum) if nesterov else buffers
        torch._foreach_add_(params, grads, alpha=-lr)
        return ()

    return kernel
