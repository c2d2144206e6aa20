"""The same step as PyTorch users write it, and a way to put model, optimizer and random state back after trying it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from raftune.graph import StepResult
from raftune.graph.structure import Loss, find_loss, plain, split_batch


class EagerStep:
    """``zero_grad``, forward, loss, ``backward``, ``step``; or one forward pass without gradients (``mode="infer"``)."""

    def __init__(
        self, model: Callable[..., Any], loss: Loss | None, optimizer: torch.optim.Optimizer | None, mode: str
    ) -> None:
        self._model, self._loss, self._optimizer, self._mode = model, loss, optimizer, mode

    def __call__(self, inputs: Any) -> StepResult:
        call = split_batch(plain(inputs), self._loss)
        if self._mode == "infer":
            with torch.no_grad():
                return StepResult(None, self._model(*call.args, **call.kwargs))
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)
        outputs = self._model(*call.args, **call.kwargs)
        loss = find_loss(outputs) if self._loss is None else self._loss(outputs, *call.targets)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._optimizer is not None:
            self._optimizer.step()
        return StepResult(loss.detach(), outputs)


@contextmanager
def kept_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[Callable[[], None]]:
    """Yields a function that restores parameters, buffers, gradients, optimizer and random state; called at the end too."""
    tensors = [*model.parameters(), *model.buffers()]
    values = [t.detach().clone() for t in tensors]
    gradients = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    settings = None if optimizer is None else copy.deepcopy(optimizer.state_dict())
    random = torch.get_rng_state()

    def restore() -> None:
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
            for parameter, gradient, kept in gradients:
                parameter.grad = gradient
                if gradient is not None and kept is not None:
                    gradient.copy_(kept)
        if optimizer is not None and settings is not None:
            optimizer.load_state_dict(copy.deepcopy(settings))
        torch.set_rng_state(random)

    try:
        yield restore
    finally:
        restore()
