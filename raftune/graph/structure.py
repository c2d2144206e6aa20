"""Splitting a batch into what the model and the loss take, and flattening what a model returns."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from raftune.graph.errors import BatchMismatch, CaptureError

Loss = Callable[..., torch.Tensor]
_LEAVES = (torch.Tensor, bool, int, float, str, torch.dtype, torch.device)


@dataclass(frozen=True)
class Call:
    """One batch taken apart: ``model(*args, **kwargs)``, then ``loss(outputs, *targets)``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    targets: tuple[Any, ...]


def split_batch(inputs: Any, loss: Loss | None) -> Call:
    """Decide what of ``inputs`` goes to the model and what to the loss.

    A tensor is the model's only argument, a tuple or list its positional arguments, a mapping its keyword arguments. The
    required parameters of ``loss`` after its first (the outputs) are targets: the last entries of a tuple, or the entries
    of a mapping that have the parameters' names. The model does not see them.
    """
    names = _target_names(loss) if loss is not None else ()
    if isinstance(inputs, Mapping):
        missing = [name for name in names if name not in inputs]
        if missing:
            raise CaptureError(f"the loss takes {', '.join(names)}, but the inputs lack {missing[0]!r}: {sorted(inputs)}")
        kwargs = {key: value for key, value in inputs.items() if key not in names}
        return Call((), kwargs, tuple(inputs[name] for name in names))
    args = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    if len(names) >= len(args) and names:
        raise CaptureError(f"the loss takes {len(names)} target(s) ({', '.join(names)}), but there are only {len(args)} inputs")
    cut = len(args) - len(names)
    return Call(args[:cut], {}, args[cut:])


def _target_names(loss: Loss) -> tuple[str, ...]:
    function = loss.forward if isinstance(loss, torch.nn.Module) else loss
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise CaptureError(f"the loss {loss!r} has no readable signature; wrap it: lambda outputs, target: ...") from error
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise CaptureError(f"the loss {loss!r} takes *args, so its number of targets is unknown; name its parameters")
    required = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not required:
        raise CaptureError(f"the loss {loss!r} must take the model's outputs as its first parameter")
    return tuple(p.name for p in required[1:])


@dataclass(frozen=True)
class Structure:
    """How to rebuild a value from its leaves; dataclasses that pytree does not know are taken apart by their fields."""

    spec: pytree.TreeSpec
    nested: tuple[tuple[Any, tuple[str, ...], Structure] | None, ...]

    def restore(self, leaves: list[Any]) -> Any:
        """The value that has these leaves; consumes ``leaves`` from the front."""
        return pytree.tree_unflatten([self._entry(entry, leaves) for entry in self.nested], self.spec)

    @staticmethod
    def _entry(entry: tuple[Any, tuple[str, ...], Structure] | None, leaves: list[Any]) -> Any:
        if entry is None:
            return leaves.pop(0)
        cls, names, structure = entry
        value = object.__new__(cls)
        for name, field in zip(names, structure.restore(leaves), strict=True):
            object.__setattr__(value, name, field)
        return value


@dataclass(frozen=True)
class ResultSpec:
    """A model's output: its structure, and its leaves, where ``Result(i)`` stands for the graph's i-th output tensor."""

    structure: Structure
    leaves: tuple[Any, ...]

    def restore(self, tensors: list[torch.Tensor]) -> Any:
        return self.structure.restore([tensors[leaf.index] if isinstance(leaf, Result) else leaf for leaf in self.leaves])


@dataclass(frozen=True, slots=True)
class Result:
    index: int


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Leaves of ``value`` (pytree's, and those inside dataclasses), and the way back."""
    top, spec = pytree.tree_flatten(value)
    leaves: list[Any] = []
    nested: list[tuple[Any, tuple[str, ...], Structure] | None] = []
    for leaf in top:
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            names = tuple(field.name for field in dataclasses.fields(leaf))
            inner, structure = flatten([getattr(leaf, name) for name in names])
            leaves.extend(inner)
            nested.append((type(leaf), names, structure))
        else:
            leaves.append(leaf)
            nested.append(None)
    return leaves, Structure(spec, tuple(nested))


def find_loss(outputs: Any) -> torch.Tensor:
    """The loss in what a model returned: the output itself, or its ``loss`` entry. Raises :class:`CaptureError`."""
    if isinstance(outputs, torch.Tensor):
        found: Any = outputs
    elif isinstance(outputs, Mapping):
        found = outputs.get("loss")
    else:
        found = getattr(outputs, "loss", None)
    if not isinstance(found, torch.Tensor):
        raise CaptureError(f"loss=None, but the model returned {type(outputs).__name__} without a tensor 'loss'; pass loss=")
    return found


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """A tensor of the batch: its layout is part of the graph."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: torch.device

    @staticmethod
    def of(tensor: torch.Tensor) -> TensorLeaf:
        """The tensor's own layout, or a dense one if its elements share memory, as an expanded tensor's do."""
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        if _overlaps(shape, stride):
            stride = tuple(torch.empty(shape, device="meta").stride())
        return TensorLeaf(tensor.dtype, shape, stride, tensor.device)


@dataclass(frozen=True)
class BatchSpec:
    """The batches that a graph takes: their structure, the layout of tensors, the values of everything else."""

    structure: pytree.TreeSpec
    leaves: tuple[Any, ...]

    @staticmethod
    def of(inputs: Any) -> BatchSpec:
        """Raises :class:`CaptureError` for a leaf that is neither a tensor nor a plain constant."""
        leaves, structure = pytree.tree_flatten(plain(inputs))
        for index, leaf in enumerate(leaves):
            if leaf is not None and not isinstance(leaf, _LEAVES):
                raise CaptureError(f"input {index} is a {type(leaf).__name__}; pass tensors, or plain constants")
        return BatchSpec(structure, tuple(TensorLeaf.of(x) if isinstance(x, torch.Tensor) else x for x in leaves))

    def leaves_of(self, inputs: Any) -> list[Any]:
        """The batch's leaves with tensors in the captured layout; :class:`BatchMismatch` if it is another kind of batch."""
        leaves, structure = pytree.tree_flatten(plain(inputs))
        if structure != self.structure:
            raise BatchMismatch(f"the batch has the structure {structure}, captured was {self.structure}")
        for index, (leaf, want) in enumerate(zip(leaves, self.leaves, strict=True)):
            if isinstance(want, TensorLeaf):
                leaves[index] = _conform(leaf, want, index)
            elif type(leaf) is not type(want) or leaf != want:
                raise BatchMismatch(f"input {index} is {leaf!r}, captured as the constant {want!r}")
        return leaves


def plain(inputs: Any) -> Any:
    """Mappings as plain dicts, which pytree takes apart (a tokenizer's BatchEncoding it does not)."""
    return dict(inputs) if isinstance(inputs, Mapping) else inputs


def _overlaps(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def _conform(leaf: Any, want: TensorLeaf, index: int) -> torch.Tensor:
    if not isinstance(leaf, torch.Tensor):
        raise BatchMismatch(f"input {index} is {leaf!r}, captured as a tensor of shape {want.shape}")
    if leaf.shape != want.shape or leaf.dtype != want.dtype or leaf.device != want.device:
        have = f"{leaf.dtype} {tuple(leaf.shape)} on {leaf.device}"
        raise BatchMismatch(f"input {index} is {have}, captured as {want.dtype} {want.shape} on {want.device}")
    if leaf.stride() == want.stride:
        return leaf
    return torch.empty_strided(want.shape, want.stride, dtype=want.dtype, device=want.device).copy_(leaf)
