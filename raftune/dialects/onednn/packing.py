"""Weights in oneDNN's own blocked layouts: packed at every call, or once for a weight that does not change."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Packed weights that one kernel keeps: it serves every layer with the same specs. Beyond that the oldest is dropped.
_KEPT = 128


def pack_once(pack: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``pack`` with its results kept, and made anew for a weight that was written since.

    A weight is known by its address and version counter. It is kept alive beside its packed form, or its address could come
    to mean another tensor. Inference tensors count no versions and are packed at every call.
    """
    kept: OrderedDict[int, tuple[int, Tensor, Tensor]] = OrderedDict()

    def packed(weight: Tensor) -> Tensor:
        if weight.is_inference():
            return pack(weight)
        address, version = weight.data_ptr(), weight._version
        entry = kept.get(address)
        if entry is not None and entry[0] == version:
            return entry[2]
        result = pack(weight)
        kept[address] = (version, weight, result)
        kept.move_to_end(address)
        if len(kept) > _KEPT:
            kept.popitem(last=False)
        return result

    return packed


def choose(pack: Callable[[Tensor], Tensor], weight: str) -> Callable[[Tensor], Tensor]:
    """How the weight reaches the kernel: ``plain`` as it is, ``packed`` at every call, ``packed_once``."""
    if weight == "plain":
        return lambda tensor: tensor
    return pack_once(pack) if weight == "packed_once" else pack
