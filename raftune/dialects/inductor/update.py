"""Optimizer updates as formulas over tensors, for a compiler that has no kernel for the fused operators.

Decoupled weight decay and Adam: Loshchilov and Hutter, arXiv 1711.05101; momentum: Sutskever et al., ICML 2013.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Writes = list[tuple["Tensor", "Tensor"]]
"""Which tensor gets which value, after everything has been computed."""


def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    averages: Sequence[Tensor],
    squares: Sequence[Tensor],
    maxima: Sequence[Tensor] = (),
    steps: Sequence[Tensor] = (),
    *,
    lr: Tensor | float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
) -> Writes:
    """What ``aten._fused_adamw_`` writes, without its gradient scaling."""
    import torch

    writes: Writes = []
    for i, param in enumerate(params):
        grad = -grads[i] if maximize else grads[i]
        average = averages[i] + (grad - averages[i]) * (1 - beta1)
        square = squares[i] * beta2 + grad * grad * (1 - beta2)
        bound = square
        if amsgrad:
            bound = torch.maximum(maxima[i], square)
            writes.append((maxima[i], bound))
        denominator = bound.sqrt() / torch.sqrt(1 - torch.pow(beta2, steps[i])) + eps
        step_size = lr / (1 - torch.pow(beta1, steps[i]))
        updated = param * (1 - lr * weight_decay) - step_size * average / denominator
        writes += [(param, updated), (averages[i], average), (squares[i], square)]
    return writes


def sgd(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    buffers: Sequence[Tensor] = (),
    *,
    weight_decay: float,
    momentum: float,
    lr: Tensor | float,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
) -> Writes:
    """What ``aten._fused_sgd_`` writes, without its gradient scaling."""
    writes: Writes = []
    for i, param in enumerate(params):
        grad = -grads[i] if maximize else grads[i]
        if weight_decay:
            grad = grad + weight_decay * param
        if momentum:
            buffer = grad.clone() if is_first_step else momentum * buffers[i] + (1 - dampening) * grad
            writes.append((buffers[i], buffer))
            grad = grad + momentum * buffer if nesterov else buffer
        writes.append((param, param - lr * grad))
    return writes


UPDATES: dict[str, Callable[..., Writes]] = {
    "aten._fused_adamw_.tensor_lr": adamw,
    "aten._fused_sgd_.tensor_lr": sgd,
}
