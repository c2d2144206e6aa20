"""Eight models, each with a small and a moderate batch, as targets: ``raftune tune model scripts/bench_models.py:vit``.

Four are raftune's built-in models; the others are here, written as their users write them. A model's name is its moderate
batch, ``NAME_small`` the small one. Every call makes a fresh, equal target.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from raftune import models
from raftune.models import Attention, FeedForward, Target

MODELS = ("mlp", "resnet", "mobilenet", "bert", "gpt", "llama", "vit", "lstm")
CASES = tuple(case for model in MODELS for case in (f"{model}_small", model))
_SEED = 0


def mlp() -> Target:
    return models.mlp()


def mlp_small() -> Target:
    return models.mlp(batch=8)


def resnet() -> Target:
    return models.resnet()


def resnet_small() -> Target:
    return models.resnet(batch=2)


def bert() -> Target:
    return models.bert()


def bert_small() -> Target:
    return models.bert(batch=1)


def gpt() -> Target:
    return models.gpt()


def gpt_small() -> Target:
    return models.gpt(batch=1)


def mobilenet(batch: int = 8) -> Target:
    """Inverted residuals with depthwise convolutions; images of 3x64x64 in 10 classes, smoothed labels, AdamW."""
    return _images(lambda: MobileNet(((32, 2, 1), (64, 2, 2), (128, 3, 2), (256, 2, 2)), classes=10), batch)


def mobilenet_small() -> Target:
    return mobilenet(batch=1)


def vit(batch: int = 8) -> Target:
    """A vision transformer of 4 layers, width 256; images of 3x64x64 in patches of 8x8, 10 classes, smoothed labels, AdamW."""
    return _images(lambda: VisionTransformer(size=64, patch=8, width=256, heads=4, layers=4, classes=10), batch)


def vit_small() -> Target:
    return vit(batch=1)


def llama(batch: int = 4) -> Target:
    """A decoder of 4 layers with RMSNorm, SwiGLU and rotary positions, width 256, vocabulary 2048; 128 tokens each, AdamW."""
    return _tokens(lambda: Llama(vocabulary=2048, width=256, hidden=688, heads=4, layers=4, context=128), batch, 128)


def llama_small() -> Target:
    return llama(batch=1)


def lstm(batch: int = 32) -> Target:
    """A language model of 2 LSTM layers of width 256, vocabulary 2048; sequences of 32 tokens, AdamW."""
    return _tokens(lambda: LstmLanguageModel(vocabulary=2048, width=256, layers=2), batch, 32)


def lstm_small() -> Target:
    return lstm(batch=4)


class InvertedResidual(nn.Module):
    """1x1 expansion, 3x3 depthwise convolution, 1x1 projection, each normalized; a shortcut where the shape stays."""

    def __init__(self, before: int, after: int, stride: int, expansion: int = 4) -> None:
        super().__init__()
        hidden = expansion * before
        self.layers = nn.Sequential(
            *_convolution(before, hidden, 1),
            nn.ReLU6(),
            *_convolution(hidden, hidden, 3, stride, groups=hidden),
            nn.ReLU6(),
            *_convolution(hidden, after, 1),
        )
        self.shortcut = stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x) if self.shortcut else self.layers(x)


class MobileNet(nn.Module):
    """A stem that halves the image, stages of ``(width, blocks, stride)``, a classifier."""

    def __init__(self, stages: Iterable[tuple[int, int, int]], classes: int) -> None:
        super().__init__()
        before = 32
        layers: list[nn.Module] = [*_convolution(3, before, 3, 2), nn.ReLU6()]
        for width, blocks, stride in stages:
            for block in range(blocks):
                layers.append(InvertedResidual(before, width, stride if block == 0 else 1))
                before = width
        self.layers = nn.Sequential(*layers)
        self.classifier = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.classifier(self.layers(images).mean((2, 3)))


class VisionTransformer(nn.Module):
    """Patches with a class token and learned positions through a pre-norm encoder; the class token is classified."""

    def __init__(self, size: int, patch: int, width: int, heads: int, layers: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(EncoderBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class EncoderBlock(nn.Module):
    """Attention to everything and a feed-forward part, each normalized before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.feed_forward = Attention(width, heads, causal=False), FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed_forward(self.norm2(x))


class Llama(nn.Module):
    """Decoder-only language model without biases. Returns the loss if given targets."""

    def __init__(self, vocabulary: int, width: int, hidden: int, heads: int, layers: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, hidden, heads) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.head = nn.Linear(width, vocabulary, bias=False)
        size = width // heads
        angles = torch.outer(torch.arange(context), 10000.0 ** (-torch.arange(0, size, 2) / size)).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.apply(_initialize)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, cos, sin)
        return _language_loss(self.head(self.norm(x)), targets)


class LlamaBlock(nn.Module):
    """Causal attention with rotary positions, then SwiGLU, each normalized before."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.query, self.key = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.value, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x), cos, sin)
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    def attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.query, self.key, self.value))
        query, key = query * cos + _rotated(query) * sin, key * cos + _rotated(key) * sin
        x = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(x.transpose(1, 2).flatten(2))


class LstmLanguageModel(nn.Module):
    """Embedding, LSTM layers, output projection. Returns the loss if given targets."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.recurrent = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x, _ = self.recurrent(self.tokens(tokens))
        return _language_loss(self.head(x), targets)


def _convolution(before: int, after: int, size: int, stride: int = 1, groups: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(before, after, size, stride, size // 2, groups=groups, bias=False), nn.BatchNorm2d(after)


def _rotated(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _language_loss(logits: Tensor, targets: Tensor | None) -> Tensor:
    return logits if targets is None else functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


def _images(make: Any, batch: int) -> Target:
    generator = _seeded()
    inputs = (torch.randn(batch, 3, 64, 64, generator=generator), torch.randint(10, (batch,), generator=generator))
    # Smoothed labels and small steps: a batch known by heart has a loss near 0, which is mostly rounding.
    return Target(make(), inputs, partial(functional.cross_entropy, label_smoothing=0.1), partial(_adamw, lr=1e-4))


def _tokens(make: Any, batch: int, length: int) -> Target:
    generator = _seeded()
    tokens = torch.randint(2048, (batch, length + 1), generator=generator)
    inputs = {"tokens": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}
    return Target(make(), inputs, None, partial(_adamw, lr=1e-3))


def _seeded() -> torch.Generator:
    torch.manual_seed(_SEED)
    return torch.Generator().manual_seed(_SEED)


def _adamw(parameters: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr)
