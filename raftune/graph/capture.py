"""Capture of a whole step: forward, loss, backward and optimizer update as one functional ATen graph."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from raftune.graph.cleanup import (
    drop_unused_inputs,
    free_factories,
    lift_constants,
    own_results,
    remove_identities,
    replace_outputs,
    single_views,
)
from raftune.graph.errors import CaptureError, UnsupportedOptimizer
from raftune.graph.members import Attribute, Snapshot, attribute_name, buffers_of, has_gradient_hooks, parameters_of, restored
from raftune.graph.optimizer import OptimizerFactory, StateKey, apply_update, new_state, plan_groups
from raftune.graph.recurrence import EagerRecurrence, keep_workspaces, one_bias_gradient
from raftune.graph.settings import ModuleSettings
from raftune.graph.structure import BatchSpec, Loss, Result, ResultSpec, TensorLeaf, find_loss, flatten, plain, split_batch
from raftune.graph.tracing import compiling, random_nodes
from raftune.graph.training_graph import Kind, Slot, Source, TrainingGraph
from raftune.graph.workloads import CONSTANT_META

logger = logging.getLogger(__name__)

Mode = Literal["train", "infer"]
_CONSTANT_AT_INFERENCE = (Kind.PARAMETER, Kind.BUFFER, Kind.CONSTANT)


def capture(
    model: torch.nn.Module,
    inputs: Any,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | OptimizerFactory | None = None,
    mode: Mode = "train",
) -> TrainingGraph:
    """Trace one step of ``model`` on a batch like ``inputs``; neither model, optimizer nor random state is changed.

    ``inputs``: a tensor, a tuple of positional or a mapping of keyword arguments. Shapes, and values that are not
    tensors, become fixed. ``loss``: called as ``loss(outputs, *targets)``; its required parameters after the first are
    taken from ``inputs`` (the last entries of a tuple, the entries of those names of a mapping) and not given to the
    model. Without it the model returns its loss, or something with a ``loss`` entry. ``optimizer``: ``torch.optim.SGD``,
    ``Adam`` or ``AdamW`` over parameters of the model, or a function from the parameters to one. Without it the
    gradients are outputs. ``mode="infer"``: forward only, parameters constant; a loss only says which inputs are targets.

    The model is taken as its ``train()``/``eval()`` flags are. Raises :class:`CaptureError` or
    :class:`UnsupportedOptimizer` with the reason.
    """
    if mode not in ("train", "infer"):
        raise ValueError(f"mode must be 'train' or 'infer', not {mode!r}")
    if isinstance(loss, torch.nn.Module) and any(p.requires_grad for p in loss.parameters()):
        raise CaptureError(f"the loss {type(loss).__name__} has parameters of its own; make it part of the model")
    made = _resolve(optimizer, model) if mode == "train" else None
    return _Capture(model, plain(inputs), loss, made, mode).run()


def _resolve(
    optimizer: torch.optim.Optimizer | OptimizerFactory | None, model: torch.nn.Module
) -> torch.optim.Optimizer | None:
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if not callable(optimizer):
        raise UnsupportedOptimizer(f"optimizer must be from torch.optim, or a function of the parameters, not {optimizer!r}")
    made = optimizer([p for p in model.parameters() if p.requires_grad])
    if not isinstance(made, torch.optim.Optimizer):
        raise UnsupportedOptimizer(f"the optimizer function returned {type(made).__name__}, not a torch.optim optimizer")
    return made


class _Capture:
    """One capture: the inputs' slots are laid out first, the outputs' slots are found while the step is traced."""

    def __init__(
        self, model: torch.nn.Module, inputs: Any, loss: Loss | None, optimizer: torch.optim.Optimizer | None, mode: Mode
    ) -> None:
        self.model, self.inputs, self.loss, self.optimizer, self.mode = model, inputs, loss, optimizer, mode
        self.parameters, self.buffers = parameters_of(model), buffers_of(model)
        self.groups = plan_groups(optimizer, {m.name: m.tensor for m in self.parameters}) if optimizer is not None else []
        updated = {name for group in self.groups for name in group.names}
        trainable = [m.name for m in self.parameters if m.tensor.requires_grad and (optimizer is None or m.name in updated)]
        self.wanted = trainable if mode == "train" else []
        if mode == "train" and not trainable:
            raise CaptureError("no parameter to train: none requires a gradient and is in the optimizer")
        for member in self.parameters if mode == "train" else ():
            if has_gradient_hooks(member.tensor):
                raise CaptureError(f"parameter {member.name!r} has gradient hooks, which a captured step would not call")
        self.slots: list[Slot] = []
        self.fakes: list[Tensor] = []
        self.outputs: list[Slot] = []
        self.result: ResultSpec | None = None
        self.written: frozenset[Attribute] = frozenset()

    def run(self) -> TrainingGraph:
        batch = BatchSpec.of(self.inputs)
        self._lay_out(batch)
        graph_module = self._trace()
        self._settle_outputs(graph_module.graph)
        constants = lift_constants(graph_module)
        self.slots += [Slot(Kind.CONSTANT, index=index) for index in range(len(constants))]
        remove_identities(graph_module.graph)
        free_factories(graph_module.graph)
        single_views(graph_module.graph)
        keep_workspaces(graph_module.graph)
        one_bias_gradient(graph_module.graph)
        own_results(graph_module.graph, self.slots, self.outputs)
        graph_module.graph.eliminate_dead_code()
        kept = drop_unused_inputs(graph_module.graph, self.slots, self.outputs)
        if self.mode == "infer":
            self._mark_constants(graph_module.graph, kept)
        graph_module.recompile()
        if self.written:
            names = ", ".join(sorted(map(attribute_name, self.written)))
            logger.warning("the model sets %s in its forward pass, which the captured step does not", names)
        assert self.result is not None
        settings = ModuleSettings((self.model, self.loss), self.written)
        source = Source(
            self.model, self.loss, self.optimizer, tuple(self.groups), batch, self.result, tuple(constants), settings
        )
        return TrainingGraph(graph_module, tuple(kept), tuple(self.outputs), self.mode, source)

    def _lay_out(self, batch: BatchSpec) -> None:
        """A slot and an independent fake tensor for each placeholder."""
        fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
        tensors = {member.name: member.tensor for member in (*self.parameters, *self.buffers)}
        values = [(Slot(Kind.PARAMETER, m.name), m.tensor) for m in self.parameters]
        values += [(Slot(Kind.BUFFER, m.name), m.tensor) for m in self.buffers]
        for group in self.groups:
            for name in (n for n in group.names if n in self.wanted):
                values += [(Slot(Kind.STATE, name, key), new_state(tensors[name], key)) for key in group.state_keys]
        values += [(Slot(Kind.LEARNING_RATE, index=g.index), torch.zeros((), dtype=g.lr_dtype)) for g in self.groups]
        leaves = pytree.tree_leaves(self.inputs)
        values += [(Slot(Kind.INPUT, index=i), leaf) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        for slot, tensor in values:
            _check_tensor(slot, tensor)
            # Made anew rather than converted: two arguments that share memory now need not do so in the next call.
            with fake_mode:
                layout = batch.leaves[slot.index] if slot.kind is Kind.INPUT else TensorLeaf.of(tensor)
                fake = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=layout.device)
            self.slots.append(slot)
            self.fakes.append(fake)
        self.fake_mode = fake_mode

    def _trace(self) -> fx.GraphModule:
        with torch.random.fork_rng(devices=()):
            before = torch.random.get_rng_state()
            graph_module = self._trace_fakes()
            if self.written:
                # Whether these are results or state that the next step needs shows without their present values.
                self.outputs = []
                graph_module = self._trace_fakes(unreadable=self.written)
            if not torch.equal(torch.random.get_rng_state(), before):
                raise CaptureError("the model sets the random state itself, which a graph cannot do")
        return graph_module

    def _trace_fakes(self, unreadable: frozenset[Attribute] = frozenset()) -> fx.GraphModule:
        with (
            restored(self.model, self.loss) as before,
            compiling(),
            self.fake_mode,
            enable_python_dispatcher(),
            torch.set_grad_enabled(self.mode == "train"),
        ):
            for module, name in unreadable:
                module.__dict__[name] = _Unreadable()
            try:
                # An empty table: whole operators stay whole, as AOTAutograd hands them to a torch.compile backend.
                graph_module = make_fx(self._step, decomposition_table={}, tracing_mode="real")(*self.fakes)
            except CaptureError:
                raise
            except Exception as error:  # Whatever the user's model or loss raises on fake tensors means: not capturable.
                if unreadable:
                    raise _changes(unreadable) from error
                if "mutating a non-functional tensor" in str(error):
                    raise CaptureError(
                        "forward changes in place a tensor that is neither parameter nor buffer; register it as a buffer"
                    ) from error
                raise CaptureError(f"the step could not be traced: {type(error).__name__}: {error}") from error
            self._check_attributes(before, unreadable)
        return graph_module

    def _check_attributes(self, before: Snapshot, unreadable: frozenset[Attribute]) -> None:
        altered = before.altered()
        if altered:
            raise _changes(altered)
        assigned = frozenset(before.assigned())
        if unreadable and assigned != unreadable:
            raise _changes(assigned | unreadable)
        self.written = assigned

    def _step(self, *flat: Tensor) -> list[Tensor]:
        """The function that is traced; returns the settled outputs, then every input as the forward pass left it."""
        with FunctionalTensorMode(), EagerRecurrence():
            wrapped = [to_fun(tensor) for tensor in flat]
            parameters = {m.name: wrapped[i].detach() for i, m in enumerate(self.parameters)}
            for name in self.wanted:
                parameters[name].requires_grad_()
            buffers = {m.name: wrapped[len(self.parameters) + i] for i, m in enumerate(self.buffers)}
            for member in self.parameters:
                member.put(parameters[member.name])
            for member in self.buffers:
                member.put(buffers[member.name])
            inputs = self._with_inputs({s.index: t for s, t in zip(self.slots, wrapped, strict=True) if s.kind is Kind.INPUT})
            loss, tensors = self._forward(inputs)
            gradients = self._backward(loss, parameters)
            results = [_settled(t.detach()) for t in tensors]
            gradients = {name: _settled(gradient) for name, gradient in gradients.items()}
            after = [_settled(t) for t in wrapped]
            for index, member in enumerate(self.buffers):
                after[len(self.parameters) + index] = _settled(member.live)
        named: dict[Slot, Tensor] = dict(zip(self.slots, flat, strict=True))
        with torch.no_grad():
            self._update(named, gradients, results)
        return [*results, *after]

    def _with_inputs(self, tensors: dict[int, Tensor]) -> Any:
        leaves, structure = pytree.tree_flatten(self.inputs)
        return pytree.tree_unflatten([tensors.get(index, leaf) for index, leaf in enumerate(leaves)], structure)

    def _forward(self, inputs: Any) -> tuple[Tensor | None, list[Tensor]]:
        """The loss (when training), and the tensors to return: the loss and the tensors of the model's output."""
        call = split_batch(inputs, self.loss)
        outputs = self.model(*call.args, **call.kwargs)
        loss = None
        tensors = []
        if self.mode == "train":
            loss = self.loss(outputs, *call.targets) if self.loss is not None else find_loss(outputs)
            _check_loss(loss)
            self.outputs.append(Slot(Kind.LOSS))
            tensors.append(loss)
        leaves, structure = flatten(outputs)
        marked: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                marked.append(Result(sum(isinstance(m, Result) for m in marked)))
                self.outputs.append(Slot(Kind.OUTPUT, index=marked[-1].index))
                tensors.append(leaf)
            elif leaf is None or isinstance(leaf, bool | int | float | str):
                marked.append(leaf)
            else:
                logger.warning("the model's output holds a %s, which the captured step returns as None", type(leaf).__name__)
                marked.append(None)
        self.result = ResultSpec(structure, tuple(marked))
        return loss, tensors

    def _backward(self, loss: Tensor | None, parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        if loss is None:
            return {}
        if not loss.requires_grad:
            raise CaptureError("the loss does not depend on any parameter that is to be trained")
        drawn = random_nodes()
        found = torch.autograd.grad(loss, [parameters[name] for name in self.wanted], allow_unused=True)
        if random_nodes() != drawn:
            raise CaptureError(
                "the backward pass draws random numbers anew: activation checkpointing around dropout is not captured; "
                "turn checkpointing off"
            )
        return {name: gradient for name, gradient in zip(self.wanted, found, strict=True) if gradient is not None}

    def _update(self, named: dict[Slot, Tensor], gradients: dict[str, Tensor], results: list[Tensor]) -> None:
        """Append the optimizer's new values, or without an optimizer the gradients."""
        if self.optimizer is None:
            for name, gradient in gradients.items():
                self.outputs.append(Slot(Kind.GRADIENT, name))
                results.append(gradient)
            return
        parameters = {slot.name: tensor for slot, tensor in named.items() if slot.kind is Kind.PARAMETER}
        states: dict[StateKey, Tensor] = {(s.name, s.key): tensor for s, tensor in named.items() if s.kind is Kind.STATE}
        for group in self.groups:
            lr = named[Slot(Kind.LEARNING_RATE, index=group.index)]
            new_parameters, new_states = apply_update(group, parameters, gradients, states, lr)
            self.outputs += [Slot(Kind.PARAMETER, name) for name in new_parameters]
            self.outputs += [Slot(Kind.STATE, name, key) for name, key in new_states]
            results += [*new_parameters.values(), *new_states.values()]

    def _settle_outputs(self, graph: fx.Graph) -> None:
        """Keep of the inputs' final values the buffers that changed; a changed parameter or input cannot be captured."""
        returned = list(graph.output_node().args[0])  # type: ignore[arg-type]
        settled, after = returned[: len(self.outputs)], returned[len(self.outputs) :]
        placeholders = [node for node in graph.nodes if node.op == "placeholder"]
        for slot, placeholder, value in zip(self.slots, placeholders, after, strict=True):
            if value is placeholder:
                continue
            if slot.kind is not Kind.BUFFER:
                what = f"parameter {slot.name!r}" if slot.kind is Kind.PARAMETER else f"input {slot.index}"
                raise CaptureError(f"the model changes its {what} in place, which a functional graph cannot carry back")
            _check_same_layout(slot, placeholder.meta["val"], value.meta["val"])
            self.outputs.append(slot)
            settled.append(value)
        replace_outputs(graph, settled)

    def _mark_constants(self, graph: fx.Graph, slots: list[Slot]) -> None:
        changed = set(self.outputs)
        for node, slot in zip(graph.nodes, slots, strict=False):
            if slot.kind in _CONSTANT_AT_INFERENCE and slot not in changed:
                node.meta[CONSTANT_META] = True


class _Unreadable:
    """In the place of an attribute that the forward pass assigns: any use before that fails."""

    def __bool__(self) -> bool:
        raise TypeError("read before it was assigned")

    __eq__ = __hash__ = None  # type: ignore[assignment]


def _changes(attributes: Iterable[Attribute]) -> CaptureError:
    names = ", ".join(sorted({attribute_name(attribute) for attribute in attributes}))
    return CaptureError(
        f"forward changes attribute {names}, which a captured step would not; register it as a buffer "
        "(or, if it is a cache that the first forward pass fills, run the model once before capturing it)"
    )


def _check_tensor(slot: Slot, tensor: Tensor) -> None:
    what = f"{slot.kind} {slot.name or slot.index}"
    if torch.nn.parameter.is_lazy(tensor):
        raise CaptureError(f"{what} is not initialized yet; run the model once before capturing it")
    if tensor.layout is not torch.strided:
        raise CaptureError(f"{what} has the layout {tensor.layout}; only strided tensors are captured")


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise CaptureError(f"the loss must be a tensor of one element, not {what}")


def _check_same_layout(slot: Slot, before: Tensor, after: Tensor) -> None:
    if before.shape != after.shape or before.dtype != after.dtype:
        have, got = f"{before.dtype} {tuple(before.shape)}", f"{after.dtype} {tuple(after.shape)}"
        raise CaptureError(f"the model turns its buffer {slot.name!r} from {have} into {got}; only its values may change")


def _settled(tensor: Tensor) -> Tensor:
    """The plain tensor behind a functional one, after all that was written to it."""
    value = from_fun(tensor)
    assert isinstance(value, Tensor)
    return value
