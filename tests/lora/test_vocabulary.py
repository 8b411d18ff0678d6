"""embed_tokens and lm_head: which rows an adapter replaces, by the rules that PEFT's own files follow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from multilora_jax.errors import AdapterError
from multilora_jax.lora.weights import AdapterWeights, VocabWeights, weights_from_arrays

EMBED, HEAD = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
TOKENS = "token_adapter.trainable_tokens_delta"


def table(rows: int = 256, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, 64)).astype(np.float32)


def lora(rows: int = 256, modules: str = "eh", rank: int = 8) -> dict[str, np.ndarray]:
    """A and B of embed_tokens ("e") and lm_head ("h")."""
    wide, tall = table(rows, 1)[:, :rank], table(64, 2)[:, :rank]
    embed = {f"{EMBED}.lora_embedding_A": wide.T, f"{EMBED}.lora_embedding_B": tall}
    head = {f"{HEAD}.lora_A.weight": tall.T, f"{HEAD}.lora_B.weight": wide}
    return (embed if "e" in modules else {}) | (head if "h" in modules else {})


@pytest.fixture
def read(make_model_config, peft_tensors):
    def run(tensors: dict[str, np.ndarray], tied: bool = True, **config: Any) -> AdapterWeights:
        base = make_model_config(tie_word_embeddings=tied)
        config = {"r": 8, "lora_alpha": 16} | config
        return weights_from_arrays(peft_tensors() | tensors, config, base, max_lora_rank=16, max_extra_vocab=8)

    return run


@pytest.fixture
def refusal(read):
    def run(*args: Any, **config: Any) -> str:
        with pytest.raises(AdapterError) as caught:
            read(*args, **config)
        return caught.value.reason

    return run


def rows(part: VocabWeights | None) -> tuple[list[int], np.ndarray] | None:
    if part is None or part.row_ids is None:
        return None
    assert part.rows is not None
    assert part.row_ids.dtype == np.int32
    return part.row_ids.tolist(), part.rows


def assert_rows(part: VocabWeights | None, ids: list[int] | range, wanted: np.ndarray) -> None:
    got = rows(part)
    assert got is not None
    assert got[0] == list(ids)
    np.testing.assert_array_equal(got[1], wanted)


@pytest.mark.parametrize("tied", [True, False])
def test_lora_of_both_modules(read, tied):
    weights = read(lora(), tied, rank_pattern={"lm_head": 8}, alpha_pattern={"lm_head": 4})
    embed, head = weights.embed, weights.head
    assert (embed.a.shape, embed.b.shape, embed.scale) == ((8, 256), (64, 8), 2.0)
    assert (head.a.shape, head.b.shape, head.scale) == ((8, 64), (256, 8), 0.5)
    assert rows(embed) is rows(head) is None
    assert (-1, "lm_head") not in weights.scale


def test_ranks_of_the_vocabulary_count(read, refusal):
    assert read(lora(rank=16), rank_pattern={"embed_tokens": 16, "lm_head": 16}).rank == 16
    assert refusal(lora(rank=16)) == "rank_mismatch"
    assert refusal(lora(rank=17), rank_pattern={"embed_tokens": 17, "lm_head": 17}) == "rank_too_large"


def test_dora_and_bias_of_the_head(read, peft_tensors):
    names = [name.removesuffix(".lora_A.weight") for name in peft_tensors() if "lora_A" in name]
    widths = {name: 64 if "q_proj" in name else 32 for name in names}
    magnitudes = {f"{name}.lora_magnitude_vector": np.ones(n, np.float32) for name, n in widths.items()}
    weights = read(
        lora() | magnitudes
        | {f"{EMBED}.lora_magnitude_vector": np.ones((1, 64)), f"{HEAD}.lora_magnitude_vector": np.ones(256)},
        use_dora=True,
    )  # fmt: skip
    assert (weights.embed.magnitude.shape, weights.head.magnitude.shape) == ((64,), (256,))
    biases = {f"{name}.lora_B.bias": np.ones(n, np.float32) for name, n in widths.items()}
    weights = read(lora(modules="h") | biases | {f"{HEAD}.lora_B.bias": np.arange(256.0)}, lora_bias=True)
    assert weights.head.lora_bias.shape == (256,)


@pytest.mark.parametrize("tied", [True, False])
def test_frozen_copies_are_the_base_s(read, refusal, tied):
    copy = table()
    weights = read(lora(modules="e") | {f"{EMBED}.base_layer.weight": copy}, tied)
    assert_rows(weights.embed, range(256), copy)
    if tied:
        assert_rows(weights.head, range(256), copy)
        both = lora() | {f"{EMBED}.base_layer.weight": copy, f"{HEAD}.base_layer.weight": copy + 1}
        assert refusal(both, tied) == "ambiguous_tensors"
    else:
        assert weights.head is None


@pytest.mark.parametrize("tied", [True, False])
def test_modules_to_save_are_each_their_own(read, tied):
    for saved, name in (("embed_tokens", EMBED), ("lm_head", HEAD)):
        weights = read({f"{name}.weight": table()}, tied, modules_to_save=[saved])
        own, other = (weights.embed, weights.head) if name == EMBED else (weights.head, weights.embed)
        assert_rows(own, range(256), table())
        assert other is None
    both = read(
        {f"{EMBED}.weight": table(), f"{HEAD}.weight": table(seed=1)}, tied, modules_to_save=["tokens", "lm_head"]
    )
    assert_rows(both.embed, range(256), table())
    assert_rows(both.head, range(256), table(seed=1))


def test_ensure_weight_tying(read, refusal):
    same = {f"{EMBED}.weight": table(), f"{HEAD}.weight": table()}
    options: dict[str, Any] = {"modules_to_save": ["model.embed_tokens"], "ensure_weight_tying": True}
    weights = read(same, True, **options)
    assert_rows(weights.embed, range(256), table())
    assert_rows(weights.head, range(256), table())
    assert refusal(same | {f"{HEAD}.weight": table(seed=1)}, True, **options) == "ambiguous_tensors"
    assert refusal({f"{EMBED}.weight": table()}, True, **options) == "incomplete_tensors"
    assert refusal(lora(modules="e"), True, ensure_weight_tying=True) == "incomplete_tensors"
    assert read(lora(modules="e"), False, ensure_weight_tying=True).head is None
    assert read(lora(), True, ensure_weight_tying=True).head is not None


def resized(names: dict[str, np.ndarray], size: int = 260) -> dict[str, np.ndarray]:
    return {name: np.concatenate([array, table(size - len(array), 9)]) for name, array in names.items()}


@pytest.mark.parametrize("tied", [True, False])
def test_resized_vocabularies(read, refusal, tied):
    """As save_embedding_layers="auto" writes them, with nothing in the config."""
    both = resized({f"{EMBED}.weight": table(), f"{HEAD}.weight": table(seed=0 if tied else 1)})
    weights = read(both, tied)
    assert weights.vocab_size == 260
    assert_rows(weights.embed, range(260), both[f"{EMBED}.weight"])
    assert_rows(weights.head, range(260), both[f"{HEAD}.weight"])
    one = {f"{EMBED}.weight": both[f"{EMBED}.weight"]}
    if tied:
        assert_rows(read(one, tied).head, range(260), both[f"{EMBED}.weight"])
        assert refusal(both | {f"{HEAD}.weight": both[f"{HEAD}.weight"] + 1}, tied) == "ambiguous_tensors"
    else:
        assert refusal(one, tied) == "incomplete_tensors"
    assert read({f"{EMBED}.weight": table(), f"{HEAD}.weight": table()}, tied).vocab_size == 256


@pytest.mark.parametrize("tied", [True, False])
def test_resized_and_saved_whole_under_three_names(read, refusal, tied):
    """PEFT writes the module's own weight twice and the base's beside it, the other module's plainly."""
    own, base = table(260, 5), table(260, 6)
    names = {f"{EMBED}.{name}": own for name in ("weight", "modules_to_save.weight")}
    names |= {f"{EMBED}.original_module.weight": base, f"{HEAD}.weight": base}
    weights = read(names, tied, modules_to_save=["embed_tokens"])
    assert_rows(weights.embed, range(260), own)
    assert_rows(weights.head, range(260), base)
    assert refusal(names | {f"{EMBED}.weight": base}, tied, modules_to_save=["embed_tokens"]) == "ambiguous_tensors"
    assert refusal(names, tied) == "contradictory_adapter"


@pytest.mark.parametrize("tied", [True, False])
def test_lora_of_a_resized_vocabulary(read, refusal, tied):
    copies = {f"{EMBED}.base_layer.weight": table(260), f"{HEAD}.base_layer.weight": table(260)}
    weights = read(lora(260) | copies, tied)
    assert (weights.vocab_size, weights.embed.a.shape, weights.head.b.shape) == (260, (8, 260), (260, 8))
    assert refusal(lora(260), tied) == "incomplete_tensors"
    assert refusal(lora(256) | copies, tied) == "shape_mismatch"
    embed_only = lora(260, "e") | {f"{EMBED}.base_layer.weight": table(260)}
    if tied:
        assert_rows(read(embed_only, tied).head, range(260), table(260))
    else:
        assert refusal(embed_only, tied) == "incomplete_tensors"  # PEFT saves no rows of the head either


def test_sizes_that_are_refused(read, refusal, make_model_config, peft_tensors):
    def both(size: int) -> dict[str, np.ndarray]:
        return {f"{EMBED}.weight": table(size), f"{HEAD}.weight": table(size)}

    assert read(both(264)).vocab_size == 264
    assert refusal(both(265)) == "vocab_too_large"
    with pytest.raises(AdapterError, match="adds 9 tokens.*max_extra_vocab of at least 9"):
        read(both(265))
    assert refusal(both(255)) == "shape_mismatch"
    assert refusal({f"{EMBED}.weight": table(260), f"{HEAD}.weight": table(256)}) == "shape_mismatch"
    assert refusal({f"{EMBED}.weight": table(260)[:, :32]}) == "shape_mismatch"
    assert refusal({f"{EMBED}.weight": table(260)[:, 0]}) == "shape_mismatch"
    with pytest.raises(AdapterError, match="max_extra_vocab 0"):
        weights_from_arrays(peft_tensors() | both(260), {"lora_alpha": 8}, make_model_config(), max_lora_rank=8)


def tokens(module: str, count: int, seed: int = 3) -> dict[str, np.ndarray]:
    return {f"{module}.{TOKENS}": table(count, seed)}


@pytest.mark.parametrize("spelling", [[31, 5], {"embed_tokens": [31, 5]}, {"model.embed_tokens": [31, 5]}])
def test_trained_tokens_of_a_tied_base_are_both_ends_own(read, spelling):
    weights = read(tokens(EMBED, 2), True, trainable_token_indices=spelling)
    assert_rows(weights.embed, [5, 31], table(2, 3)[::-1])
    assert_rows(weights.head, [5, 31], table(2, 3)[::-1])
    assert weights.vocab_size == 256
    untied = read(tokens(EMBED, 2), False, trainable_token_indices=spelling)
    assert_rows(untied.embed, [5, 31], table(2, 3)[::-1])
    assert untied.head is None


@pytest.mark.parametrize("tied", [True, False])
def test_trained_tokens_of_both_ends(read, refusal, tied):
    other = {"embed_tokens": [31, 5], "lm_head": [9]}
    weights = read(tokens(EMBED, 2) | tokens(HEAD, 1, 4), tied, trainable_token_indices=other)
    assert_rows(weights.embed, [5, 31], table(2, 3)[::-1])
    assert_rows(weights.head, [9], table(1, 4))
    same = {"embed_tokens": [5, 31], "lm_head": [5, 31]}
    twice = tokens(EMBED, 2) | tokens(HEAD, 2, 4)
    if tied:
        assert_rows(read(tokens(EMBED, 2), tied, trainable_token_indices=same).head, [5, 31], table(2, 3))
        assert refusal(twice, tied, trainable_token_indices=same) == "ambiguous_tensors"
        assert (
            refusal(tokens(EMBED, 2) | tokens(HEAD, 1), tied, trainable_token_indices=other, ensure_weight_tying=True)
            == "contradictory_adapter"
        )
    else:
        assert_rows(read(twice, tied, trainable_token_indices=same).head, [5, 31], table(2, 4))
        assert refusal(tokens(EMBED, 2), tied, trainable_token_indices=same) == "contradictory_adapter"
    head = read(tokens(HEAD, 1), tied, trainable_token_indices={"lm_head": [9]})
    assert head.embed is None
    assert_rows(head.head, [9], table(1, 3))


@pytest.mark.parametrize("tied", [True, False])
def test_trained_tokens_of_a_resized_vocabulary(read, tied):
    """PEFT writes the resized matrices beside the rows, and a tied head's rows a second time."""
    copy = table(260)
    names = tokens(EMBED, 2) | {f"{EMBED}.token_adapter.base_layer.weight": copy}
    head = tokens(HEAD, 2) | {f"{HEAD}.token_adapter.base_layer.weight": copy} if tied else {f"{HEAD}.weight": copy}
    weights = read(names | head, tied, trainable_token_indices=[31, 257])
    replaced = copy.copy()
    replaced[[31, 257]] = table(2, 3)
    assert_rows(weights.embed, range(260), replaced)
    assert_rows(weights.head, range(260), replaced if tied else copy)
    np.testing.assert_array_equal(copy, table(260))


def test_tokens_of_one_end_leave_the_matrix_of_the_other(read):
    """A tied base has one resized matrix, and each end may have tokens of its own."""
    copy, ids = table(260), {"embed_tokens": [5, 31], "lm_head": [9]}
    names = {f"{module}.token_adapter.base_layer.weight": copy for module in (EMBED, HEAD)}
    weights = read(names | tokens(EMBED, 2) | tokens(HEAD, 1, 4), True, trainable_token_indices=ids)
    embed, head = copy.copy(), copy.copy()
    embed[[5, 31]], head[9] = table(2, 3), table(1, 4)
    assert_rows(weights.embed, range(260), embed)
    assert_rows(weights.head, range(260), head)


def test_added_tokens_may_come_as_rows_alone(read, refusal):
    weights = read(tokens(EMBED, 3), True, trainable_token_indices=[257, 5, 256])
    assert weights.vocab_size == 258
    assert_rows(weights.head, [5, 256, 257], table(3, 3)[[1, 2, 0]])
    assert refusal(tokens(EMBED, 3), False, trainable_token_indices=[257, 5, 256]) == "incomplete_tensors"
    assert refusal(tokens(EMBED, 2), True, trainable_token_indices=[257, 5]) == "incomplete_tensors"
    assert refusal(tokens(EMBED, 1), True, trainable_token_indices=[10**6]) == "vocab_too_large"


@pytest.mark.parametrize(
    ("tensors", "config", "reason"),
    [
        ({}, [5], "contradictory_adapter"),
        (tokens(EMBED, 1), None, "contradictory_adapter"),
        (tokens(HEAD, 1), [5], "contradictory_adapter"),
        (tokens(EMBED, 1), {"q_proj": [5]}, "unsupported_adapter_feature"),
        (tokens(EMBED, 1), {"embed_tokens": [5], "model.embed_tokens": [6]}, "contradictory_adapter"),
        (tokens(EMBED, 2), [5], "shape_mismatch"),
        (tokens(EMBED, 1) | lora(modules="e"), [5], "ambiguous_tensors"),
        (tokens(EMBED, 1) | lora(modules="e"), [256], "contradictory_adapter"),
        (tokens(EMBED, 1) | {f"{EMBED}.weight": table()}, [5], "ambiguous_tensors"),
    ],
)
def test_d04_trained_tokens_that_contradict_the_rest(refusal, tensors, config, reason):
    assert refusal(tensors, False, trainable_token_indices=config) == reason


@pytest.mark.parametrize("saved", [[], ["embed_tokens"]])
def test_d04_lora_on_a_module_that_is_given_whole(refusal, saved):
    assert refusal(lora(modules="e") | {f"{EMBED}.weight": table()}, modules_to_save=saved) == "ambiguous_tensors"
