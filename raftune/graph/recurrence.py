"""Recurrent layers as eager runs them, where tracing would take another way."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
_aten = torch.ops.aten
# ideep's number for the kind of recurrence.
_LSTM = 2
# Which results of the layer and of its backward these are.
_WORKSPACE = 3
_BIAS_GRADIENTS = (3, 4)


class EagerRecurrence(TorchFunctionMode):
    """Trace recurrent layers as eager runs them rather than through PyTorch's Python decompositions.

    The decompositions (seen in 2.13) leave out the dropout between layers, and take an oneDNN operator without a backward
    when the input needs no gradient. Eager runs a float32 LSTM by oneDNN, a sequence at a time, and everything else as
    the matrix products and activations of every time step.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name not in _RECURRENT:
            return func(*args, **(kwargs or {}))
        if name == "lstm" and not kwargs and _runs_in_onednn(*args):
            return _onednn_lstm(*args)
        with torch._C._DisablePythonDispatcher(), _without_onednn():
            return func(*args, **(kwargs or {}))


def _runs_in_onednn(inputs: Any, state: Any, weights: Any, *rest: Any) -> bool:
    """As eager decides it (aten/src/ATen/native/RNN.cpp), for one dtype; a packed sequence comes with other arguments."""
    if not isinstance(state, list | tuple) or not isinstance(weights, list | tuple) or len(rest) != 6:
        return False
    tensors = [inputs, *state, *weights]
    plain = all(isinstance(t, Tensor) and t.dtype == torch.float32 and t.device.type == "cpu" for t in tensors)
    projected = plain and state[0].shape[2] != state[1].shape[2]
    return plain and not projected and inputs.dim() == 3 and inputs.numel() > 0 and torch._C._get_mkldnn_enabled()


def _onednn_lstm(
    inputs: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer by layer, as eager does it (aten/src/ATen/native/mkldnn/RNN.cpp)."""
    x = (inputs.transpose(0, 1) if batch_first else inputs).contiguous()
    hidden, cell = (part.contiguous() for part in state)
    directions, per_layer = 1 + bidirectional, 4 if has_biases else 2
    hiddens, cells = [], []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            own = list(weights[index * per_layer : (index + 1) * per_layer])
            if not has_biases:
                own += [torch.zeros_like(own[0]), torch.zeros_like(own[1])]
            size = hidden.shape[2]
            output, last_hidden, last_cell, _ = _aten.mkldnn_rnn_layer.default(
                x,
                *own,
                hidden[index],
                cell[index],
                direction > 0,
                [],
                _LSTM,
                size,
                layers,
                has_biases,
                bidirectional,
                batch_first,
                train,
            )
            outputs.append(output)
            hiddens.append(last_hidden)
            cells.append(last_cell)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and train and layer < layers - 1:
            x = torch.dropout(x, dropout, True)
    return (x.transpose(0, 1) if batch_first else x), torch.stack(hiddens), torch.stack(cells)


def keep_workspaces(graph: fx.Graph) -> None:
    """Let oneDNN's layers return the workspace that their backward reads: they do only while gradients are enabled."""
    for node in graph.find_nodes(op="call_function", target=_aten.mkldnn_rnn_layer.default):
        if any(user.target is operator.getitem and user.args[1] == _WORKSPACE and user.users for user in node.users):
            node.target = layer_with_workspace


def one_bias_gradient(graph: fx.Graph) -> None:
    """Read the gradient of both biases from one place: it is one tensor, which tracing finds under either name."""
    for node in graph.find_nodes(op="call_function", target=_aten.mkldnn_rnn_layer_backward.default):
        found = [user for user in node.users if user.target is operator.getitem and user.args[1] in _BIAS_GRADIENTS]
        for item in found:
            item.args = (node, _BIAS_GRADIENTS[0])
        for item in found[1:]:
            item.replace_all_uses_with(found[0])
            graph.erase_node(item)


def layer_with_workspace(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``aten.mkldnn_rnn_layer`` as in training, without recording anything for autograd."""
    with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
        result: tuple[Tensor, Tensor, Tensor, Tensor] = _aten.mkldnn_rnn_layer.default(*args)
    return result


@contextmanager
def _without_onednn() -> Iterator[None]:
    # torch.backends.mkldnn.flags would touch, and warn about, settings for other devices too.
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)
