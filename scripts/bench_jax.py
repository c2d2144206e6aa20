"""The MLP and the GPT of the benchmark in JAX: equal weights, data and arithmetic, one jitted step with donated state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from raftune.models import Target

Params = dict[str, Array]
State = tuple[Params, Any]


def make_step(model: str, target: Target) -> Callable[[], Array]:
    """A step of ``model`` (``mlp`` or ``gpt``) from the target's weights; it returns when its results are there."""
    # A tied weight is one parameter, under its first name.
    params = {name: jnp.array(p.detach().numpy()) for name, p in target.model.named_parameters()}
    if model == "mlp":
        images, labels = (jnp.array(t.numpy()) for t in target.inputs)
        batch, loss, update, state = (images, labels), _mlp_loss, _sgd, _sgd_state(params)
    else:
        batch = tuple(jnp.array(target.inputs[name].numpy()) for name in ("tokens", "targets"))
        heads = target.model.blocks[0].attention.heads
        layers = len(target.model.blocks)

        def loss(params: Params, tokens: Array, targets: Array) -> Array:
            return _cross_entropy(_gpt(params, tokens, heads, layers), targets)

        update, state = _adamw, _adamw_state(params)

    def step(params: Params, state: Any, *batch: Array) -> tuple[Params, Any, Array]:
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        return *update(params, gradients, state), value

    jitted = jax.jit(step, donate_argnums=(0, 1))
    live: State = (params, state)

    def run() -> Array:
        nonlocal live
        *live, value = jax.block_until_ready(jitted(*live, *batch))
        return value

    return run


def _linear(params: Params, name: str, x: Array) -> Array:
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def _norm(params: Params, name: str, x: Array) -> Array:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * params[f"{name}.weight"] + params[f"{name}.bias"]


def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


def _cross_entropy(logits: Array, targets: Array) -> Array:
    found = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return -found.mean()


def _mlp_loss(params: Params, x: Array, labels: Array) -> Array:
    for name in ("0", "2"):
        x = _gelu(_linear(params, name, x))
    return _cross_entropy(_linear(params, "4", x), labels)


def _gpt(params: Params, tokens: Array, heads: int, layers: int) -> Array:
    x = params["tokens.weight"][tokens] + params["positions.weight"][: tokens.shape[1]]
    for layer in range(layers):
        block = f"blocks.{layer}"
        x = x + _attention(params, f"{block}.attention", _norm(params, f"{block}.norm1", x), heads)
        y = _gelu(_linear(params, f"{block}.feed_forward.0", _norm(params, f"{block}.norm2", x)))
        x = x + _linear(params, f"{block}.feed_forward.2", y)
    return _norm(params, "norm", x) @ params["tokens.weight"].T


def _attention(params: Params, name: str, x: Array, heads: int) -> Array:
    batch, length, width = x.shape
    query, key, value = jnp.moveaxis(_linear(params, f"{name}.qkv", x).reshape(batch, length, 3, heads, -1), 2, 0)
    x = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return _linear(params, f"{name}.out", x.reshape(batch, length, width))


def _sgd_state(params: Params) -> Params:
    return jax.tree.map(jnp.zeros_like, params)


def _sgd(params: Params, gradients: Params, momentum: Params) -> tuple[Params, Params]:
    """``torch.optim.SGD(lr=1e-2, momentum=0.9)``."""
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradients)
    return jax.tree.map(lambda p, m: p - 1e-2 * m, params, momentum), momentum


def _adamw_state(params: Params) -> tuple[Array, Params, Params]:
    zeros = jax.tree.map(jnp.zeros_like, params)
    return jnp.zeros(()), zeros, jax.tree.map(jnp.zeros_like, params)


def _adamw(params: Params, gradients: Params, state: tuple[Array, Params, Params]) -> tuple[Params, Any]:
    """``torch.optim.AdamW(lr=1e-3)`` with its defaults."""
    count, first, second = state
    count = count + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, gradients)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * jnp.square(g), second, gradients)
    size, root = 1e-3 / (1 - 0.9**count), jnp.sqrt(1 - 0.999**count)

    def updated(p: Array, m: Array, v: Array) -> Array:
        return p * (1 - 1e-3 * 1e-2) - size * m / (jnp.sqrt(v) / root + 1e-8)

    return jax.tree.map(updated, params, first, second), (count, first, second)
