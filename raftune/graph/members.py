"""A model's parameters and buffers by where they live."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn


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


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Afterwards every module of the model has exactly the attributes, parameters, buffers and children of before."""
    saved = [(content, dict(content)) for module in model.modules() for content in _contents(module)]
    try:
        yield
    finally:
        for content, before in saved:
            content.clear()
            content.update(before)


def _contents(module: nn.Module) -> Iterable[dict[str, Any]]:
    return (module.__dict__, module._parameters, module._buffers, module._modules)
