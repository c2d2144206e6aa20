"""Who takes part in the benchmark: what each contender's process is told, and how it makes a training step.

All but plain ``eager`` and the two that are named for their optimizer run at their best: with a fused optimizer, and with an
allocator that keeps the pages of freed memory (raftune asks for that itself, the others are told by glibc's variables).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raftune.graph.structure import find_loss, split_batch
from raftune.models import Target

Step = Callable[[], Any]
"""One finished step of training; returns the loss, something that ``float`` takes."""

EAGER, KEEP_PAGES, COMPILE, RAFTUNE = "eager", "eager keep pages", "torch.compile", "raftune"
_KEEPING = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_TOP_PAD_": str(64 << 20)}


@dataclass(frozen=True)
class Task:
    """What a contender is to train. ``log`` is the tuning log, for the one that uses it, if there is one."""

    model: str
    target: Target
    log: Path | None


@dataclass(frozen=True)
class Contender:
    """``make`` compiles as far as can be without a step. ``load`` imports what is needed, so that memory for it is told apart.

    ``models`` are those that there is a version of for it, all if ``None``; ``environment`` is set before the process starts.
    ``own_threads``: it does not use OpenMP, so it is the process that is kept to as many cores as it may have threads.
    """

    make: Callable[[Task], Step]
    load: Callable[[], object]
    environment: Mapping[str, str]
    models: tuple[str, ...] | None = None
    own_threads: bool = False


class WithLoss(nn.Module):
    """A target's model and loss as one module, which takes the batch's tensors one by one (``tensors`` has them in order)."""

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.model, self.loss = target.model, target.loss
        call = split_batch(target.inputs, target.loss)
        self.positional, self.names = len(call.args), tuple(call.kwargs)
        self.tensors = (*call.args, *call.kwargs.values(), *call.targets)

    def forward(self, *tensors: Tensor) -> Tensor:
        end = self.positional + len(self.names)
        outputs = self.model(*tensors[: self.positional], **dict(zip(self.names, tensors[self.positional : end], strict=True)))
        return find_loss(outputs) if self.loss is None else self.loss(outputs, *tensors[end:])


def _pytorch(task: Task, wrap: Callable[[WithLoss], Callable[..., Tensor]], settings: Mapping[str, bool]) -> Step:
    """The step as a user writes it, with ``settings`` of the optimizer."""
    module = WithLoss(task.target)
    assert task.target.optimizer is not None
    optimizer = task.target.optimizer(task.target.model.parameters())
    for group in optimizer.param_groups:
        group.update(settings)
    forward = wrap(module)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = forward(*module.tensors)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _eager(**settings: bool) -> Callable[[Task], Step]:
    return lambda task: _pytorch(task, lambda module: module, settings)


def _compiled(mode: str) -> Callable[[Task], Step]:
    return lambda task: _pytorch(task, lambda module: torch.compile(module, mode=mode), _FUSED)


def _torchscript(task: Task) -> Step:
    # Dropout draws anew at every call, so a second trace never equals the first.
    return _pytorch(task, lambda module: torch.jit.trace(module, module.tensors, check_trace=False), _FUSED)


def _jax(task: Task) -> Step:
    import bench_jax

    return bench_jax.make_step(task.model, task.target)


def _raftune(task: Task) -> Step:
    from raftune.compiler.step import compile_step

    target = task.target
    # With a log, as its user gets it: the plan that won the race at the end of tuning. Without one, the compiled step.
    race = task.log is not None
    compiled = compile_step(target.model, target.inputs, loss=target.loss, optimizer=target.optimizer, log=task.log, race=race)
    return lambda: compiled(target.inputs).loss


def _imports(names: Sequence[str]) -> Callable[[], object]:
    return lambda: [import_module(name) for name in names]


def _load_raftune() -> None:
    from raftune.dialects import registry

    import_module("raftune.compiler.step")
    import_module("torch._inductor.compile_fx")
    registry.describe()


_FUSED = {"foreach": False, "fused": True}
# The first step of an optimizer imports torch._dynamo, also in eager.
_PLAIN, _COMPILER = _imports(["torch._dynamo"]), _imports(["torch._dynamo", "torch._inductor.compile_fx"])

CONTENDERS: dict[str, Contender] = {
    EAGER: Contender(_eager(), _PLAIN, {}),
    "eager foreach": Contender(_eager(foreach=True, fused=False), _PLAIN, {}),
    "eager fused": Contender(_eager(**_FUSED), _PLAIN, {}),
    KEEP_PAGES: Contender(_eager(**_FUSED), _PLAIN, _KEEPING),
    "torchscript": Contender(_torchscript, _PLAIN, _KEEPING),
    COMPILE: Contender(_compiled("default"), _COMPILER, _KEEPING),
    "torch.compile max-autotune": Contender(_compiled("max-autotune"), _COMPILER, _KEEPING),
    "jax": Contender(_jax, _imports(["jax"]), _KEEPING, models=("mlp", "gpt"), own_threads=True),
    RAFTUNE: Contender(_raftune, _load_raftune, {}),
}
"""By name, in the order of the report."""
