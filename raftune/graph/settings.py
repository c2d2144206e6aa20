"""What modules had when they were captured and a graph holds as constants: flags, numbers, hooks, children, plain tensors."""

from __future__ import annotations

import types
from collections.abc import Callable, Collection
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from raftune.graph.members import Attribute, modules_of

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SCALARS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
# A longer container is data rather than a setting, and would be compared in every step.
_LONGEST = 16


class ModuleSettings:
    """The settings of all modules of some roots; :meth:`changed` runs in every step and costs a tuple comparison per module.

    ``written`` are the attributes that the forward pass sets itself: these are results. Private attributes are caches.
    """

    def __init__(self, roots: tuple[object, ...], written: Collection[Attribute]) -> None:
        self._entries: list[tuple[nn.Module, dict[str, Any], Callable[[Any], Any], tuple[Any, ...], tuple[str, ...]]] = []
        self._tensors: list[tuple[nn.Module, dict[str, Any], str, Tensor]] = []
        self._absent: list[tuple[nn.Module, dict[str, Any], str]] = []
        for module in modules_of(*roots):
            content = module.__dict__
            public = [n for n in content if not n.startswith("_") and n != "training" and (module, n) not in written]
            names = ("training", "_modules", *_HOOKS, *(n for n in public if _is_setting(content[n])))
            values = tuple(_copied(content[name]) for name in names)
            self._entries.append((module, content, itemgetter(*names), values, names))
            self._tensors += [(module, content, n, content[n]) for n in public if isinstance(content[n], Tensor)]
            for owner in (module._parameters, module._buffers):
                self._absent += [(module, owner, name) for name, value in owner.items() if value is None]

    def changed(self) -> str | None:
        """The first setting that is not as captured."""
        for module, content, values_of, captured, names in self._entries:
            try:
                if values_of(content) == captured:
                    continue
            except Exception:  # An attribute was deleted, or is now something that does not compare, such as a tensor.
                pass
            for name, value in zip(names, captured, strict=True):
                if not _equal(content.get(name), value):
                    return _description(module, name, content.get(name), value)
        for module, content, name, tensor in self._tensors:
            now = content.get(name)
            if now is not tensor and not (isinstance(now, Tensor) and _equal_tensors(now, tensor)):
                return f"the tensor {type(module).__name__}.{name} was replaced by another"
        for module, owner, name in self._absent:
            if owner.get(name) is not None:
                return f"{type(module).__name__}.{name} is now a tensor, captured as None"
        return None


def _is_setting(value: object) -> bool:
    if type(value) in (list, tuple, dict):
        assert isinstance(value, list | tuple | dict)
        items = value.values() if isinstance(value, dict) else value
        return len(value) <= _LONGEST and all(isinstance(item, _SCALARS) for item in items)
    return isinstance(value, (*_SCALARS, *_FUNCTIONS))


def _copied(value: Any) -> Any:
    return value.copy() if isinstance(value, list | dict) else value


def _equal(now: Any, captured: Any) -> bool:
    try:
        return now is captured or bool(now == captured)
    except Exception:  # What cannot be compared with the captured value is another one.
        return False


def _equal_tensors(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)


def _description(module: nn.Module, name: str, now: Any, captured: Any) -> str:
    kind = type(module).__name__
    if name == "_modules":
        return f"a submodule of {kind} was replaced, added or removed"
    if name in _HOOKS:
        return f"{name.strip('_').replace('_', ' ')} of {kind} were added or removed"
    return f"{kind}.{name} is now {now!r}, captured as {captured!r}"
