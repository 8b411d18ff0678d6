"""adapter_config.json: scales, patterns, and what is skipped or refused."""

from __future__ import annotations

import json
import time

import pytest

from multilora_jax.errors import AdapterError
from multilora_jax.lora.config import PeftConfig

Q0, Q1, V1 = (f"model.layers.{n}.self_attn.{m}_proj" for n, m in ((0, "q"), (1, "q"), (1, "v")))


def parse(**fields) -> PeftConfig:
    return PeftConfig.from_dict({"peft_type": "LORA", "r": 8, "lora_alpha": 16, **fields})


@pytest.mark.parametrize(
    ("fields", "scale"),
    [
        ({"r": 16, "lora_alpha": 16}, 1.0),
        ({"r": 16, "lora_alpha": 16, "use_rslora": True}, 4.0),
        ({"r": 16, "lora_alpha": 12.5}, 12.5 / 16),
        ({"r": 16, "lora_alpha": 12.5, "use_rslora": True}, 12.5 / 4),
        ({"r": 16, "lora_alpha": 16, "use_rslora": None}, 1.0),
        ({"r": 16.0, "lora_alpha": 0}, 0.0),
        ({"r": None, "lora_alpha": None}, 1.0),  # PEFT's defaults: 8 and 8
    ],
)
def test_d01_scale(fields, scale):
    assert parse(**fields).scale_of(Q0) == scale


def test_d02_patterns_match_whole_names_at_a_dot_first_match_wins():
    config = parse(
        rank_pattern={"layers.1.self_attn.q_proj": 4, ".*v_proj": 2, "q_proj": 3, "_proj": 99, "^layers.0.*": 98},
        alpha_pattern={"layers.1.self_attn.q_proj": 64, "^model.layers.1.self_attn.v_proj$": 6.5},
    )
    assert [config.rank_of(name) for name in (Q0, Q1, V1)] == [3, 4, 2]
    assert [config.scale_of(name) for name in (Q0, Q1, V1)] == [16 / 3, 16.0, 3.25]
    assert config.rank_of("model.layers.0.mlp.up_proj") == 8  # "_proj" is no whole part of a name
    assert parse(rank_pattern={"q_proj": 2, "layers.1.self_attn.q_proj": 4}).rank_of(Q1) == 2
    assert parse(rank_pattern=None, alpha_pattern={}).rank_of(Q1) == 8


def test_d02_rslora_uses_each_module_s_own_rank():
    config = parse(use_rslora=True, rank_pattern={"q_proj": 4}, alpha_pattern={"v_proj": 6})
    assert config.scale_of(Q0) == 8.0
    assert config.scale_of(V1) == pytest.approx(6 / 8**0.5)


@pytest.mark.parametrize(
    "targets",
    [["q_proj"], "all-linear", r".*\.(q|v)_proj", ["self_attn.q_proj"], ["model.layers.0.self_attn.q_proj"], None],
)
def test_d03_target_modules_of_any_form(targets):
    assert parse(target_modules=targets) == parse()


def test_d07_null_false_and_empty_are_ignored():
    nothing = dict.fromkeys(("eva_config", "corda_config", "exclude_modules", "layer_replication", "enable_lora"))
    empty = {
        "lora_bias": False,
        "use_dora": 0,
        "modules_to_save": [],
        "loftq_config": {},
        "brand_new": "",
        "bias": None,
    }
    assert parse(**nothing, **empty) == parse()


def test_d07_base_model_is_advisory():
    assert parse().base_model_name_or_path is None
    assert parse(base_model_name_or_path=None) == parse(base_model_name_or_path=["odd"]) == parse()
    assert parse(base_model_name_or_path="org/name").base_model_name_or_path == "org/name"


def test_inert_fields_with_values_are_ignored():
    inert = {
        "megatron_core": "megatron.core", "qalora_group_size": 16, "lora_dropout": 0.1, "peft_version": "0.21.2",
        "task_type": "CAUSAL_LM", "exclude_modules": ["k_proj"], "layers_to_transform": [1], "layers_pattern": "layers",
        "auto_mapping": {"a": "b"}, "revision": "main", "inference_mode": True, "loftq_config": {"loftq_bits": 4},
        "eva_config": {"rho": 2.0}, "corda_config": {"corda_method": "kpm"},
    }  # fmt: skip
    assert parse(**inert) == parse()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_replication", [[0, 1]]), ("fan_in_fan_out", True), ("alora_invocation_tokens", [1, 2]),
        ("use_qalora", True), ("target_parameters", ["x"]), ("use_bdlora", {"a": 1}), ("arrow_config", {"a": 1}),
        ("kasa_config", {"beta": 1}), ("monteclora_config", {"a": 1}), ("never_heard_of", 3),
        ("init_lora_weights", "pissa"), ("init_lora_weights", "pissa_niter_4"), ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"), ("init_lora_weights", "loftq"), ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "some_new_start"), ("peft_type", "IA3"), ("peft_type", ["LORA"]),
    ],
)  # fmt: skip
def test_d04_d07_what_changes_the_result_is_refused_by_name(field, value):
    with pytest.raises(AdapterError, match=rf"^{field}: ") as caught:
        parse(**{field: value})
    assert (caught.value.reason, caught.value.param) == ("unsupported_adapter_feature", field)
    assert caught.value.status == 400


def test_features_are_read():
    config = parse(
        bias="lora_only", lora_bias=True, modules_to_save=["norm", "lm_head", "norm"], ensure_weight_tying=True,
        trainable_token_indices={"lm_head": [3], "embed_tokens": [7, 5]},
    )  # fmt: skip
    assert (config.bias, config.lora_bias, config.use_dora, config.ensure_weight_tying) == (
        "lora_only", True, False, True,
    )  # fmt: skip
    assert config.modules_to_save == ("lm_head", "norm")
    assert config.trainable_token_indices == (("embed_tokens", (7, 5)), ("lm_head", (3,)))
    assert parse(trainable_token_indices=[7, 5]).trainable_token_indices == (("embed_tokens", (7, 5)),)
    assert parse(use_dora=True).use_dora


def test_modules_to_save_match_by_the_bare_end_of_a_name():
    paths = ["model.norm", "model.layers.3.input_layernorm", "lm_head", "model.embed_tokens"]
    saved = {
        entry: [config.saves(path) for path in paths]
        for entry in ("norm", "model.norm", "layernorm", "lm_head", "tokens", "base_model.model.lm_head", "head.")
        if (config := parse(modules_to_save=[entry]))
    }
    assert saved == {
        "norm": [True, True, False, False],
        "model.norm": [True, False, False, False],
        "layernorm": [False, True, False, False],
        "lm_head": [False, False, True, False],
        "tokens": [False, False, False, True],
        "base_model.model.lm_head": [False, False, True, False],
        "head.": [False] * 4,
    }
    assert not parse().saves("lm_head")


def test_dora_and_lora_bias_exclude_each_other_as_in_peft():
    with pytest.raises(AdapterError, match="use_dora"):
        parse(use_dora=True, lora_bias=True)


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "Gaussian", "eva", "orthogonal", "mica"])
def test_starts_that_leave_the_base_alone_are_fine(start):
    assert parse(init_lora_weights=start) == parse()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", None), ("peft_type", ""),
        ("r", 0), ("r", -1), ("r", 1.5), ("r", "8"), ("r", True), ("r", [8]), ("r", float("nan")),
        ("lora_alpha", "16"), ("lora_alpha", True), ("lora_alpha", float("nan")), ("lora_alpha", float("inf")),
        ("lora_alpha", 1e39), ("lora_alpha", 10**400), ("use_rslora", "true"), ("use_rslora", 1),
        ("rank_pattern", ["q_proj"]), ("rank_pattern", {"q_proj": 0}), ("rank_pattern", {"q_proj": None}),
        ("rank_pattern", {"(": 4}), ("rank_pattern", {"a{9999999999999}": 4}), ("alpha_pattern", {"q_proj": "1"}),
        ("alpha_pattern", "q_proj"), ("init_lora_weights", 3), ("bias", "some"), ("bias", True), ("bias", ["all"]),
        ("use_dora", "true"), ("lora_bias", 1), ("ensure_weight_tying", "no"),
        ("modules_to_save", {"lm_head": 1}), ("modules_to_save", ["lm_head", 3]), ("modules_to_save", [""]),
        ("trainable_token_indices", [-1]), ("trainable_token_indices", [1.0]), ("trainable_token_indices", [True]),
        ("trainable_token_indices", [5, 5]), ("trainable_token_indices", {"embed_tokens": 5}),
        ("trainable_token_indices", {3: [5]}), ("trainable_token_indices", "5"),
    ],
)  # fmt: skip
def test_bad_values_name_their_field(field, value):
    with pytest.raises(AdapterError, match=field) as caught:
        parse(**{field: value})
    assert (caught.value.reason, caught.value.param) == ("bad_adapter_config", field)
    assert len(str(caught.value)) < 500


def test_d07_missing_peft_type():
    with pytest.raises(AdapterError, match="peft_type is missing"):
        PeftConfig.from_dict({"r": 8})


@pytest.mark.parametrize(
    "pattern", ["(a+)+", "(.|.)" * 20, "a?" * 25 + "a" * 25, ".*" * 12, "x" * 2000, "(?x:(a+)#\n+)"]
)
def test_patterns_that_could_hang_the_server_are_refused(pattern):
    started = time.monotonic()
    with pytest.raises(AdapterError, match="very long") as caught:
        parse(rank_pattern={pattern: 4}).rank_of("a" * 40 + "!")
    assert caught.value.param == "rank_pattern"
    assert time.monotonic() - started < 1


@pytest.mark.parametrize(
    "pattern",
    [r".*\.(q|v)_proj", r"layers\.(1[0-9]|2[0-3])\..*\.(self_attn|mlp)\..*", r"^model\.layers\.\d+\.mlp", "(?:a|b)"],
)
def test_ordinary_patterns_are_allowed(pattern):
    assert parse(rank_pattern={pattern: 4}).rank_pattern[0].key == pattern


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"peft_type": "LORA", "r": 8']
)
def test_broken_json_is_refused(text):
    with pytest.raises(AdapterError) as caught:
        PeftConfig.from_json(text)
    assert caught.value.reason == "bad_adapter_config"


def test_json_with_a_byte_order_mark():
    assert PeftConfig.from_json(b"\xef\xbb\xbf" + json.dumps({"peft_type": "LORA"}).encode()).r == 8


def test_canonical_json_covers_what_changes_the_result_and_nothing_else():
    base = parse(alpha_pattern={"a": 1, "b": 2})
    same = parse(alpha_pattern={"a": 1.0, "b": 2.0}, lora_alpha=16.0, revision="x", target_modules=["q_proj"])
    assert base.canonical_json() == same.canonical_json()
    others = [
        parse(alpha_pattern={"b": 2, "a": 1}), parse(rank_pattern={"a": 1, "b": 2}), parse(), parse(r=4),
        parse(lora_alpha=17), parse(use_rslora=True), parse(use_dora=True), parse(bias="all"), parse(lora_bias=True),
        parse(bias="lora_only"), parse(modules_to_save=["norm"]), parse(ensure_weight_tying=True),
        parse(trainable_token_indices=[1, 2]), parse(trainable_token_indices=[2, 1]),
        parse(trainable_token_indices={"lm_head": [1, 2]}),
    ]  # fmt: skip
    assert len({config.canonical_json() for config in [base, *others]}) == 1 + len(others)
    trained = [parse(modules_to_save=names).canonical_json() for names in (["a", "b"], ["b", "a"], ["b", "a", "b"])]
    assert len(set(trained)) == 1


def test_half_a_surrogate_pair_in_the_base_s_name_can_be_told():
    config = PeftConfig.from_json(b'{"peft_type": "LORA", "base_model_name_or_path": "a\\ud800b"}')
    assert config.base_model_name_or_path == "a?b"
