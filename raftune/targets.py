"""What to tune, by name: a built-in model, ``file.py:callable``, or ``package.module:callable``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from raftune.models import BUILT_IN, Target

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
}


class TargetError(ValueError):
    """A target that cannot be loaded or does not run; the message is one line for the person who named it."""


def load_target(name: str) -> Target:
    """The target called ``name``.

    A callable takes no arguments and returns a :class:`~raftune.models.Target`, a mapping with its fields, or a tuple
    ``(model, inputs)``, ``(model, inputs, loss)`` or ``(model, inputs, loss, optimizer)``. Raises :class:`TargetError`.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    location, colon, attribute = name.rpartition(":")
    if not colon or not location or not attribute:
        raise TargetError(
            f"unknown target {name!r}: name a built-in ({', '.join(BUILT_IN)}), file.py:callable or package.module:callable"
        )
    module = _load_file(location) if location.endswith(".py") else _load_module(location)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        found = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise TargetError(f"{location} has no callable {attribute!r}; it has: {', '.join(found[:8]) or 'none'}")
    try:
        made = factory()
    except Exception as error:  # the user's code: whatever it raises is reported as theirs
        raise TargetError(f"{name} failed: {_where(error)}") from error
    return _as_target(name, made)


def with_optimizer(target: Target, optimizer: str | None) -> Target:
    """The target with the optimizer called ``adamw``, ``sgd`` or ``none``; its own if ``None``."""
    if optimizer is None:
        return target
    factory = None if optimizer == "none" else OPTIMIZERS[optimizer]
    return Target(target.model, target.inputs, target.loss, factory)


def _as_target(name: str, made: Any) -> Target:
    if isinstance(made, Target):
        return made
    if isinstance(made, Mapping):
        unknown = sorted(set(made) - {"model", "inputs", "loss", "optimizer"})
        if unknown or not {"model", "inputs"} <= set(made):
            raise TargetError(
                f"{name} returned a mapping with keys {sorted(made)}; it needs model, inputs, [loss], [optimizer]"
            )
        parts = (made["model"], made["inputs"], made.get("loss"), made.get("optimizer"))
    elif isinstance(made, tuple) and 2 <= len(made) <= 4:
        parts = (*made, *(None,) * (4 - len(made)))
    else:
        raise TargetError(f"{name} returned {type(made).__name__}; return (model, inputs), with loss and optimizer if you like")
    if not isinstance(parts[0], torch.nn.Module):
        raise TargetError(f"{name} returned {type(parts[0]).__name__} as the model; it must be a torch.nn.Module")
    return Target(*parts)


def _load_file(location: str) -> ModuleType:
    path = Path(location).resolve()
    if not path.is_file():
        raise TargetError(f"there is no file {location}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{location} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # As running the file would do: its neighbours can be imported, and its classes can be found by their module's name.
    sys.path.insert(0, str(path.parent))
    sys.modules.setdefault(path.stem, module)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's code
        raise TargetError(f"{location} cannot be imported: {_where(error)}") from error
    return module


def _load_module(location: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(location)
    except Exception as error:  # the user's code
        raise TargetError(f"module {location!r} cannot be imported: {_where(error)}") from error


def _where(error: BaseException) -> str:
    """The error in one line, with the innermost place in the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if f.filename != __file__ and not f.filename.startswith("<") and "importlib" not in f.filename]
    text = " ".join(str(error).split())
    place = f" ({Path(theirs[-1].filename).name}, line {theirs[-1].lineno})" if theirs else ""
    return f"{type(error).__name__}: {text}{place}"
