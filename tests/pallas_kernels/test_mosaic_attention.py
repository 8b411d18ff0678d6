"""The Mosaic GPU kernel of paged attention, interpreted with the race detector on, against the oracle; and its gate."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import mosaic
from pallas_kernels.dispatch import H200, assume_device
from pallas_kernels.paged_attention import api, pallas_mosaic_gpu, ragged_paged_attention
from pallas_kernels.paged_attention.arg_specs import HEADS, random_arguments
from tests.pallas_kernels.race_controls import leave_out, seen_product
from tests.pallas_kernels.test_ragged_attention import TOLERANCE

interpreted = pytest.mark.skipif(
    not mosaic.CAN_INTERPRET, reason=f"jax {jax.__version__} has no public interpreter of Mosaic GPU; 0.11 has one"
)
SMALL = (4, 2, 64)
RACES = {"keys": ("barrier_wait", 2), "values": ("barrier_wait", 3), "results": ("commit_smem", 2)}
"""What the kernel waits for, in the order in which it is traced. The first wait is the queries': their copy is asked
for before the keys', and the interpreter takes copies for done in that order."""


def call(rows, heads=SMALL, *, decodes=1, queries=1, dtype="bfloat16", window=None, page_tokens=16, seed=0, width=None):
    """Result and oracle."""
    arguments = random_arguments(rows, heads, dtype=dtype, page_tokens=page_tokens, seed=seed, width=width)
    got = ragged_paged_attention(
        *map(jnp.asarray, arguments.arrays), num_decodes=decodes, most_queries=queries, num_kv_heads=heads[1],  # pyright: ignore
        page_tokens=page_tokens, window=window, implementation="mosaic_gpu", interpret=True,
    )  # fmt: skip
    return np.asarray(got, np.float32), arguments.oracle(window)


def check(*args, dtype="bfloat16", **options):
    got, wanted = call(*args, dtype=dtype, **options)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE[dtype])


@interpreted
def test_a_decode_and_a_chunk():
    """Of several turns, behind whose contexts lie large values; a row of nobody; tokens in no row stay 0."""
    check([(1, 70), (0, 9), (3, 20)], decodes=2, queries=3)


@interpreted
@pytest.mark.parametrize("left_out", [None, *RACES])
def test_a_wait_too_few_is_seen(monkeypatch, left_out):
    """Controls of the race detector: operands read before they have come, results sent before they are there."""
    monkeypatch.setattr(pallas_mosaic_gpu.mosaic, "product", seen_product)
    if left_out is None:
        return check([(1, 70)], (1, 1, 64))
    leave_out(monkeypatch, pallas_mosaic_gpu, *RACES[left_out])
    with pytest.raises(Exception, match="(?i)race"):
        call([(1, 3)], (1, 1, 64))


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("model", ["smollm2-135m", "llama-2-70b/8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_models(model, dtype):
    """More turns than stages; a chunk whose queries take several programs; contexts around turns and parts."""
    check([(1, 257), (1, 64), (12, 65)], HEADS[model], decodes=2, queries=12, dtype=dtype)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("page_tokens", [8, 32, 64])
def test_pages_of_other_sizes(page_tokens):
    check([(1, 130), (5, 90)], queries=5, page_tokens=page_tokens)


@interpreted
@pytest.mark.slow
def test_windows():
    """Whole turns before the window are never read."""
    for window in (1, 37, 64, 200):
        check([(1, 300), (20, 90)], queries=20, window=window)


@interpreted
@pytest.mark.slow
def test_parts():
    """Contexts of three parts, some of which a row does not reach."""
    check([(1, 700), (1, 20), (9, 520)], decodes=2, queries=9)


@interpreted
@pytest.mark.slow
def test_a_wrong_page_id_reads_a_page_and_faults_nobody():
    arguments = random_arguments([(1, 40)], SMALL, dtype="bfloat16", num_pages=6)

    def run(page):
        arguments.table_SP[0, 1] = page
        options = {"num_decodes": 1, "most_queries": 1, "num_kv_heads": 2, "page_tokens": 16, "interpret": True}
        arrays = map(jnp.asarray, arguments.arrays)
        return np.asarray(ragged_paged_attention(*arrays, implementation="mosaic_gpu", **options), np.float32)  # pyright: ignore

    np.testing.assert_array_equal(run(1_000_000), run(5))


ROWS = st.tuples(
    st.tuples(st.integers(0, 1), st.integers(0, 300)), st.tuples(st.integers(0, 1), st.integers(0, 100)),
    st.tuples(st.integers(0, 20), st.integers(0, 150)),
)  # fmt: skip


@interpreted
@pytest.mark.slow
@settings(max_examples=8)
@given(rows=ROWS, window=st.sampled_from([None, None, 50]), seed=st.integers(0, 99))
def test_any_rows(rows, window, seed):
    rows = [(min(count, context), context) for count, context in rows]
    check(rows, decodes=2, queries=20, window=window, seed=seed, width=24)


def traced(heads=SMALL, dtype="bfloat16", page_tokens=16, implementation: str | None = "mosaic_gpu"):
    arguments = random_arguments([(1, 5), (3, 20)], heads, dtype=dtype, page_tokens=page_tokens)
    with assume_device(H200):
        return str(jax.make_jaxpr(lambda *arrays: ragged_paged_attention(
            *arrays, num_decodes=1, most_queries=3, num_kv_heads=heads[1], page_tokens=page_tokens,
            implementation=implementation,
        ))(*map(jnp.asarray, arguments.arrays)))  # fmt: skip


def test_it_runs_where_it_is_named_and_nowhere_else():
    by_name = traced()
    assert "wgmma" in by_name
    assert "copy_gmem_to_smem" in by_name
    assert "wgmma" not in traced(implementation=None)
    with assume_device(H200):
        assert api.pick(64, "bfloat16") == "triton"
        assert api.pick(64, "bfloat16", "mosaic_gpu") == "mosaic_gpu"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"dtype": "float32"}, "not float32 to its last bits"),
        ({"heads": (4, 2, 96)}, "head_dim must be a multiple of 64 up to 256, not 96"),
        ({"page_tokens": 12}, "pages of 12 tokens: they must be of 8, 16, 32 or 64"),
    ],
)
def test_what_it_does_not_take_is_named(changed, words):
    with pytest.raises(NotImplementedError, match=words):
        traced(**changed)
    with pytest.raises(NotImplementedError, match="mosaic_gpu kernels need an NVIDIA GPU"):
        api.pick(64, "bfloat16", "mosaic_gpu")


def test_a_pool_of_more_pages_than_32_bits_number():
    arguments = random_arguments([(1, 3)], SMALL, dtype="bfloat16")
    q, _, layer, *rest = map(jnp.asarray, arguments.arrays)
    pool = jax.ShapeDtypeStruct((32, 1 << 24, 2 * 2 * 16 * 64), jnp.uint16)
    with assume_device(H200), pytest.raises(NotImplementedError, match="32 bits number"):
        jax.eval_shape(
            lambda pool: ragged_paged_attention(
                q, pool, layer, *rest, most_queries=1, num_kv_heads=2, page_tokens=16, implementation="mosaic_gpu"
            ),
            pool,
        )


@pytest.mark.skipif(mosaic.CAN_INTERPRET, reason="this jax has the interpreter")
def test_a_jax_without_the_interpreter_says_so():
    with pytest.raises(NotImplementedError, match="interpreted from jax 0.11 on"):
        call([(1, 3)])
