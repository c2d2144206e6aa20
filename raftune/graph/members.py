"""A model's parameters and buffers by where they live, and what else its modules hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Attribute = tuple[nn.Module, str]
# What every module has, and where recurrent layers keep their parameters once more.
_INTERNAL = frozenset({*vars(nn.Module()), "_flat_weights", "_flat_weight_refs"})
_MISSING = object()


@dataclass
class Member:
    """One parameter or buffer under its first name; ``places`` are all (``_parameters`` or ``_buffers``, key) that hold it."""

    name: str
    tensor: Tensor
    places: list[tuple[dict[str, Any], str]] = field(default_factory=list)

    @property
    def live(self) -> Any:
        """What the model holds there now."""
        owner, key = self.places[0]
        return owner.get(key)

    def put(self, tensor: Tensor) -> None:
        for owner, key in self.places:
            owner[key] = tensor


def parameters_of(model: nn.Module) -> list[Member]:
    """Parameters in ``model.named_parameters()`` order; a tied one appears once, with all its places."""
    return _members(model, "_parameters")


def buffers_of(model: nn.Module) -> list[Member]:
    """Buffers, persistent or not, in ``model.named_buffers()`` order."""
    return _members(model, "_buffers")


def _members(model: nn.Module, attribute: str) -> list[Member]:
    found: dict[int, Member] = {}
    for prefix, module in model.named_modules():
        owner = getattr(module, attribute)
        for key, tensor in owner.items():
            if tensor is not None:
                name = f"{prefix}.{key}" if prefix else key
                found.setdefault(id(tensor), Member(name, tensor)).places.append((owner, key))
    return list(found.values())


def has_gradient_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


class Snapshot:
    """All modules of some roots with what they hold now; :meth:`restore` puts exactly that back, as often as wanted.

    Parameters and buffers are put back in their places. Plain tensors and containers in attributes get their content back too.
    """

    def __init__(self, *roots: object) -> None:
        self._modules = [(module, dict(module.__dict__)) for module in modules_of(*roots)]
        self._dicts = [(content, dict(content)) for module, _ in self._modules for content in _contents(module)]
        self._held = {
            (module, name): _Held(value)
            for module, before in self._modules
            for name, value in before.items()
            if _is_plain(name)
        }

    def restore(self) -> None:
        for content, before in self._dicts:
            content.clear()
            content.update(before)
        for held in self._held.values():
            held.restore()

    def assigned(self) -> list[Attribute]:
        """Plain attributes that hold something else now."""
        return [
            (module, name)
            for module, before in self._modules
            for name in dict.fromkeys((*before, *module.__dict__))
            if _is_plain(name) and not _same(before.get(name, _MISSING), module.__dict__.get(name, _MISSING))
        ]

    def altered(self) -> list[Attribute]:
        """Plain attributes whose tensors or containers were changed in place."""
        return [attribute for attribute, held in self._held.items() if held.altered()]


@contextmanager
def restored(*roots: object) -> Iterator[Snapshot]:
    """Afterwards every module of the roots is exactly as before."""
    snapshot = Snapshot(*roots)
    try:
        yield snapshot
    finally:
        snapshot.restore()


class _Held:
    """The content of the plain tensors and the built-in containers that an attribute holds."""

    def __init__(self, value: object) -> None:
        self._tensors: list[tuple[Tensor, int, Tensor]] = []
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._visit(value)

    def _visit(self, value: object) -> None:
        if isinstance(value, Tensor):
            # Their values are not the attribute's own.
            if not isinstance(value, nn.Parameter):
                self._tensors.append((value, _version(value), value.detach().clone()))
        elif type(value) in (list, dict, set, tuple) and id(value) not in self._containers:
            assert isinstance(value, list | dict | set | tuple)
            self._containers[id(value)] = (value, copy(value))
            for item in value.values() if isinstance(value, dict) else value:
                self._visit(item)

    def altered(self) -> bool:
        return any(_version(tensor) != version for tensor, version, _ in self._tensors) or any(
            not _same_content(now, before) for now, before in self._containers.values()
        )

    def restore(self) -> None:
        with torch.no_grad():
            for index, (tensor, version, value) in enumerate(self._tensors):
                if _version(tensor) != version:
                    tensor.copy_(value)
                    self._tensors[index] = (tensor, _version(tensor), value)
        for now, before in self._containers.values():
            if isinstance(now, list):
                now[:] = before
            elif not isinstance(now, tuple):
                now.clear()
                now.update(before)


def modules_of(*roots: object) -> list[nn.Module]:
    """Every module of the roots once; a root that is no module has none."""
    return list(dict.fromkeys(module for root in roots if isinstance(root, nn.Module) for module in root.modules()))


def attribute_name(attribute: Attribute) -> str:
    module, name = attribute
    return f"{type(module).__name__}.{name}"


def _is_plain(name: str) -> bool:
    return name == "training" or name not in _INTERNAL


def _same(one: object, other: object) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, bool | int | float | complex | str) and one == other)


def _same_content(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(_same, one.values(), other.values()))
    if isinstance(one, set):
        return one == set(other)
    return len(one) == len(other) and all(map(_same, one, other))


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _contents(module: nn.Module) -> Iterable[dict[str, Any]]:
    return (module.__dict__, module._parameters, module._buffers, module._modules)
