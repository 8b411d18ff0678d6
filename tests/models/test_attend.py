"""Which rows attention by kernels is asked for: padding must not lengthen a block, nor a context past its table."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp

from multilora_jax.models import layers
from multilora_jax.models.config import ModelConfig, RopeConfig

MODEL = ModelConfig(
    name="tiny", vocab_size=64, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=96,
    rms_norm_eps=1e-5, rope=RopeConfig(), max_position_embeddings=256,
)  # fmt: skip


def rows(monkeypatch, positions, row_P, first_N, num_decodes=2) -> list[list[int]]:
    """(start, count, context) of every row that `attend` asks for; blocks of up to 4 tokens."""
    asked: list[Any] = []
    monkeypatch.setattr(layers, "ragged_paged_attention", lambda q, pool, layer, table, *rest, **_: asked.append(rest))
    spec = layers.LlamaSpec(MODEL, MODEL.geometry(8, 16), 4, attention_backend="triton")
    batch = SimpleNamespace(
        positions_T=jnp.asarray(positions, jnp.int32), row_P=jnp.asarray(row_P, jnp.int32),
        first_N=jnp.asarray(first_N, jnp.int32), table_SP=jnp.zeros((num_decodes + len(first_N), 4), jnp.int32),
    )  # fmt: skip
    layers.attend(spec, jnp.zeros((len(positions), 4, 16)), jnp.zeros((2, 8, 1)), jnp.int32(0), batch, 2)
    return jnp.stack(asked[0], 1).tolist()


def test_decodes_and_blocks(monkeypatch):
    """Two decodes; a chunk of five tokens from position 9 in two blocks, one of three tokens; a block of padding."""
    got = rows(monkeypatch, [7, 0, 9, 10, 11, 12, 13, 0, 1, 2], [2] * 4 + [3] + [4] * 3, [0, 4, 5, 0])
    assert got == [[0, 1, 8], [1, 1, 1], [2, 4, 13], [6, 1, 14], [7, 3, 3], [2, 0, 9]]


def test_padding_behind_a_short_block_is_not_of_it(monkeypatch):
    """Tokens of padding name the first block as their row, and are at position 0."""
    got = rows(monkeypatch, [7, 0, 30, 31, 0, 0, 0, 0], [2] * 6, [0, 0])
    assert got[2:] == [[2, 2, 32], [2, 0, 30]]


def test_every_backend_is_told_the_window(monkeypatch):
    told = []
    for name in ("ragged_paged_attention", "paged_attention"):
        monkeypatch.setattr(layers, name, lambda q, *_, window, **__: told.append(window) or q)
    batch = SimpleNamespace(
        positions_T=jnp.zeros(6, jnp.int32), row_P=jnp.full(4, 2, jnp.int32), first_N=jnp.zeros(1, jnp.int32),
        table_SP=jnp.zeros((3, 4), jnp.int32), decode_chunks=None, prefill_chunks=None,
        runs_R3=jnp.zeros((0, 3), jnp.int32),
    )  # fmt: skip
    model = replace(MODEL, sliding_window=21)
    for backend in ("triton", "xla"):
        spec = layers.LlamaSpec(model, model.geometry(8, 16), 4, attention_backend=backend)
        layers.attend(spec, jnp.zeros((6, 4, 16)), jnp.zeros((2, 8, 1)), jnp.int32(0), batch, 2)
    assert told == [21, 21, 21]


def test_decodes_alone(monkeypatch):
    assert rows(monkeypatch, [7, 0], [], []) == [[0, 1, 8], [1, 1, 1]]
