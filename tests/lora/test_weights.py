"""Adapter folders: what loads, with which numbers, and why the others are refused."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from multilora_jax.errors import AdapterError, NotFoundError, UserError
from multilora_jax.lora.weights import AdapterWeights, load_adapter

PREFIX = "base_model.model.model.layers"


@pytest.fixture
def load(model_config):
    def run(folder: Path, max_lora_rank: int = 16) -> AdapterWeights:
        return load_adapter(str(folder), model_config, max_lora_rank=max_lora_rank)

    return run


@pytest.fixture
def refusal(load):
    """Loads a folder that must be refused; returns (reason, param, message)."""

    def run(folder: Path, error: type[UserError] = AdapterError) -> tuple[str, str | None, str]:
        with pytest.raises(error) as caught:
            load(folder)
        assert len(caught.value.message) < 3000
        return caught.value.reason, caught.value.param, caught.value.message

    return run


def delta(weights: AdapterWeights, key: tuple[int, str]) -> np.ndarray:
    return weights.scale[key] * (weights.b[key] @ weights.a[key])


def test_d01_rank_stabilised_scale(load, peft_folder, peft_tensors):
    raw = peft_tensors(16)
    a, b = raw[f"{PREFIX}.1.self_attn.q_proj.lora_A.weight"], raw[f"{PREFIX}.1.self_attn.q_proj.lora_B.weight"]
    for alpha in (16, 12.5):
        plain = load(peft_folder("plain", raw, r=16, lora_alpha=alpha))
        stable = load(peft_folder("stable", raw, r=16, lora_alpha=alpha, use_rslora=True))
        np.testing.assert_allclose(delta(plain, (1, "q_proj")), alpha / 16 * (b @ a), rtol=1e-6)
        np.testing.assert_allclose(delta(stable, (1, "q_proj")), alpha / 4 * (b @ a), rtol=1e-6)
        assert plain.digest != stable.digest


def test_d02_patterns_give_each_module_its_rank_and_alpha(load, peft_folder, peft_tensors):
    patterns = {
        "rank_pattern": {"layers.1.self_attn.q_proj": 4, ".*v_proj": 2},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 64},
    }
    ranks = {(1, "q_proj"): 4, (0, "v_proj"): 2, (1, "v_proj"): 2}
    raw = peft_tensors(8, ranks=ranks)
    weights = load(peft_folder("a", raw, **patterns))
    assert {key: len(a) for key, a in weights.a.items()} == {(0, "q_proj"): 8, **ranks}
    assert weights.scale == {(0, "q_proj"): 2.0, (1, "q_proj"): 16.0, (0, "v_proj"): 8.0, (1, "v_proj"): 8.0}
    assert weights.rank == 8
    wanted = 16.0 * (
        raw[f"{PREFIX}.1.self_attn.q_proj.lora_B.weight"] @ raw[f"{PREFIX}.1.self_attn.q_proj.lora_A.weight"]
    )
    np.testing.assert_allclose(delta(weights, (1, "q_proj")), wanted, rtol=1e-6)


def test_d02_config_and_tensors_must_agree(refusal, peft_folder, peft_tensors):
    reason, param, message = refusal(peft_folder("a", peft_tensors(8, ranks={(1, "v_proj"): 4})))
    assert (reason, param) == ("rank_mismatch", "r")
    assert "layers.1.self_attn.v_proj" in message
    assert "rank 4" in message
    assert "rank 8" in message


def test_d02_the_largest_rank_counts_against_the_limit(load, peft_folder, peft_tensors):
    small = peft_folder("small", peft_tensors(16), r=64, rank_pattern={"[qv]_proj": 16})
    assert load(small, max_lora_rank=16).rank == 16
    mixed = peft_folder("mixed", peft_tensors(8, ranks={(1, "v_proj"): 17}), rank_pattern={"1.self_attn.v_proj": 17})
    with pytest.raises(AdapterError, match="rank 17, above max_lora_rank 16") as caught:
        load(mixed, max_lora_rank=16)
    assert caught.value.reason == "rank_too_large"


def test_d03_the_file_decides_what_is_targeted(load, peft_folder):
    targets = [["q_proj", "v_proj"], "all-linear", r".*\.(q|v)_proj", ["self_attn.q_proj", "self_attn.v_proj"], None]
    loaded = [load(peft_folder(str(i), target_modules=target)) for i, target in enumerate(targets)]
    assert len({weights.digest for weights in loaded}) == 1
    assert all(weights.a.keys() == {(i, m) for i in (0, 1) for m in ("q_proj", "v_proj")} for weights in loaded)


@pytest.mark.parametrize(
    "modules", [("q_proj", "v_proj"), ("k_proj",), ("gate_proj",), ("up_proj", "down_proj"), ("o_proj",)]
)
def test_d05_projections_are_independent(load, peft_folder, peft_tensors, modules):
    raw = peft_tensors(4, modules, layers=(1,))
    weights = load(peft_folder("a", raw, r=4))
    assert weights.a.keys() == {(1, module) for module in modules}
    for (_, module), a in weights.a.items():
        block = "mlp" if module in ("gate_proj", "up_proj", "down_proj") else "self_attn"
        np.testing.assert_array_equal(a, raw[f"{PREFIX}.1.{block}.{module}.lora_A.weight"])


def test_d05_head_dim_may_differ_from_hidden_over_heads(make_model_config, peft_folder):
    name, rng = f"{PREFIX}.0.self_attn", np.random.default_rng(0)
    shapes = {"q_proj": (64, 128), "k_proj": (64, 64), "o_proj": (128, 64)}
    raw = {
        f"{name}.{m}.lora_{s}.weight": rng.random((8, i) if s == "A" else (o, 8), np.float32)
        for m, (i, o) in shapes.items()
        for s in "AB"
    }
    weights = load_adapter(str(peft_folder("a", raw)), make_model_config(head_dim=32), max_lora_rank=8)
    assert {m: (weights.a[0, m].shape[1], weights.b[0, m].shape[0]) for m in shapes} == shapes


def test_d06_six_bad_folders_then_a_good_one(load, refusal, peft_folder, peft_tensors):
    good = peft_tensors()
    key = f"{PREFIX}.0.self_attn.q_proj.lora_A.weight"
    large = peft_folder("large", peft_tensors(17), r=17)
    wide = peft_folder("wide", good | {key: np.ones((8, 65), np.float32)})
    half = peft_folder("half")
    weights = half / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    text = peft_folder("text")
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 123456\n"
    (text / "adapter_model.safetensors").write_text(pointer)
    empty = peft_folder("empty", {name: np.zeros(0, np.float32) for name in good})
    single = peft_folder("single", {name: array for name, array in good.items() if name != key})
    results = {folder.name: refusal(folder) for folder in (large, wide, half, text, empty, single)}
    assert {name: reason for name, (reason, _, _) in results.items()} == {
        "large": "rank_too_large", "wide": "shape_mismatch", "half": "corrupt_weights", "text": "lfs_pointer",
        "empty": "empty_tensor", "single": "incomplete_tensors",
    }  # fmt: skip
    assert "17" in results["large"][2]
    assert "16" in results["large"][2]
    assert "(8, 65)" in results["wide"][2]
    assert "(8, 64)" in results["wide"][2]
    assert load(peft_folder("good")).rank == 8


def test_d07_configs_of_other_trainers(load, refusal, peft_folder):
    unset = dict.fromkeys(("eva_config", "corda_config", "exclude_modules", "layer_replication", "enable_lora"))
    plain = load(peft_folder("plain"))
    assert load(peft_folder("nulls", lora_bias=False, **unset)).digest == plain.digest
    assert load(peft_folder("no_base", drop=("base_model_name_or_path",))).digest == plain.digest
    assert refusal(peft_folder("ia3", peft_type="IA3"))[:2] == ("unsupported_adapter_feature", "peft_type")
    assert refusal(peft_folder("untyped", drop=("peft_type",)))[:2] == ("bad_adapter_config", "peft_type")
    replicated = refusal(peft_folder("replicated", layer_replication=[[0, 1]]))
    assert replicated[:2] == ("unsupported_adapter_feature", "layer_replication")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (f"{PREFIX}.2.self_attn.q_proj.lora_A.weight", "unbound_tensors"),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", "unbound_tensors"),
        (f"{PREFIX}.0.self_attn.q_proj.base_layer.weight", "unbound_tensors"),
        (f"{PREFIX}.0.self_attn.qkv_proj.lora_A.weight", "unbound_tensors"),
        ("base_model.model.layers.0.self_attn.q_proj.lora_A.weight", "ambiguous_tensors"),
        (f"{PREFIX}.0.self_attn.q_proj.lora_A.other.weight", "ambiguous_tensors"),
        (f"{PREFIX}.1.mlp.up_proj.lora_A.weight", "incomplete_tensors"),
        (f"{PREFIX}.1.mlp.up_proj.lora_B.weight", "incomplete_tensors"),
    ],
)
def test_every_tensor_must_bind_once(refusal, peft_folder, peft_tensors, name, reason):
    got, _, message = refusal(peft_folder("a", peft_tensors() | {name: np.ones((8, 64), np.float32)}))
    assert got == reason
    assert ("other" if ".other." in name else name.removeprefix("base_model.model.").split(".lora")[0]) in message


def test_two_adapters_in_one_file(refusal, peft_folder, peft_tensors):
    other = {name.replace(".weight", ".other.weight"): array for name, array in peft_tensors(8, ("up_proj",)).items()}
    reason, _, message = refusal(peft_folder("a", peft_tensors() | other))
    assert reason == "ambiguous_tensors"
    assert "several adapters" in message


def test_a_module_may_not_mix_two_prefixes(refusal, peft_folder, peft_tensors):
    raw = peft_tensors()
    moved = "base_model.model.layers.0.self_attn.q_proj.lora_B.weight"
    raw[moved] = raw.pop(f"{PREFIX}.0.self_attn.q_proj.lora_B.weight")
    assert refusal(peft_folder("a", raw))[0] == "ambiguous_tensors"


def test_many_unbound_tensors_give_a_short_message(refusal, peft_folder):
    raw = {f"{'x' * 300}.{i}": np.ones((8, 64), np.float32) for i in range(500)}
    assert "and 495 more" in refusal(peft_folder("a", raw))[2]


@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize("shape", [(8,), (8, 64, 1), (0, 64), (8, 0), ()])
def test_tensors_must_be_matrices(refusal, peft_folder, peft_tensors, side, shape):
    raw = peft_tensors() | {f"{PREFIX}.0.self_attn.q_proj.lora_{side}.weight": np.ones(shape, np.float32)}
    assert refusal(peft_folder("a", raw))[0] == "empty_tensor"


@pytest.mark.parametrize(("side", "shape"), [("A", (8, 32)), ("B", (32, 8)), ("B", (64, 4)), ("A", (4, 64))])
def test_shapes_must_fit_the_base_and_each_other(refusal, peft_folder, peft_tensors, side, shape):
    raw = peft_tensors() | {f"{PREFIX}.0.self_attn.q_proj.lora_{side}.weight": np.ones(shape, np.float32)}
    assert refusal(peft_folder("a", raw))[0] == "shape_mismatch"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_values_must_be_finite(refusal, peft_folder, peft_tensors, value, dtype):
    raw = {name: array.astype(dtype) for name, array in peft_tensors().items()}
    bad = f"{PREFIX}.1.self_attn.v_proj.lora_B.weight"
    raw[bad][3, 2] = value
    reason, _, message = refusal(peft_folder("a", raw))
    assert reason == "nan_weights"
    assert bad in message


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_half_precision_files_are_widened(load, peft_folder, peft_tensors, dtype):
    raw = {name: array.astype(dtype) for name, array in peft_tensors().items()}
    weights = load(peft_folder("a", raw))
    a = weights.a[0, "q_proj"]
    assert a.dtype == np.float32
    np.testing.assert_array_equal(a, raw[f"{PREFIX}.0.self_attn.q_proj.lora_A.weight"].astype(np.float32))


def test_adapter_names_inside_keys_and_short_prefixes(load, peft_folder, peft_tensors):
    named = {name.replace(".weight", ".default.weight"): array for name, array in peft_tensors().items()}
    short = {name.replace("model.model.", "model."): array for name, array in peft_tensors().items()}
    plain = load(peft_folder("plain"))
    for raw in (named, short):
        weights = load(peft_folder("a", raw))
        assert weights.scale == plain.scale
        for key, array in plain.a.items():
            np.testing.assert_array_equal(weights.a[key], array)


def test_patterns_see_the_names_in_the_file(load, peft_folder, peft_tensors):
    short = {name.replace("model.model.", "model."): array for name, array in peft_tensors(4).items()}
    assert load(peft_folder("a", short, rank_pattern={r"^layers\.": 99, r"^layers.*": 4})).rank == 4


def test_empty_adapter(refusal, peft_folder):
    assert refusal(peft_folder("a", {}))[0] == "empty_adapter"


def test_missing_folder_and_files(refusal, peft_folder, tmp_path):
    assert refusal(tmp_path / "none", NotFoundError)[0] == "adapter_path_not_found"
    assert refusal(tmp_path / ("x" * 4000), NotFoundError)[0] == "adapter_path_not_found"
    assert refusal(Path("nul\0"), NotFoundError)[0] == "adapter_path_not_found"
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        folder = peft_folder(f"without {name}")
        (folder / name).unlink()
        reason, param, message = refusal(folder, NotFoundError)
        assert (reason, param) == ("adapter_file_not_found", "lora_path")
        assert name in message
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        reason, _, message = refusal(tmp_path / name, NotFoundError)
        assert reason == "adapter_path_not_found"
        assert f"{name}' is a file: give its folder" in message


def test_folders_without_an_adapter_say_so(refusal, peft_folder, tmp_path):
    (tmp_path / "empty").mkdir()
    other = tmp_path / "other"
    (other / "sub").mkdir(parents=True)
    (other / "README.md").write_text("x")
    peft_folder("parent/inside")
    for name, text in (("empty", "is empty"), ("other", "holds no adapter"), ("parent", "but folders in it do")):
        reason, param, message = refusal(tmp_path / name, NotFoundError)
        assert (reason, param) == ("adapter_file_not_found", "lora_path")
        assert text in message
        assert ("folders in it" in message) == (name == "parent")


def test_odd_config_files(refusal, peft_folder):
    pointer = peft_folder("pointer")
    (pointer / "adapter_config.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert refusal(pointer)[0] == "lfs_pointer"
    huge = peft_folder("huge")
    (huge / "adapter_config.json").write_bytes(b" " * (17 * 2**20))
    reason, _, message = refusal(huge)
    assert reason == "bad_adapter_config"
    assert "larger than" in message


@pytest.mark.parametrize(
    ("named", "base_name", "warned"),
    [
        ("org/Tiny-Base", "elsewhere/tiny-base", False), ("../bases/tiny/", "tiny", False), ("org/other", "tiny", True),
        ("org/tiny-instruct", "/models/tiny", True), ("org/other", None, False), (None, "tiny", False),
        ("", "tiny", False), ("snapshots/" + "0a" * 20, "tiny", False), ("org/other", "/m/tiny.Q8_0.gguf", True),
        ("org/Tiny-7b-it", "tiny-7b.Q8_0.gguf", False), ("org/other-1234", "pypi:llm-tiny==0.1234", True),
        ("org/Tiny2-135M", "pypi:llm-tiny2==0.1.2", False), ("org/abc", "pypi:llm-tiny2==0.1.2", False),
        ("org/other", "model.gguf", False), ("other.gguf", "org/tiny", True),
    ],
)  # fmt: skip
def test_another_base_gets_a_warning(model_config, peft_folder, named, base_name, warned):
    folder = peft_folder("a", base_model_name_or_path=named)
    weights = load_adapter(str(folder), model_config, max_lora_rank=8, base_name=base_name)
    assert [("other" in w or "tiny-instruct" in w) and "tiny" in w for w in weights.warnings] == [True] * warned


@pytest.mark.parametrize(
    ("targets", "warned"),
    [
        (["o_proj", "up_proj"], True), (["proj"], True), (["q_proj", "o_proj"], False),
        (["layers.0.self_attn.v_proj"], False), ("all-linear", False), (".*o_proj", False), (None, False), ([], False),
        ({"o_proj": 1}, False), (["o_proj", 3], False),
    ],
)  # fmt: skip
def test_targets_that_are_not_in_the_file_get_a_warning(load, peft_folder, targets, warned):
    weights = load(peft_folder("a", target_modules=targets))
    assert ["PEFT would ignore" in w and "proj'" in w for w in weights.warnings] == [True] * warned
    assert weights.digest == load(peft_folder("b")).digest


def test_digest_is_of_the_content(load, peft_folder, peft_tensors):
    first = load(peft_folder("a"))
    assert len(first.digest) == 64
    assert load(peft_folder("b", revision="other", target_modules="all-linear")).digest == first.digest
    others = [
        load(peft_folder("c", peft_tensors(seed=1))),
        load(peft_folder("d", lora_alpha=17)),
        load(peft_folder("e", alpha_pattern={"q_proj": 1})),
    ]
    assert len({weights.digest for weights in [first, *others]}) == 4
