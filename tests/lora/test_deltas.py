"""An adapter as deltas against its base: PEFT's own numbers, and the cases that its files never hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from multilora_jax.errors import AdapterError
from multilora_jax.lora import deltas as module_under_test
from multilora_jax.lora.config import PeftConfig
from multilora_jax.lora.deltas import AdapterDeltas, to_deltas
from multilora_jax.lora.packing import pack, unpack
from multilora_jax.lora.tensor_names import projection_path
from multilora_jax.lora.weights import AdapterWeights, ModuleKey, VocabWeights, load_adapter
from multilora_jax.models.config import ModelConfig
from tests.oracle import EMBED, HEAD, Oracle, mix, read_deltas

DATA = Path(__file__).parent.parent / "data"
TINY, PEFT = DATA / "golden_tiny", DATA / "golden_peft"
MANIFESTS = {root: json.loads((root / "manifest.json").read_text()) for root in (TINY, PEFT)}
CASES = [(root, name) for root, manifest in MANIFESTS.items() for name in manifest["cases"]]
NORMS = {"input": "input_layernorm", "post": "post_attention_layernorm"}


class Base:
    """Tensors of a tiny base as they are served in `dtype`, with its oracle and its config."""

    def __init__(self, name: str, dtype: str = "float32"):
        folder = TINY / "bases" / name
        self.oracle = Oracle.from_folder(folder)
        self.config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()), name, None)
        self.geometry = self.config.geometry(num_pages=64, page_tokens=16, dtype=dtype, extra_vocab=8)
        self.dtype = dtype
        self.read: list[str] = []

    def tensor(self, name: str) -> np.ndarray | None:
        self.read.append(name)
        tensor = self.oracle.tensors.get(name)
        return None if tensor is None else tensor.astype(ml_dtypes.finfo(self.dtype).dtype).astype(np.float32)

    def load(self, folder: Path) -> AdapterWeights:
        return load_adapter(str(folder), self.config, max_lora_rank=64, max_extra_vocab=8)

    def deltas(self, weights: AdapterWeights) -> AdapterDeltas:
        return to_deltas(weights, self.config, self, self.geometry.vocab_rows, self.dtype)


@pytest.fixture(scope="module")
def bases():
    return {name: Base(name) for name in MANIFESTS[TINY]["bases"]}


@pytest.fixture(scope="module")
def tied(bases) -> Base:
    return bases["tied"]


def changes(deltas: AdapterDeltas, base: Oracle, vocab_size: int) -> dict[str, np.ndarray]:
    """What the deltas' formulas come to, as changes of the base's tensors in float64."""
    w, result = base.tensors, {}

    def wide(array) -> np.ndarray:
        return np.asarray(array, np.float64)

    for key, bias in deltas.bias.items():
        result[f"{projection_path(*key)}.bias"] = wide(bias)
    for key in deltas.a.keys() | deltas.gain.keys():
        name = f"{projection_path(*key)}.weight"
        result[name] = np.zeros_like(w[name])
        if key in deltas.a:
            result[name] += deltas.scale[key] * (wide(deltas.b[key]) @ wide(deltas.a[key]))
        if key in deltas.gain:
            result[name] += wide(deltas.gain[key])[:, None] * w[name]
    for (layer, kind), norm in deltas.norms.items():
        result[f"model.layers.{layer}.{NORMS[kind]}.weight"] = wide(norm)
    if deltas.final_norm is not None:
        result["model.norm.weight"] = wide(deltas.final_norm)
    for module, part in ((EMBED, deltas.embed), (HEAD, deltas.head)):
        if part is None:
            continue
        old = w[f"{module}.weight"]
        old = np.pad(old, ((0, vocab_size - len(old)), (0, 0)))
        change = np.zeros_like(old)
        if part.a is not None and part.b is not None:
            whole = part.scale * (wide(part.b) @ wide(part.a))
            whole = whole.T if module == EMBED else whole
            assert not whole[vocab_size:].any()
            change += whole[:vocab_size]
        if part.gain is not None:
            change += old * (wide(part.gain) if module == EMBED else wide(part.gain)[:vocab_size, None])
        change[part.row_ids] += wide(part.rows)
        result[f"{module}.weight"] = change
        if part.bias is not None:
            assert not part.bias[vocab_size:].any()
            result[f"{module}.bias"] = wide(part.bias)[:vocab_size]
    return result


def check_logits(oracle: Oracle, deltas: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Logits of the prompts, and of the greedy tokens given those before them."""
    for i in range(3):
        prompt, greedy, wanted = (expected[f"{kind}.{i}"] for kind in ("prompt", "greedy", "logits"))
        logits = oracle.logits([*prompt, *greedy[:-1]], deltas)
        np.testing.assert_allclose(logits[: len(prompt)], wanted, rtol=0, atol=2e-3)
        np.testing.assert_array_equal(logits[len(prompt) - 1 :].argmax(-1), greedy)


def test_there_are_all_cases():
    assert len(MANIFESTS[TINY]["cases"]) == 41
    assert len(CASES) > 60


@pytest.mark.parametrize(("root", "name"), CASES, ids=[f"{root.name}-{name}" for root, name in CASES])
def test_deltas_are_peft_s(bases, root, name):
    """What PEFT computes with the folder, through the deltas and through pages of them."""
    case, folder = MANIFESTS[root]["cases"][name], root / "cases" / name
    base = bases[case["base"]]
    weights = base.load(folder)
    assert weights.vocab_size == case.get("vocab_size", 256)
    deltas = base.deltas(weights)
    assert deltas.extra_tokens == weights.vocab_size - 256
    whole = changes(deltas, base.oracle, weights.vocab_size)
    if list(folder.glob("*.safetensors")) != [folder / "expected.safetensors"]:
        wanted = read_deltas(folder, base.oracle)
        for tensor in whole.keys() | wanted.keys():
            close = whole.get(tensor, 0) - wanted.get(tensor, 0)
            np.testing.assert_allclose(close, 0, atol=1e-5, err_msg=tensor)
    again = unpack(pack(deltas, base.geometry), base.geometry)
    for tensor, change in changes(again, base.oracle, weights.vocab_size).items():
        np.testing.assert_allclose(change, whole[tensor], atol=1e-6, err_msg=tensor)  # the scale is float32 there
    check_logits(base.oracle, whole, load_file(folder / "expected.safetensors"))


@pytest.mark.parametrize("name", MANIFESTS[PEFT]["mixes"])
def test_mixes_are_sums_of_scaled_deltas(bases, name):
    entry = MANIFESTS[PEFT]["mixes"][name]
    base, own, oracle_s = bases[entry["base"]], [], []
    for adapter in entry["adapters"]:
        weights = base.load(PEFT / adapter["path"])
        own.append((changes(base.deltas(weights), base.oracle, weights.vocab_size), adapter["scale"]))
        oracle_s.append((read_deltas(PEFT / adapter["path"], base.oracle), adapter["scale"]))
    for parts in (own, oracle_s):
        check_logits(base.oracle, mix(parts), load_file(PEFT / entry["path"] / "expected.safetensors"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_frozen_copies_of_the_base_cost_nothing(dtype):
    """As PEFT saves them: float32, where the base that is served may have been rounded."""
    base = Base("untied", dtype)
    deltas = base.deltas(base.load(TINY / "cases" / "embed_lm_head"))
    for part in (deltas.embed, deltas.head):
        assert part is not None
        assert part.a is not None
        assert len(part.row_ids) == 0
        assert part.gain is None


def test_only_rows_that_differ_are_kept(tied):
    weights = tied.load(PEFT / "cases" / "resized_tied")
    deltas = tied.deltas(weights)
    for part in (deltas.embed, deltas.head):
        assert part is not None
        assert part.a is None
        np.testing.assert_array_equal(part.row_ids, np.arange(256, 261))
        assert part.row_ids.dtype == np.int32
    packed = pack(deltas, tied.geometry)
    assert packed.layout.vocab is not None
    assert packed.layout.vocab.embed_rows == packed.layout.vocab.head_rows  # the same rows once, at both ends


def empty(vocab_size: int = 256, **parts: Any) -> AdapterWeights:
    config = PeftConfig.from_dict({"peft_type": "LORA"})
    parts = {"a": {}, "b": {}, "scale": {}} | parts
    return AdapterWeights("", "", 8, config, **parts, vocab_size=vocab_size)


def pair(rng: np.random.Generator, out_dim: int, in_dim: int, r: int = 2) -> tuple[np.ndarray, np.ndarray]:
    return rng.standard_normal((r, in_dim), np.float32), rng.standard_normal((out_dim, r), np.float32)


def dora(key: ModuleKey = (0, "up_proj"), **changed: Any) -> AdapterWeights:
    """DoRA on one projection, its parts replaced by `changed`."""
    a, b = pair(np.random.default_rng(1), 96, 64)
    magnitude = np.linspace(0.5, 2, 96, dtype=np.float32)
    parts = {"a": a, "b": b, "magnitude": magnitude, "scale": 0.5} | changed
    return empty(256, **{name: {key: part} for name, part in parts.items()})


def test_lora_is_passed_on_as_it_is_without_a_look_at_the_base(tied):
    a, b = pair(np.random.default_rng(0), 64, 64)
    head_a, head_b = pair(np.random.default_rng(1), 256, 64)
    tied.read.clear()
    weights = empty(a={(1, "q_proj"): a}, b={(1, "q_proj"): b}, scale={(1, "q_proj"): 3.0})
    weights = empty(a=weights.a, b=weights.b, scale=weights.scale, head=VocabWeights(head_a, head_b, 0.5))
    deltas = tied.deltas(weights)
    assert deltas.a[1, "q_proj"] is a
    assert deltas.b[1, "q_proj"] is b
    assert deltas.scale == {(1, "q_proj"): 3.0}
    assert deltas.head is not None
    assert deltas.head.b is not None
    assert deltas.head.b.shape == (tied.geometry.vocab_rows, 2)
    assert tied.read == []


@pytest.mark.parametrize("block", [1, 200, 2**20])
def test_dora_s_gain_is_exact_where_the_adapter_cancels_the_base(tied, monkeypatch, block):
    """Rows where W + s B A nearly vanishes: an expanded square would be left with rounding alone."""
    monkeypatch.setattr(module_under_test, "_BLOCK_ELEMENTS", block)
    w = tied.oracle.tensors["model.layers.0.mlp.up_proj.weight"]
    u, s, v = np.linalg.svd(w)
    full = (u[:, :64] * s) @ v  # W itself, as a product of rank 64
    np.testing.assert_allclose(full, w, atol=1e-12)
    a, b = v.astype(np.float32), (-(u[:, :64] * s) * 0.999 / 0.5).astype(np.float32)
    weights = dora(a=a, b=b)
    deltas = tied.deltas(weights)
    norm = np.linalg.norm(w.astype(np.float32) + 0.5 * (b.astype(np.float64) @ a.astype(np.float64)), axis=1)
    magnitude = weights.magnitude[0, "up_proj"]
    wanted = magnitude / norm - 1
    assert wanted.min() > 100  # the norms really are small
    np.testing.assert_allclose(deltas.gain[0, "up_proj"], wanted, rtol=2e-3)
    np.testing.assert_allclose(deltas.b[0, "up_proj"], b * (1 + deltas.gain[0, "up_proj"])[:, None], rtol=1e-6)
    assert weights.b[0, "up_proj"] is b


def test_dora_s_gain_is_that_of_float64(tied):
    weights = dora()
    a, b, magnitude = (part[0, "up_proj"].astype(np.float64) for part in (weights.a, weights.b, weights.magnitude))
    w = tied.oracle.tensors["model.layers.0.mlp.up_proj.weight"].astype(np.float32)
    wanted = magnitude / np.linalg.norm(w + 0.5 * (b @ a), axis=1) - 1
    np.testing.assert_allclose(tied.deltas(weights).gain[0, "up_proj"], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block", [1, 2**20])
def test_rows_and_gains_of_the_vocabulary_in_blocks(bases, monkeypatch, block):
    """The blocks' edges change nothing: replaced and added rows, DoRA over them, at both ends."""
    base = bases["untied"]
    weights = base.load(PEFT / "cases" / "dora_resized_untied")
    whole = changes(base.deltas(weights), base.oracle, 261)
    monkeypatch.setattr(module_under_test, "_BLOCK_ELEMENTS", block)
    for name, change in changes(base.deltas(weights), base.oracle, 261).items():
        np.testing.assert_allclose(change, whole[name], atol=1e-6)


class ZeroRow(Base):
    """A base with zeros in row 3 of everything."""

    def tensor(self, name):
        tensor = super().tensor(name)
        if tensor is not None:
            tensor[3] = 0
        return tensor


def test_a_magnitude_on_zeros_is_refused_and_zero_on_zeros_is_zero():
    base = ZeroRow("tied")
    weights = dora()
    weights.b[0, "up_proj"][3] = 0
    with pytest.raises(AdapterError, match=r"layers\.0\.mlp\.up_proj\.weight .* norm 0 in row 3") as caught:
        base.deltas(weights)
    assert caught.value.reason == "nan_weights"
    weights.magnitude[0, "up_proj"][3] = 0
    gain = base.deltas(weights).gain[0, "up_proj"]
    assert gain[3] == 0
    assert np.isfinite(gain).all()


def test_biases_are_replacement_minus_base_and_scaled_lora_bias(bases):
    base, key = bases["biased"], (1, "down_proj")
    new, extra = np.linspace(-1, 1, 64, dtype=np.float32), np.linspace(0, 3, 64, dtype=np.float32)
    a, b = pair(np.random.default_rng(0), 64, 96)
    old = base.oracle.tensors["model.layers.1.mlp.down_proj.bias"]
    weights = empty(a={key: a}, b={key: b}, scale={key: 0.25}, bias={key: new}, lora_bias={key: extra})
    np.testing.assert_allclose(base.deltas(weights).bias[key], new - old + 0.25 * extra, atol=1e-6)


def test_parts_that_change_nothing_are_dropped(bases):
    base = bases["biased"]

    def own(name: str) -> np.ndarray:
        tensor = base.tensor(name)
        assert tensor is not None
        return tensor

    same = VocabWeights(row_ids=np.arange(256, dtype=np.int32), rows=own("lm_head.weight"))
    weights = empty(
        bias={(0, "q_proj"): own("model.layers.0.self_attn.q_proj.bias")},
        norms={(1, "post"): own("model.layers.1.post_attention_layernorm.weight")},
        final_norm=own("model.norm.weight"),
        head=same,
    )
    deltas = base.deltas(weights)
    assert (deltas.bias, deltas.norms, deltas.final_norm, deltas.embed, deltas.head) == ({}, {}, None, None, None)
    # An adapter that changes nothing still has a page to be resident with, and a row to be in a step with.
    layout = pack(deltas, base.geometry).layout
    assert (layout.num_units, layout.num_pages, layout.num_rows, layout.rank) == (0, 1, 1, 0)
    assert not layout.extended


def test_an_untrained_lora_keeps_its_rank(tied):
    key, (a, b) = (0, "v_proj"), pair(np.random.default_rng(0), 32, 64)
    deltas = tied.deltas(empty(a={key: a}, b={key: np.zeros_like(b)}, scale={key: 1.0}))
    assert pack(deltas, tied.geometry).layout.rank == 2


def test_more_tokens_than_there_is_room_for_are_refused(tied):
    with pytest.raises(AdapterError, match="max_extra_vocab of at least 100") as caught:
        tied.deltas(empty(vocab_size=356))
    assert caught.value.reason == "vocab_too_large"


def test_what_was_never_trained_adds_nothing(bases, tied):
    """Zero in A or B or the scale; magnitudes, biases, norms and rows of the base's own."""
    weights = tied.load(TINY / "cases" / "all_linear")
    assert not tied.deltas(weights).adds_nothing
    zero_b = {key: b * 0 for key, b in weights.b.items()}
    untrained = replace(weights, b=zero_b)
    assert tied.deltas(untrained).adds_nothing
    assert tied.deltas(replace(weights, a={key: a * 0 for key, a in weights.a.items()})).adds_nothing
    assert tied.deltas(replace(weights, scale=dict.fromkeys(weights.scale, 0.0))).adds_nothing
    last = list(weights.b)[-1]
    assert not tied.deltas(replace(weights, b=zero_b | {last: weights.b[last]})).adds_nothing
    norms = {key: np.linalg.norm(tied.oracle.tensors[f"{projection_path(*key)}.weight"], axis=1) for key in weights.a}
    dora = {key: norm.astype(np.float32) for key, norm in norms.items()}
    assert tied.deltas(replace(untrained, magnitude=dora)).adds_nothing
    assert not tied.deltas(replace(untrained, magnitude=dora | {last: dora[last] * np.float32(1.01)})).adds_nothing
    final = tied.oracle.tensors["model.norm.weight"].astype(np.float32)
    assert tied.deltas(replace(untrained, final_norm=final)).adds_nothing
    assert not tied.deltas(replace(untrained, final_norm=final + 1)).adds_nothing
    assert not tied.deltas(replace(untrained, vocab_size=weights.vocab_size + 1)).adds_nothing


@pytest.mark.parametrize(("root", "case"), CASES)
def test_what_was_trained_adds_something(bases, root, case):
    """PEFT's cases: each has something of every kind that there is."""
    base = bases[MANIFESTS[root]["cases"][case]["base"]]
    assert not base.deltas(base.load(root / "cases" / case)).adds_nothing
