"""Ragged paged attention, every implementation against the float32 oracle; Pallas kernels are interpreted."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.dispatch import H200, assume_device
from pallas_kernels.paged_attention import pallas_triton, ragged_paged_attention
from pallas_kernels.paged_attention.arg_specs import HEADS, random_arguments
from pallas_kernels.paged_attention.triton_config import TritonConfig, heuristic_config

TOLERANCE = {
    "float32": 2e-5,
    "bfloat16": 3e-2,  # queries, weights and the result are rounded to 8 bits each; values are of order 1
    "float16": 4e-3,
}
DECODES, BLOCKS, QUERIES, TOKENS, PAGES = 4, 3, 20, 67, 72


@dataclass(frozen=True)
class Program:
    """One compiled program, which every mix of rows shares: up to 4 decodes and 3 chunks of up to 20 queries."""

    heads: tuple[int, int, int]
    dtype: str
    implementation: str = "triton"
    width: int = 42  # 672 slots: contexts are computed in three parts
    window: int | None = None
    page_tokens: int = 16
    num_decodes: int = DECODES

    @functools.cached_property
    def compiled(self):
        fn = functools.partial(
            ragged_paged_attention, num_decodes=self.num_decodes, most_queries=QUERIES, num_kv_heads=self.heads[1],
            page_tokens=self.page_tokens, window=self.window, implementation=self.implementation,
            interpret=self.implementation != "xla",
        )  # fmt: skip
        shapes = [jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype) for x in self.arguments([(0, 0)] * 7).arrays]
        shapes[2] = jax.ShapeDtypeStruct((), jnp.int32)
        return jax.jit(fn).lower(*shapes).compile()

    def arguments(self, rows, seed=0):
        return random_arguments(
            rows, self.heads, dtype=self.dtype, page_tokens=self.page_tokens, num_pages=PAGES, num_tokens=TOKENS,
            width=self.width, seed=seed,
        )  # fmt: skip

    def check(self, rows, seed=0):
        rows = fit(rows, self.page_tokens, self.width)
        arguments = self.arguments(rows, seed)
        arrays = [np.int32(x) if isinstance(x, int) else x for x in arguments.arrays]
        got = np.asarray(self.compiled(*arrays), np.float32)
        wanted = arguments.oracle(self.window)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE[self.dtype])
        in_no_row = np.ones(TOKENS, bool)
        for start, count in zip(arguments.start_S, arguments.count_S, strict=True):
            in_no_row[start : start + count] = False
        assert not np.any(got[in_no_row])


def fit(rows, page_tokens, width):
    """Shortens contexts, in order, to what fits into the pool and the tables."""
    free, fitted = PAGES, []
    for count, context in rows:
        context = min(max(context, count), min(free, width) * page_tokens)
        count = min(count, context)
        free -= -(-context // page_tokens)
        fitted.append((count, context))
    return fitted


PROGRAMS = {
    "smollm2": Program(HEADS["smollm2-135m"], "float32"),
    "llama-3-8b": Program(HEADS["llama-3-8b"], "bfloat16"),
    "llama-2-13b": Program(HEADS["llama-2-13b"], "float16"),
    "llama-2-70b shard": Program(HEADS["llama-2-70b/8"], "bfloat16"),
    "one part": Program(HEADS["smollm2-135m"], "bfloat16", width=15),
    "window": Program((4, 2, 32), "float32", window=37, page_tokens=8),
    "all rows alike": Program((4, 2, 16), "float32", num_decodes=0),
    "xla": Program(HEADS["smollm2-135m"], "float32", "xla"),
    "xla window": Program((4, 2, 32), "float32", "xla", window=37, page_tokens=8),
}

MIXES = {
    "nothing": [(0, 0)] * 7,
    "single tokens": [(1, 1)] * 7,
    "decodes of every length": [(1, 1), (1, 15), (1, 16), (1, 17), (0, 0), (0, 0), (0, 0)],
    "around parts": [(1, 255), (1, 256), (1, 257), (0, 0), (3, 258), (0, 0), (0, 0)],
    "one long row": [(1, 3), (0, 0), (1, 640), (0, 0), (2, 5), (0, 0), (1, 1)],
    "long chunk": [(0, 0), (0, 0), (0, 0), (1, 9), (20, 600), (0, 0), (20, 20)],
    "chunks alone": [(0, 0)] * 4 + [(20, 20), (7, 130), (19, 64)],
    "context but no queries": [(0, 30), (1, 30), (0, 0), (1, 2), (0, 40), (5, 40), (0, 0)],
}


FURTHER = ("llama-2-13b", "llama-2-70b shard", "all rows alike", "xla window")
"""Programs behind the marker slow: each takes seconds to compile. The others have bfloat16 and float32, one part
and several, a window, and XLA's way."""
QUICK = sorted(PROGRAMS.keys() - set(FURTHER))


@pytest.mark.parametrize("program", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in FURTHER)])
def test_mixes_of_rows(program):
    """Decode rows, chunks, empty rows; pages in any order; what no query may see holds large values."""
    for seed, rows in enumerate(MIXES.values()):
        PROGRAMS[program].check(rows, seed)


ROWS = st.tuples(
    *[st.tuples(st.integers(0, 1), st.integers(0, 400))] * DECODES,
    *[st.tuples(st.integers(0, QUERIES), st.integers(0, 300))] * BLOCKS,
)


@settings(max_examples=40)
@given(program=st.sampled_from(QUICK), rows=ROWS, seed=st.integers(0, 99))
def test_any_rows(program, rows, seed):
    PROGRAMS[program].check(rows, seed)


@pytest.mark.slow
@settings(max_examples=40)
@given(program=st.sampled_from(FURTHER), rows=ROWS, seed=st.integers(0, 99))
def test_any_rows_of_further_programs(program, rows, seed):
    PROGRAMS[program].check(rows, seed)


def run(arguments, heads, configs=(None, None), **options):
    arrays = [jnp.asarray(x) for x in arguments.arrays]
    got = pallas_triton.paged_attention_triton(
        *arrays, num_kv_heads=heads[1], page_tokens=16, configs=configs, interpret=True, **options
    )
    return np.asarray(got, np.float32)


@pytest.mark.parametrize("config", [TritonConfig(16, 32, 1, 4, 2), TritonConfig(32, 16, 5, 4, 2)])
def test_block_sizes_change_nothing(config):
    """Several tiles of queries to a row, tiles of slots of two pages and of one, one part and five."""
    heads = (6, 2, 16)
    arguments = random_arguments([(1, 300), (18, 290), (5, 5)], heads, dtype="float32")
    got = run(arguments, heads, (config, config), num_decodes=1, most_queries=18)
    np.testing.assert_allclose(got, arguments.oracle(), rtol=0, atol=TOLERANCE["float32"])


def test_a_wrong_page_id_reads_a_page_and_faults_nobody():
    heads = (6, 2, 16)
    arguments = random_arguments([(1, 40), (5, 5)], heads, dtype="float32", num_pages=6)
    arguments.table_SP[0, 1] = 5
    wanted = run(arguments, heads, num_decodes=1, most_queries=5)
    arguments.table_SP[0, 1] = 1_000_000
    np.testing.assert_array_equal(run(arguments, heads, num_decodes=1, most_queries=5), wanted)


def test_memory_of_parts_is_bounded(monkeypatch):
    heads, config = (6, 2, 16), TritonConfig(16, 16, 5, 4, 2)
    arguments = random_arguments([(1, 300), (18, 290)], heads, dtype="float32")
    monkeypatch.setattr(pallas_triton, "MOST_PARTIAL_BYTES", 2 * 4 * arguments.q_TNH.size)

    def traced(*arrays):
        sizes = {"num_kv_heads": 2, "page_tokens": 16, "num_decodes": 1, "most_queries": 18}
        return pallas_triton.paged_attention_triton(*arrays, **sizes, configs=(config, config), interpret=True)

    assert f"f32[{2 * arguments.q_TNH.shape[0] * 6},16]" in str(jax.make_jaxpr(traced)(*arguments.arrays))
    got = run(arguments, heads, (config, config), num_decodes=1, most_queries=18)
    np.testing.assert_allclose(got, arguments.oracle(), rtol=0, atol=TOLERANCE["float32"])


def test_a_pool_of_more_vectors_than_32_bits_number():
    pool = jax.ShapeDtypeStruct((32, 1 << 21, 2 * 2 * 16 * 16), jnp.uint32)
    arguments = random_arguments([(1, 3)], (4, 2, 16), dtype="float32")
    arrays: Any = arguments.arrays
    q, _, layer, *rest = arrays
    with pytest.raises(NotImplementedError, match="32 bits number"):
        jax.eval_shape(
            lambda pool: ragged_paged_attention(
                q, pool, layer, *rest, most_queries=1, num_kv_heads=2, page_tokens=16, implementation="triton",
                interpret=True,
            ),
            pool,
        )  # fmt: skip


def test_the_heuristic_splits_few_rows_and_long_tables():
    def parts(rows, slots, queries=1):
        return heuristic_config(rows, queries, 8, 4, 128, 2, slots).parts

    assert parts(64, 256) == 1
    assert parts(1, 8192) > parts(64, 8192) > 1
    assert parts(256, 8192) == 1
    assert parts(256, 131072) == 16
    assert heuristic_config(8, 32, 8, 4, 128, 2, 8192).lanes == 64
    assert heuristic_config(64, 1, 1, 8, 128, 2, 8192).lanes == 16


def ask(**changed):
    """A call whose arguments are right but for what is changed."""
    arguments = random_arguments([(1, 5), (3, 20)], (4, 2, 16), dtype="float32")
    names = ("q_TNH", "pool_LPE", "layer", "table_SP", "start_S", "count_S", "context_S")
    known = dict(zip(names, map(jnp.asarray, arguments.arrays), strict=True))
    options = {"num_decodes": 1, "most_queries": 3, "num_kv_heads": 2, "page_tokens": 16}
    return ragged_paged_attention(**{**known, **options, **changed})  # pyright: ignore


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"page_tokens": 8}, "a page of 1024 elements is not 2 x 2 KV heads x 8 tokens x 16"),
        ({"num_kv_heads": 3}, "4 query heads are no multiple of 3"),
        ({"q_TNH": jnp.zeros((7, 4, 16), jnp.bfloat16)}, "of bfloat16 queries holds unsigned integers"),
        ({"pool_LPE": jnp.zeros((2, 5, 1024))}, "not float32"),
        ({"q_TNH": jnp.zeros((7, 64))}, r"\[T, N, H\]"),
        ({"count_S": jnp.ones(3, jnp.int32)}, "a value for each of 2 rows"),
        ({"count_S": jnp.ones(2)}, "int32"),
        ({"num_decodes": 3}, "num_decodes is 3, and there are 2 rows"),
        ({"num_kv_heads": 0}, "4 query heads are no multiple of 0"),
        ({"q_TNH": jnp.zeros((7, 4, 16), jnp.int32)}, "queries are bfloat16, float16 or float32, not int32"),
        ({"table_SP": jnp.zeros((2, 0), jnp.int32)}, "the table has no column"),
        ({"layer": 2}, "layer is 2, and the pool has 2"),
        ({"layer": -1}, "layer is -1"),
        ({"layer": 1.0}, "layer is one integer, not 1.0"),
        ({"window": 0}, "window \\(0\\) must be positive"),
        ({"implementation": "cuda"}, "no implementation 'cuda'"),
    ],
)
def test_bad_arguments_are_named(changed, words):
    with pytest.raises(ValueError, match=words):
        ask(**changed)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_arrays_of_numpy_no_tokens_and_no_rows(implementation):
    """Called without jit, as in a notebook."""
    arguments = random_arguments([(1, 5), (3, 20)], (4, 2, 16), dtype="float32")
    names = ("q_TNH", "pool_LPE", "layer", "table_SP", "start_S", "count_S", "context_S")
    known: dict[str, Any] = dict(zip(names, arguments.arrays, strict=True))
    how = {"implementation": implementation, "interpret": True}
    got = ask(**known, **how)
    np.testing.assert_allclose(got, arguments.oracle(), rtol=0, atol=TOLERANCE["float32"])
    known["start_S"] = known["start_S"].astype(np.int64)  # numpy's own integers
    np.testing.assert_array_equal(ask(**known, **how), got)
    assert ask(q_TNH=known["q_TNH"][:0], count_S=[0, 0], **how).shape == (0, 4, 16)
    none = np.zeros(0, np.int32)
    nobody = {"start_S": none, "count_S": none, "context_S": none, "num_decodes": 0}
    assert not np.asarray(ask(table_SP=np.zeros((0, 2), np.int32), **nobody, **how)).any()


def test_head_dims_that_triton_lacks_fall_through():
    arguments = random_arguments([(1, 5), (3, 20)], (4, 2, 24), dtype="float32")
    arrays = [jnp.asarray(x) for x in arguments.arrays]
    options = {"num_decodes": 1, "most_queries": 3, "num_kv_heads": 2, "page_tokens": 16, "interpret": True}
    got = ragged_paged_attention(*arrays, **options)  # pyright: ignore
    np.testing.assert_allclose(got, arguments.oracle(), rtol=0, atol=TOLERANCE["float32"])
    with pytest.raises(NotImplementedError, match="head_dim must be a power of two from 16 on, not 24"):
        ragged_paged_attention(*arrays, implementation="triton", **options)  # pyright: ignore


def test_the_device_decides():
    assert ask().shape == (7, 4, 16)  # a CPU: xla
    with pytest.raises(NotImplementedError, match="need an NVIDIA GPU"):
        ask(implementation="triton")
    with assume_device(H200):
        jaxpr = str(jax.make_jaxpr(lambda: ask())())
    assert "pallas_call" in jaxpr
