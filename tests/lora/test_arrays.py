"""Adapters in memory: names, layouts and leaves that are understood, and the numbers that come of them."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from multilora_jax.errors import AdapterError
from multilora_jax.lora.config import PeftConfig
from multilora_jax.lora.weights import AdapterWeights, load_adapter, weights_from_arrays

CONFIG = {"r": 8, "lora_alpha": 16}


@pytest.fixture
def read(model_config):
    def run(arrays, config=CONFIG, **limits) -> AdapterWeights:
        return weights_from_arrays(arrays, config, model_config, **{"max_lora_rank": 16, **limits})

    return run


def nested(tensors: dict[str, np.ndarray], *, layers_as: type = int, root: str = "") -> dict:
    """The tensors as a tree, as a training loop holds them."""
    tree: dict = {}
    for name, array in tensors.items():
        *path, leaf = name.removeprefix("base_model.model.").removesuffix(".weight").split(".")
        place = tree
        for part in path:
            place = place.setdefault(layers_as(part) if part.isdecimal() else part, {})
        place[leaf] = array
    return {root: tree} if root else tree


def flax_style(tensors: dict[str, np.ndarray], inside: str = "") -> dict[str, np.ndarray]:
    """lora_a [in, r] and lora_b [r, out]."""
    return {
        name.removeprefix("base_model.model.").replace(".lora_A.weight", f"{inside}.lora_a")
        .replace(".lora_B.weight", f"{inside}.lora_b"): array.T
        for name, array in tensors.items()
    }  # fmt: skip


def test_every_form_is_the_same_adapter(read, peft_tensors, peft_folder, model_config):
    raw = peft_tensors()
    from_file = load_adapter(str(peft_folder("a", raw)), model_config, max_lora_rank=16)
    forms = {
        "peft": raw,
        "without prefix": {name.removeprefix("base_model.model."): array for name, array in raw.items()},
        "bare": {name.removesuffix(".weight"): array for name, array in raw.items()},
        "nested": nested(raw),
        "text keys": nested(raw, layers_as=str),
        "params": nested(raw, root="params"),
        "flax": flax_style(raw),
        "flax module": flax_style(raw, ".lora"),
        "linen": {name.replace("layers.", "layers_"): array for name, array in flax_style(raw).items()},
        "linen tree": nested({name.replace("layers.", "layers_"): v for name, v in raw.items()}, root="params"),
        "flax kernel": {f"{name}.kernel": array for name, array in flax_style(raw).items()},
        "list of layers": {"model": {"layers": [*nested(raw)["model"]["layers"].values()]}},
    }
    digests = set()
    for form, arrays in forms.items():
        weights = read(arrays)
        assert weights.a.keys() == from_file.a.keys(), form
        assert (weights.scale, weights.rank, weights.path) == (from_file.scale, 8, "")
        for key, a in from_file.a.items():
            np.testing.assert_array_equal(weights.a[key], a, form)
            np.testing.assert_array_equal(weights.b[key], from_file.b[key], form)
        digests.add(weights.digest)
    assert len(digests) == 1


def test_an_embedding_in_flax_s_layout(read, peft_tensors):
    a, b = np.ones((256, 8), np.float32), np.full((8, 64), 2, np.float32)
    weights = read(peft_tensors() | {"model.embed_tokens.lora_a": a, "model.embed_tokens.lora_b": b})
    assert (weights.embed.a.shape, weights.embed.b.shape) == ((8, 256), (64, 8))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_types(read, peft_tensors, dtype):
    weights = read({name: array.astype(dtype) for name, array in peft_tensors().items()})
    wanted = peft_tensors()["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"]
    assert weights.b[1, "v_proj"].dtype == np.float32
    np.testing.assert_array_equal(weights.b[1, "v_proj"], wanted.astype(dtype).astype(np.float32))


def test_arrays_are_copied(read, peft_tensors):
    raw = peft_tensors()
    weights = read(raw)
    before = weights.a[0, "q_proj"].copy()
    for array in raw.values():
        array[:] = 0
    np.testing.assert_array_equal(weights.a[0, "q_proj"], before)
    assert weights.digest != read(raw).digest


def test_the_digest_is_of_names_numbers_and_config(read, peft_tensors):
    raw = peft_tensors()
    moved = {name.replace("v_proj", "k_proj"): array for name, array in raw.items()}
    others = [read(peft_tensors(seed=1)), read(moved), read(raw, CONFIG | {"lora_alpha": 8})]
    assert len({weights.digest for weights in [read(raw), *others]}) == 4


def test_configs(read, peft_tensors):
    raw = peft_tensors(4)
    by_arrays = read(raw, {"lora_alpha": 2})
    assert by_arrays.config == read(raw, PeftConfig(r=4, lora_alpha=2.0)).config
    assert by_arrays.scale[0, "q_proj"] == 0.5
    numbers = {"r": np.int64(4), "lora_alpha": jnp.float32(2), "use_rslora": np.bool_(False)}
    assert read(raw, numbers).config == by_arrays.config
    mixed = peft_tensors(8, ranks={(1, "v_proj"): 4})
    patterned = read(mixed, {"lora_alpha": 8, "rank_pattern": {"1.self_attn.v_proj": 4}})
    assert patterned.scale[1, "v_proj"] == 2.0


@pytest.mark.parametrize(
    ("config", "reason", "param"),
    [
        (None, "bad_adapter_config", "config"),
        ("x", "bad_adapter_config", "config"),
        ([1], "bad_adapter_config", "config"),
        ({"r": 8}, "bad_adapter_config", "config"),
        ({"r": 8, "lora_alpha": None}, "bad_adapter_config", "config"),
        ({"r": 4, "lora_alpha": 8}, "rank_mismatch", "r"),
        ({"r": 8, "lora_alpha": 8, "peft_type": "IA3"}, "unsupported_adapter_feature", "peft_type"),
        ({"r": 8, "lora_alpha": 8, "layer_replication": [[0, 1]]}, "unsupported_adapter_feature", "layer_replication"),
        ({"r": 8, "lora_alpha": 8, "use_dora": True}, "contradictory_adapter", "use_dora"),
    ],
)
def test_configs_that_are_refused(read, peft_tensors, config, reason, param):
    with pytest.raises(AdapterError) as caught:
        read(peft_tensors(), config)
    assert (caught.value.reason, caught.value.param) == (reason, param)


NAME = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({f"{NAME}.lora_A": None}, "unsupported_dtype"),
        ({f"{NAME}.lora_A": np.ones((8, 64), np.int32)}, "unsupported_dtype"),
        ({f"{NAME}.lora_A": "text"}, "unsupported_dtype"),
        ({f"{NAME}.lora_A": np.full((8, 64), np.nan, np.float32)}, "nan_weights"),
        ({f"{NAME}.lora_A": np.full((8, 64), 1e300)}, "nan_weights"),
        ({f"{NAME}.lora_A": np.float32(3)}, "empty_tensor"),
        ({f"{NAME}.lora_a": np.ones((64, 8), np.float32)}, "ambiguous_tensors"),
        ({"model.layers.2.self_attn.q_proj.lora_A": np.ones((8, 64), np.float32)}, "unbound_tensors"),
        ({"step": np.float32(3)}, "unbound_tensors"),
        ({f"{NAME}.lora_A": np.ones((8, 32), np.float32)}, "shape_mismatch"),
    ],
)
def test_arrays_that_are_refused(read, peft_tensors, change, reason):
    raw = {
        name.removeprefix("base_model.model.").removesuffix(".weight"): array for name, array in peft_tensors().items()
    }
    with pytest.raises(AdapterError) as caught:
        read(raw | change)
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        ("lora_A.kernel", "call it lora_A.weight if it is [r, in], lora_a.kernel if it is [in, r]"),
        ("lora_B.default.kernel", "call it lora_B.weight if it is [out, r], lora_b.kernel if it is [r, out]"),
    ],
)
def test_a_peft_name_with_a_flax_leaf_leaves_the_layout_open(read, peft_tensors, leaf, text):
    with pytest.raises(AdapterError) as caught:
        read(peft_tensors() | {f"model.layers.0.self_attn.k_proj.{leaf}": np.ones((8, 64), np.float32)})
    assert caught.value.reason == "ambiguous_tensors"
    assert text in caught.value.message


@pytest.mark.parametrize(
    ("leaf", "shape", "text"),
    [
        ("lora_a", (8, 64), "has shape (8, 64), and lora_a is [in, r], where in is 64 here: transpose it"),
        ("lora_b.kernel", (32, 8), "has shape (32, 8), and lora_b is [r, out], where out is 32 here: transpose it"),
        ("lora_A", (64, 8), "has shape (64, 8), and lora_A is [r, in], where in is 64 here: transpose it"),
        ("lora_B.weight", (8, 32), "has shape (8, 32), and lora_B is [out, r], where out is 32 here: transpose it"),
        ("lora_A", (8, 48), "need (8, 64); was it trained on another base?"),
    ],
)
def test_arrays_that_only_fit_transposed(read, peft_tensors, leaf, shape, text):
    place = "model.layers.0.self_attn.v_proj"
    side = "lora_A" if leaf.startswith(("lora_a", "lora_A")) else "lora_B"
    raw = {name: array for name, array in peft_tensors().items() if f"{place}.{side}" not in name}
    with pytest.raises(AdapterError) as caught:
        read(raw | {f"{place}.{leaf}": np.ones(shape, np.float32)})
    assert caught.value.reason == "shape_mismatch"
    assert caught.value.message.endswith(text)
    assert f"{place}.{leaf.split('.')[0]}" in caught.value.message


def test_unknown_names_are_told_as_they_were_given_with_the_accepted_forms(read, peft_tensors):
    with pytest.raises(AdapterError) as caught:
        read(peft_tensors() | {"params": {"decoder": {"q_proj": {"lora_a": np.ones((64, 8), np.float32)}}}})
    assert caught.value.reason == "unbound_tensors"
    assert "'params.decoder.q_proj.lora_a'" in caught.value.message
    assert "lora_a with [in, r]" in caught.value.message
    assert "another base" not in caught.value.message


def test_nothing(read):
    with pytest.raises(AdapterError) as caught:
        read({})
    assert caught.value.reason == "empty_adapter"


@pytest.mark.parametrize("tree", [None, [1, 2], np.ones((2, 2), np.float32)])
def test_what_is_no_tree(read, tree):
    with pytest.raises(AdapterError, match="params must be a mapping from names to arrays") as caught:
        read(tree)
    assert (caught.value.reason, caught.value.param) == ("bad_arrays", "params")


def test_a_tree_that_holds_itself(read, peft_tensors):
    tree = nested(peft_tensors())
    tree["model"]["again"] = [tree]
    with pytest.raises(AdapterError, match="levels deep at 'model.again.0.model") as caught:
        read(tree)
    assert (caught.value.reason, caught.value.param) == ("bad_arrays", "params")


def test_arrays_without_values(read, peft_tensors):
    import jax.numpy as jnp

    arrays = {name: jnp.asarray(array) for name, array in peft_tensors().items()}
    read(arrays)
    name = min(arrays)
    arrays[name].delete()
    with pytest.raises(AdapterError, match="deleted.*donated") as caught:
        read(arrays)
    assert (caught.value.reason, caught.value.param) == ("bad_arrays", "params")
    assert name in caught.value.message


def test_ranks_above_the_limit(read, peft_tensors):
    with pytest.raises(AdapterError, match="max_lora_rank 4"):
        read(peft_tensors(), max_lora_rank=4)


def test_the_state_of_a_flax_model(read):
    import jax.numpy as jnp
    from flax import nnx

    class Attention(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.q_proj = nnx.LoRALinear(64, 64, lora_rank=8, lora_param_type=nnx.LoRAParam, rngs=rngs)

    class Layer(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.self_attn = Attention(rngs)

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.layers = nnx.List([Layer(rngs), Layer(rngs)])

    model = Model(nnx.Rngs(0))
    lora = model.layers[1].self_attn.q_proj.lora
    lora.lora_b[...] = jnp.arange(512.0, dtype=jnp.bfloat16).reshape(8, 64)
    weights = read(nnx.state(model, nnx.LoRAParam))
    assert weights.a.keys() == {(0, "q_proj"), (1, "q_proj")}
    np.testing.assert_array_equal(weights.a[1, "q_proj"], np.asarray(lora.lora_a[...]).T)
    np.testing.assert_array_equal(weights.b[1, "q_proj"], np.asarray(lora.lora_b[...], np.float32).T)
