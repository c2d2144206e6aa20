"""The lowered form of a training graph: the optimizer and the buffers are updated in place."""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef

from raftune.graph.cleanup import placeholders_of, replace_outputs
from raftune.graph.training_graph import Kind, Slot, TrainingGraph

_aten = torch.ops.aten
# Functional operator -> in-place overload, and for each of its results the position of the argument list it is written to.
_IN_PLACE: dict[object, tuple[torch._ops.OpOverload, dict[int, int]]] = {
    _aten._fused_adamw.tensor_lr: (_aten._fused_adamw_.tensor_lr, {0: 0, 2: 2, 3: 3, 4: 4}),
    _aten._fused_adam.tensor_lr: (_aten._fused_adam_.tensor_lr, {0: 0, 2: 2, 3: 3, 4: 4}),
    _aten._fused_sgd.tensor_lr: (_aten._fused_sgd_.tensor_lr, {0: 0, 2: 2}),
    _aten._foreach_add.Scalar: (_aten._foreach_add_.Scalar, {}),
}
_WRITTEN_BACK = (Kind.PARAMETER, Kind.BUFFER, Kind.STATE)


def reinplace(graph: TrainingGraph) -> TrainingGraph:
    """A copy of ``graph`` that writes new parameters, state and buffers into its inputs instead of returning them.

    The optimizer's operator becomes its in-place overload where nothing reads an old value afterwards; every other new
    value is written by ``copy_`` at the end. What the graph still returns (loss, outputs, gradients) never shares memory
    with an input that it changes.
    """
    fx_graph = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    fx_graph.output(fx_graph.graph_copy(graph.graph_module.graph, mapping))
    for old, new in mapping.items():
        new.meta = dict(old.meta)
    for node in list(fx_graph.nodes):
        if node.target in _IN_PLACE:
            _try_in_place(fx_graph, node)
    outputs = _write_back(fx_graph, graph.inputs, graph.outputs)
    fx_graph.eliminate_dead_code()
    fx_graph.lint()
    module = fx.GraphModule(torch.nn.Module(), fx_graph)
    return TrainingGraph(module, graph.inputs, tuple(outputs), graph.mode, graph.source)


def _try_in_place(graph: fx.Graph, node: fx.Node) -> None:
    target, written = _IN_PLACE[node.target]
    results = _results(node, nested=bool(written))
    if results is None:
        return
    pairs = []  # (placeholder that is overwritten, nodes that read its new value)
    for result, argument in (written or {0: 0}).items():
        destinations = node.args[argument]
        assert isinstance(destinations, list | tuple)
        pairs += [(destination, results.get((result, index), [])) for index, destination in enumerate(destinations)]
    if any(not isinstance(d, fx.Node) or d.op != "placeholder" for d, _ in pairs):
        return
    news = {reader for _, readers in pairs for reader in readers}
    own = {node, *news, *node.users}
    storages = {storage for destination, _ in pairs for storage in _storages(destination)}
    later = node.next
    while later.op != "root":
        if later not in own and any(s in storages for a in later.all_input_nodes if a not in own for s in _storages(a)):
            return
        later = later.next
    with graph.inserting_before(node):
        in_place = graph.call_function(target, node.args, dict(node.kwargs))
    in_place.meta = {"val": None}
    for destination, readers in pairs:
        for reader in readers:
            reader.replace_all_uses_with(destination)
    for dead in dict.fromkeys([*news, *node.users, node]):
        if not dead.users:
            graph.erase_node(dead)


def _results(node: fx.Node, nested: bool) -> dict[tuple[int, int], list[fx.Node]] | None:
    """Which nodes take result ``i``'s element ``j`` out of the operator's value; ``None`` if it is used otherwise."""
    found: dict[tuple[int, int], list[fx.Node]] = {}
    for user in node.users:
        if user.target is not operator.getitem:
            return None
        if not nested:
            found.setdefault((0, user.args[1]), []).append(user)  # type: ignore[arg-type]
            continue
        for inner in user.users:
            if inner.target is not operator.getitem:
                return None
            found.setdefault((user.args[1], inner.args[1]), []).append(inner)  # type: ignore[arg-type]
    return found


def _write_back(graph: fx.Graph, inputs: tuple[Slot, ...], outputs: tuple[Slot, ...]) -> list[Slot]:
    """Copy what is not in place yet into its placeholder; keeps the other outputs and returns their slots."""
    placeholder = dict(zip(inputs, placeholders_of(graph), strict=True))
    returned = list(graph.output_node().args[0])  # type: ignore[arg-type]
    copies = [
        (placeholder[slot], value)
        for slot, value in zip(outputs, returned, strict=True)
        if slot.kind in _WRITTEN_BACK and value is not placeholder[slot]
    ]
    rest = [(slot, value) for slot, value in zip(outputs, returned, strict=True) if slot.kind not in _WRITTEN_BACK]
    overwritten = {storage for destination, _ in copies for storage in _storages(destination)}
    with graph.inserting_before(graph.output_node()):
        copies = [(destination, _own(graph, value, overwritten)) for destination, value in copies]
        kept = [_own(graph, value, overwritten) for _, value in rest]
        for destination, value in copies:
            copy = graph.call_function(_aten.copy_.default, (destination, value))
            copy.meta["val"] = destination.meta["val"]
    replace_outputs(graph, kept)
    return [slot for slot, _ in rest]


def _own(graph: fx.Graph, value: fx.Node, overwritten: set[StorageWeakRef]) -> fx.Node:
    """``value``, or a copy of it if it lies in memory that is about to be overwritten."""
    if not any(storage in overwritten for storage in _storages(value)):
        return value
    clone = graph.call_function(_aten.clone.default, (value,))
    clone.meta["val"] = value.meta["val"].clone()
    return clone


def _storages(node: fx.Node) -> Iterator[StorageWeakRef]:
    value = node.meta.get("val")
    for item in value if isinstance(value, list | tuple) else (value,):
        if isinstance(item, Tensor):
            yield StorageWeakRef(item.untyped_storage())  # type: ignore[no-untyped-call]
