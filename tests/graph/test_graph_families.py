"""Ten captured steps equal ten eager steps, for the usual families of models."""

from __future__ import annotations

import pytest
import torch
from eager_reference import assert_follows_eager
from torch import Tensor, nn
from torch.nn import functional

from raftune.models import ResNet


def adamw(parameters):
    # A large eps: gradients that are zero but for rounding must not become full steps of random sign.
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1, eps=1e-5)


def momentum(parameters):
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, weight_decay=1e-3)


def hugging_face(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def test_mlp():
    model = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))
    batches = [(torch.randn(16, 20), torch.randint(5, (16,))) for _ in range(10)]
    assert_follows_eager(model, batches, classify, momentum, loss=functional.cross_entropy)


def test_resnet():
    model = ResNet(widths=(8, 16), blocks=1, classes=4)
    batches = [(torch.randn(4, 3, 32, 32), torch.randint(4, (4,))) for _ in range(10)]
    assert_follows_eager(model, batches, classify, momentum, loss=functional.cross_entropy)
    assert int(model.stem[1].num_batches_tracked) == 10


def test_bert():
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    model = transformers.BertForMaskedLM(config).train()
    batches = []
    for _ in range(10):
        tokens = torch.randint(50, (2, 12))
        mask = torch.ones(2, 12, dtype=torch.int64)
        mask[1, 9:] = 0
        batches.append({"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)})
    assert_follows_eager(model, batches, hugging_face, adamw)


def test_gpt_with_tied_embeddings():
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    model.train()
    assert model.lm_head.weight is model.transformer.wte.weight
    batches = [{"input_ids": (tokens := torch.randint(50, (2, 12))), "labels": tokens} for _ in range(10)]
    assert_follows_eager(model, batches, hugging_face, adamw)


def test_t5():
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        vocab_size=50, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2, decoder_start_token_id=0, use_cache=False
    )
    model = transformers.T5ForConditionalGeneration(config).train()
    batches = [{"input_ids": torch.randint(1, 50, (2, 10)), "labels": torch.randint(1, 50, (2, 8))} for _ in range(10)]
    assert_follows_eager(model, batches, hugging_face, adamw)


def test_llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).train()
    batches = [{"input_ids": (tokens := torch.randint(50, (2, 12))), "labels": tokens} for _ in range(10)]
    assert_follows_eager(model, batches, hugging_face, adamw)


class Tagger(nn.Module):
    """Embedding, two-layer bidirectional LSTM with dropout between the layers, projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, dropout=0.2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(32, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.lstm(self.embedding(tokens))[0])


def test_lstm():
    def loss(logits: Tensor, tags: Tensor) -> Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), tags.flatten())

    batches = [(torch.randint(30, (3, 4)), torch.randint(6, (3, 4))) for _ in range(10)]
    assert_follows_eager(Tagger(), batches, lambda model, batch: loss(model(batch[0]), batch[1]), adamw, loss=loss)
