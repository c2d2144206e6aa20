"""What cannot be captured, and the words in which that is said."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from raftune.graph import CaptureError, capture


def square(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


class DependsOnValues(Scales):
    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum() if x.sum() > 0 else self.weight.sum()


class ChangesItsInput(Scales):
    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x.add_(1)).sum()


class ChangesItsParameter(Scales):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(0, 1)
        return (self.weight * x).sum()


class GrowsABuffer(Scales):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.sum()[None]])
        return (self.weight * x).sum()


class Checkpointed(Scales):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda y: functional.dropout(self.weight * y).tanh(), x, use_reentrant=False).sum()


class Seeds(Scales):
    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(4)
        return functional.dropout(self.weight * x).sum()


@pytest.mark.parametrize(
    ("model", "loss", "message"),
    [
        (DependsOnValues(), None, "could not be traced: DataDependent"),
        (ChangesItsInput(), None, "changes its input 0 in place"),
        (ChangesItsParameter(), None, "changes its parameter 'weight' in place"),
        (GrowsABuffer(), None, r"buffer 'seen' from torch.float32 \(1,\) into torch.float32 \(2,\)"),
        (Checkpointed(), None, "backward pass draws random numbers"),
        (Seeds(), None, "sets the random state"),
        (nn.Linear(3, 3), None, "must be a tensor of one element, not a tensor of shape"),
        (nn.LSTM(3, 3), None, "returned tuple without a tensor 'loss'"),
        (nn.Linear(3, 3), lambda *y: y[0].sum(), "number of targets is unknown"),
        (nn.Linear(3, 3), lambda y, target: (y - target).sum(), "takes 1 target"),
        (nn.LazyLinear(3), square, "run the model once"),
        (nn.Linear(3, 3).requires_grad_(False), square, "no parameter to train"),
    ],
)
def test_what_cannot_be_captured_says_why(model, loss, message):
    with pytest.raises(CaptureError, match=message):
        capture(model, torch.ones(1, 3), loss=loss, optimizer=None)


def test_input_that_is_no_tensor_is_named():
    with pytest.raises(CaptureError, match="input 0 is a ndarray"):
        capture(nn.Linear(3, 3), (torch.ones(1, 3).numpy(),), loss=square)


def test_unknown_mode():
    with pytest.raises(ValueError, match="'train' or 'infer'"):
        capture(nn.Linear(3, 3), torch.ones(1, 3), mode="eval")
