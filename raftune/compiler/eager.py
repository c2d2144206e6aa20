"""The same step as PyTorch users write it, and a way to put model, optimizer and random state back after trying it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from raftune.graph import StepResult
from raftune.graph.members import Snapshot
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
def kept_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, loss: Loss | None = None
) -> Iterator[Callable[[], None]]:
    """Yields a function that restores modules, gradients, optimizer and random state; called at the end too.

    Everything is restored in place: what the caller holds of model and optimizer stays part of them.
    """
    modules = Snapshot(model, loss)
    kept_optimizer = None if optimizer is None else _OptimizerState(optimizer)
    tensors = [*model.parameters(), *model.buffers(), *(kept_optimizer.tensors if kept_optimizer is not None else ())]
    values = [t.detach().clone() for t in tensors]
    gradients = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    random = torch.get_rng_state()

    def restore() -> None:
        modules.restore()
        if kept_optimizer is not None:
            kept_optimizer.restore()
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                tensor.copy_(value)
            for parameter, gradient, kept in gradients:
                parameter.grad = gradient
                if gradient is not None and kept is not None:
                    gradient.copy_(kept)
        torch.set_rng_state(random)

    try:
        yield restore
    finally:
        restore()


class _OptimizerState:
    """An optimizer's dictionaries with their entries. The values of ``tensors``, those among them, are the caller's to keep."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        dicts = [vars(optimizer), optimizer.state, *optimizer.param_groups, *optimizer.state.values()]
        self._entries: list[tuple[dict[Any, Any], dict[Any, Any]]] = [(content, dict(content)) for content in dicts]
        lists = [optimizer.param_groups, *(group["params"] for group in optimizer.param_groups)]
        self._lists = [(content, list(content)) for content in lists]
        entries = [*optimizer.param_groups, *optimizer.state.values()]
        self.tensors = [value for content in entries for value in content.values() if isinstance(value, torch.Tensor)]

    def restore(self) -> None:
        for content, before in self._entries:
            content.clear()
            content.update(before)
        for items, kept in self._lists:
            items[:] = kept
