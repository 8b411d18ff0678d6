"""A decode step of Llama-3-8B's shape: the base alone, one adapter for all, one each, on attention and everywhere."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels.bench.loras import tokens_of_adapters
from pallas_kernels.bench.report import Result
from pallas_kernels.bench.timing import Clock
from pallas_kernels.paged_attention import ragged_paged_attention
from pallas_kernels.paged_attention.api import IMPLEMENTATIONS
from pallas_kernels.segmented_lora import RankRows, SegmentShape, lora_delta, make_plan

SECTION = "decode step"
_F32 = jnp.float32
_THETA = 500_000.0
_EPS = 1e-5


@dataclass(frozen=True)
class Model:
    """Sizes of a Llama, of its batch and of its pool."""

    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128256
    layers: int = 32
    sequences: int = 64
    context: int = 512
    rank: int = 16
    page_tokens: int = 16
    dtype: Any = jnp.bfloat16

    @property
    def kv(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def unit(self) -> int:
        return math.gcd(self.hidden, self.kv, self.ffn)

    @property
    def page_elements(self) -> int:
        return 2 * self.kv * self.page_tokens

    @property
    def groups(self) -> dict[str, tuple[int, tuple[int, ...]]]:
        """Projections by input: (I, O of each module)."""
        D, F, heads = self.hidden, self.ffn, self.heads * self.head_dim
        return {"qkv": (D, (heads, self.kv, self.kv)), "o": (heads, (D,)), "gate_up": (D, (F, F)), "down": (F, (D,))}

    @property
    def weight_bytes(self) -> int:
        """What a step reads: all layers and the head; of the embedding some rows."""
        matrices = sum(width * sum(outs) for width, outs in self.groups.values())
        return jnp.dtype(self.dtype).itemsize * (self.layers * matrices + self.vocab * self.hidden)


LLAMA_3_8B = Model()
TINY = Model(64, 128, 4, 2, 16, 96, 1, 3, 20, 4)


@dataclass(frozen=True)
class Adapters:
    """Adapters of the batch: rows by layer and projection group."""

    rows: list[dict[str, RankRows]]
    plan: Any
    bytes_read: int


def step_times(clock: Clock, model: Model, interpret: bool) -> Iterator[Result]:
    """Microseconds of the whole step by adapters, beside the bytes of weights, keys and values, and adapters."""
    everywhere, attention = tuple(model.groups), ("qkv", "o")
    default = "triton" if interpret else None
    cases = [(mix, groups, default) for mix, groups in (("base", ()), ("distinct", everywhere))]  # time may run out
    if not interpret:
        cases += [(mix, groups, None) for mix, groups in (("distinct", attention), ("identical", everywhere))]
        if "mosaic_gpu" in dispatch.choose("paged_attention", IMPLEMENTATIONS):
            cases += [("base", (), "mosaic_gpu"), ("distinct", everywhere, "mosaic_gpu")]
        cases.append(("identical", attention, None))
    kv_pages = model.sequences * -(-model.context // model.page_tokens)
    units_of_page = model.page_elements // model.unit
    most_units = sum(_units(model, group) for group in everywhere) * model.sequences * model.rank
    P = 1 + kv_pages + -(-most_units // units_of_page)
    if clock.left < 0:
        yield Result(SECTION, "all", "all", note="no time left")
        return
    weights = make_weights(model)
    item = jnp.dtype(model.dtype).itemsize
    read = model.weight_bytes + item * model.layers * model.sequences * model.context * 2 * model.kv
    for mix, groups, implementation in cases:
        name = implementation or "default"
        where = {(): "no adapters", attention: "q, k, v, o", everywhere: "all seven"}[groups]
        case = f"{mix}, {where}, {model.sequences} sequences of {model.context}, rank {model.rank}"
        if clock.left < 0:
            yield Result(SECTION, case, name, note="no time left")
            continue
        adapters = make_adapters(model, mix, groups, P, 1 + kv_pages) if groups else None
        floor = (read + (adapters.bytes_read if adapters else 0)) / clock.bandwidth * 1e6
        pool, batch = make_pool(model, P), make_inputs(model, kv_pages)
        fn = functools.partial(decode_step, model=model, implementation=implementation, interpret=interpret)
        rows, plan = (adapters.rows, adapters.plan) if adapters else (None, None)
        try:
            time = clock.carried(fn, pool, weights, batch, rows, plan)
            yield Result(SECTION, case, name, time, floor)
        except Exception as error:  # whatever a compiler or a device raises is the finding
            yield Result.failed(SECTION, case, name, error, floor=floor)
        del pool


def decode_step(
    pool_LPE: jax.Array, weights: dict[str, Any], batch: dict[str, jax.Array], rows: list[dict[str, RankRows]] | None,
    plan: Any, *, model: Model, implementation: str | None, interpret: bool,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """One token of each sequence: (pool, greedy tokens int32[B]). DONATES pool when jitted so."""
    B, N, K, H = model.sequences, model.heads, model.kv_heads, model.head_dim
    options: dict[str, Any] = {"implementation": implementation, "interpret": interpret}
    # Each in a jit of its own: kernels are traced and lowered once for all layers.
    delta = jax.jit(functools.partial(lora_delta, unit=model.unit, **options))
    attend = jax.jit(functools.partial(
        ragged_paged_attention, num_decodes=B, most_queries=1, num_kv_heads=K, page_tokens=model.page_tokens, **options
    ))  # fmt: skip

    def project(layer: int, group: str, x: jax.Array) -> jax.Array:
        x = x.astype(model.dtype)
        w_OI = weights["layers"][layer][group]
        y = jax.lax.dot_general(x, w_OI, (((1,), (1,)), ((), ())), preferred_element_type=_F32)
        if rows is not None and group in rows[layer]:
            y = delta(x, pool_LPE, rows[layer][group], plan, y)
        return y

    x = weights["embed"][batch["token_B"]].astype(_F32)
    for layer in range(model.layers):
        qkv = project(layer, "qkv", _norm(x))
        q, k, v = jnp.split(qkv, [N * H, (N + K) * H], 1)
        q_BNH, k_BKH = (_rotate(z.reshape(B, -1, H), batch["position_B"]) for z in (q, k))
        pool_LPE = _write(model, pool_LPE, layer, k_BKH, v.reshape(B, K, H), batch["slot_B"])
        out = attend(
            q_BNH.astype(model.dtype), pool_LPE, layer, batch["table_BP"], jnp.arange(B, dtype=jnp.int32),
            jnp.ones(B, jnp.int32), batch["position_B"] + 1,
        )  # fmt: skip
        x = x + project(layer, "o", out.reshape(B, -1))
        gate, up = jnp.split(project(layer, "gate_up", _norm(x)), 2, 1)
        x = x + project(layer, "down", jax.nn.silu(gate) * up)
    logits = jax.lax.dot_general(
        _norm(x).astype(model.dtype), weights["head"], (((1,), (1,)), ((), ())), preferred_element_type=_F32
    )
    return pool_LPE, jnp.argmax(logits, 1)


def _norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, 1, keepdims=True) + _EPS)


def _rotate(x_BNH: jax.Array, position_B: jax.Array) -> jax.Array:
    half = x_BNH.shape[-1] // 2
    angle = position_B[:, None, None] * _THETA ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x_BNH, 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _write(
    model: Model, pool_LPE: jax.Array, layer: int, k_BKH: jax.Array, v_BKH: jax.Array, slot_B: jax.Array
) -> jax.Array:
    S = model.page_tokens
    bits = jax.lax.bitcast_convert_type(jnp.stack([k_BKH, v_BKH], 1).astype(model.dtype), pool_LPE.dtype)
    pages = pool_LPE.reshape(*pool_LPE.shape[:2], 2, model.kv_heads, S, model.head_dim)
    pages = pages.at[layer, slot_B // S, :, :, slot_B % S].set(bits, mode="promise_in_bounds")
    return pages.reshape(pool_LPE.shape)


def _units(model: Model, group: str) -> int:
    """Units of one rank row of every module of a group, A and B."""
    width, outs = model.groups[group]
    return (len(outs) * width + sum(outs)) // model.unit


def make_weights(model: Model) -> dict[str, Any]:
    """Random weights, drawn on the device."""

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def draw(seed: int, rows: int, columns: int) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), (rows, columns), model.dtype) / np.float32(columns**0.5).astype(
            model.dtype
        )

    layers = [
        {name: draw(8 * layer + i, sum(outs), width) for i, (name, (width, outs)) in enumerate(model.groups.items())}
        for layer in range(model.layers)
    ]
    embed, head = (draw(8 * model.layers + i, model.vocab, model.hidden) for i in range(2))
    return {"layers": layers, "embed": embed, "head": head}


def make_pool(model: Model, num_pages: int) -> jax.Array:
    """A pool of small random values, as keys, values and rank rows alike."""
    bits = jnp.dtype(f"uint{8 * jnp.dtype(model.dtype).itemsize}")

    def draw() -> jax.Array:
        page = jax.random.normal(jax.random.key(1), (num_pages, model.page_elements), model.dtype) / 16
        page = page.astype(model.dtype)
        return jnp.broadcast_to(jax.lax.bitcast_convert_type(page, bits), (model.layers, *page.shape))

    return jax.jit(draw)()


def make_inputs(model: Model, kv_pages: int) -> dict[str, jax.Array]:
    """A token of each sequence at the end of its context; its pages are 1 and on, in any order."""
    B, S = model.sequences, model.page_tokens
    table = 1 + np.random.default_rng(0).permutation(kv_pages).reshape(B, -1)
    position = np.full(B, model.context - 1)
    slot = table[np.arange(B), position // S] * S + position % S
    arrays = {"token_B": np.arange(B) % model.vocab, "position_B": position, "slot_B": slot, "table_BP": table}
    return {name: jnp.asarray(array, jnp.int32) for name, array in arrays.items()}


def make_adapters(model: Model, mix: str, groups: tuple[str, ...], num_pages: int, first_page: int) -> Adapters:
    """Adapters of one rank in the pages behind the KV cache; a unit's number counts over all layers."""
    adapter_T = tokens_of_adapters(mix, model.sequences)
    num_adapters, rank = int(adapter_T.max()) + 1, model.rank
    R = num_adapters * rank
    per_page = model.page_elements // model.unit
    used = sum(_units(model, group) for group in groups) * R
    order = np.random.default_rng(1).permutation(used) + first_page * per_page
    rows = []
    for layer in range(model.layers):
        free, by_group = order + layer * num_pages * per_page, {}
        for group in groups:
            width, outs = model.groups[group]
            a, b = len(outs) * R * width // model.unit, R * sum(outs) // model.unit
            units_a, units_b, free = free[:a], free[a : a + b], free[a + b :]
            by_group[group] = RankRows(
                jnp.asarray(units_a.reshape(len(outs), R, -1), jnp.int32),
                jnp.asarray(units_b.reshape(R, -1), jnp.int32), jnp.ones((len(outs), R), _F32), None, outs,
            )  # fmt: skip
        rows.append(by_group)
    shape = SegmentShape(model.sequences, model.sequences)
    plan = make_plan(np.arange(num_adapters) * rank, np.full(num_adapters, rank), (shape,), adapter_T=adapter_T)
    bytes_read = jnp.dtype(model.dtype).itemsize * model.layers * used * model.unit
    return Adapters(rows, jax.tree.map(jnp.asarray, plan), bytes_read)
