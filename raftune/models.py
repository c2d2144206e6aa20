"""Built-in tuning targets: small models of the usual kinds, in plain PyTorch, with random weights and random batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_SEED = 0


@dataclass(frozen=True)
class Target:
    """What is tuned: a model, one example batch, and optionally its loss and optimizer.

    ``inputs``, ``loss`` and ``optimizer`` mean what they mean to :func:`raftune.graph.capture`: a tensor, a tuple or a mapping;
    a function of the outputs and targets, or ``None`` if the model returns its loss; a function from parameters to a
    ``torch.optim`` optimizer, or ``None`` for a step without an update.
    """

    model: nn.Module
    inputs: Any
    loss: Callable[..., Tensor] | None = None
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None


def gpt(batch: int = 4) -> Target:
    """A decoder of 4 layers, width 256, vocabulary 2048, with tied embeddings; ``batch`` sequences of 128 tokens, AdamW."""
    generator = _seeded()
    tokens = torch.randint(2048, (batch, 129), generator=generator)
    inputs = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    return Target(Gpt(vocabulary=2048, width=256, heads=4, layers=4, context=128), inputs, None, _adamw)


def bert(batch: int = 4) -> Target:
    """An encoder of 4 layers, width 256, vocabulary 2048, dropout 0.1; padded sequences of 128 tokens, 15% masked, AdamW."""
    generator = _seeded()
    tokens = torch.randint(2048, (batch, 128), generator=generator)
    masked = torch.rand(batch, 128, generator=generator) < 0.15
    lengths = torch.tensor([128, 120, 100, 64])[torch.arange(batch) % 4]
    attention = torch.arange(128) < lengths[:, None]
    inputs = {
        "tokens": tokens.masked_fill(masked, 1),
        "attention": attention,
        "labels": tokens.masked_fill(~masked | ~attention, -100),
    }
    return Target(Bert(vocabulary=2048, width=256, heads=4, layers=4, context=128, dropout=0.1), inputs, None, _adamw)


def resnet(batch: int = 8) -> Target:
    """A residual network of 18 layers with batch normalization; images of 3x64x64 in 10 classes, smoothed labels, AdamW.

    With hard labels and larger steps it knows the one batch by heart soon, and a loss near 0 is mostly rounding: not even two
    memory formats of PyTorch's own agree on it.
    """
    generator = _seeded()
    inputs = (torch.randn(batch, 3, 64, 64, generator=generator), torch.randint(10, (batch,), generator=generator))
    loss = partial(functional.cross_entropy, label_smoothing=0.1)
    return Target(ResNet(widths=(64, 128, 256, 512), blocks=2, classes=10), inputs, loss, partial(_adamw, lr=1e-4))


def mlp(batch: int = 256) -> Target:
    """Three linear layers 784-1024-1024-10 with GELU; ``batch`` vectors, SGD with momentum."""
    generator = _seeded()
    model = nn.Sequential(nn.Linear(784, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 10))
    inputs = (torch.randn(batch, 784, generator=generator), torch.randint(10, (batch,), generator=generator))
    return Target(model, inputs, functional.cross_entropy, _sgd)


BUILT_IN: dict[str, Callable[[], Target]] = {"gpt": gpt, "bert": bert, "resnet": resnet, "mlp": mlp}
"""Targets by name; each call seeds PyTorch and makes a fresh, equal target."""


class Attention(nn.Module):
    """Multi-head self-attention over ``(batch, length, width)``; ``mask`` is True where a key may be seen."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, width = x.shape
        query, key, value = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        x = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=self.causal)
        result: Tensor = self.out(x.transpose(1, 2).reshape(batch, length, width))
        return result


class FeedForward(nn.Sequential):
    """Width to four times the width and back."""

    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class GptBlock(nn.Module):
    """A decoder layer that normalizes before attention and before the feed-forward part."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.feed_forward = Attention(width, heads, causal=True), FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        result: Tensor = x + self.feed_forward(self.norm2(x))
        return result


class Gpt(nn.Module):
    """Decoder-only language model; the output projection is the token embedding. Returns the loss if given targets."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(GptBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(_initialize)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits if targets is None else functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class BertBlock(nn.Module):
    """An encoder layer that normalizes after each residual sum."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.feed_forward = Attention(width, heads, causal=False), FeedForward(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attention(x, mask)))
        result: Tensor = self.norm2(x + self.dropout(self.feed_forward(x)))
        return result


class Bert(nn.Module):
    """Encoder with a masked-token head. Returns logits or, given labels (-100: not masked), the loss."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, context: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.blocks = nn.ModuleList(BertBlock(width, heads, dropout) for _ in range(layers))
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
        self.head = nn.Linear(width, vocabulary)
        self.apply(_initialize)

    def forward(self, tokens: Tensor, attention: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        x = self.dropout(self.norm(x))
        mask = attention[:, None, None, :]
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.head(self.transform(x))
        if labels is None:
            return {"logits": logits}
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)}


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch normalization and a shortcut, projected where the shape changes."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Residual network: a stem that quarters the image, one stage per width (all but the first halve it), a classifier."""

    def __init__(self, widths: tuple[int, ...], blocks: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 7, 2, 3, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        layers: list[nn.Module] = []
        before = widths[0]
        for stage, width in enumerate(widths):
            for block in range(blocks):
                layers.append(ResidualBlock(before, width, 2 if stage > 0 and block == 0 else 1))
                before = width
        self.layers = nn.Sequential(*layers)
        self.classifier = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.layers(self.stem(images)).mean((2, 3))
        result: Tensor = self.classifier(x)
        return result


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _seeded() -> torch.Generator:
    torch.manual_seed(_SEED)
    return torch.Generator().manual_seed(_SEED)


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def _adamw(parameters: Iterable[nn.Parameter], lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr)
