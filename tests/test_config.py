"""The configuration: strict reading, clear refusals, paths, and the flags that override it."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path

import pytest

from multilora_jax.config import POOL_SIZE_KEYS, EngineConfig, describe_keys
from multilora_jax.errors import ConfigError, NotFoundError


def write(folder: Path, text: str, name: str = "c.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(values: dict, **kwargs) -> ConfigError:
    with pytest.raises(ConfigError) as info:
        EngineConfig.from_dict(values, **kwargs)
    return info.value


class TestKeys:
    def test_every_key_is_described(self):
        docs = describe_keys()
        assert list(docs) == [f.name for f in dataclasses.fields(EngineConfig)]
        assert all(doc.rstrip(")")[-1].isalnum() or doc.endswith(".") for doc in docs.values())
        assert docs["port"].endswith("(at least 0, at most 65535)")

    def test_defaults_need_only_a_model(self):
        config = EngineConfig(model="m")
        assert (config.dtype, config.page_tokens, config.max_lora_rank, config.prefill_block) == ("auto", 16, 64, 32)
        assert config.enable_lora
        assert config.warm_up
        assert config.lora_modules == {}

    def test_missing_model(self):
        error = refusal({"port": 1})
        assert (error.reason, error.param) == ("missing_key", "model")

    @pytest.mark.parametrize(
        ("key", "suggestion"),
        [
            ("max_num_seq", "max_num_seqs"),
            ("max-lora-rank", "max_lora_rank"),
            ("MAX-LORA-RANK", "max_lora_rank"),
            ("lora", "max_loras"),
        ],
    )
    def test_unknown_key_names_itself_the_nearest_and_the_file(self, tmp_path, key, suggestion):
        path = write(tmp_path, f"model: m\n{key}: 4\n")
        with pytest.raises(ConfigError) as info:
            EngineConfig.from_yaml(path)
        message = info.value.message
        assert str(path) in message
        assert f"unknown key '{key}'" in message
        assert f"did you mean '{suggestion}'?" in message
        assert (info.value.reason, info.value.param) == ("unknown_key", key)

    def test_unknown_key_far_from_all_lists_them(self):
        assert "max_num_seqs" in refusal({"model": "m", "zzzzzz": 1}).message
        assert refusal({"model": "m", 8: 1}).reason == "unknown_key"

    @pytest.mark.parametrize(
        ("key", "value", "words"),
        [
            ("max_num_seqs", "8", "an integer, got '8' (a string: write plain digits"),
            ("max_num_seqs", 8.0, "an integer, got 8.0"),
            ("max_num_seqs", True, "an integer, got True"),
            ("pool_memory_gib", "1e-1", "a number, got '1e-1' (a string"),
            ("pool_memory_gib", float("inf"), "a number, got inf"),
            ("pool_memory_gib", False, "a number, got False"),
            ("enable_lora", 1, "true or false, got 1"),
            ("warm_up", "false", "true or false, got 'false' (a string"),
            ("host", 0, "a non-empty string, got 0"),
            ("model", " ", "a non-empty string"),
            ("port", None, "port is empty: leave the key out"),
            ("adapter_roots", "/a", "a list of strings, got str"),
        ],
    )
    def test_wrong_type_is_named_not_converted(self, key, value, words):
        error = refusal({"model": "m", key: value})
        assert error.reason == "bad_type"
        assert error.param == key
        assert words in error.message

    def test_an_integer_is_a_number_and_null_is_the_default_of_optional_keys(self):
        config = EngineConfig.from_dict({"model": "m", "pool_memory_gib": 1, "max_model_len": None})
        assert config.pool_memory_gib == 1.0
        assert isinstance(config.pool_memory_gib, float)
        assert config.max_model_len is None

    @pytest.mark.parametrize(
        ("key", "value", "words"),
        [
            ("port", 65536, "at most 65535"),
            ("port", -1, "at least 0"),
            ("max_num_seqs", 0, "at least 1"),
            ("pool_pages", 1, "at least 2"),
            ("pool_memory_gib", 0, "above 0"),
            ("gpu_memory_utilization", 1.5, "at most 1"),
            ("max_model_len", 1, "at least 2"),
            ("seed", -1, "at least 0"),
            ("dtype", "float23", "one of auto, float32, bfloat16, float16, got 'float23': did you mean float32?"),
            ("load_format", 3, "one of auto, dummy, got 3"),
            ("quantization", "int9", "one of int8, int4, got 'int9': did you mean int8?"),
            ("quantization", 8, "one of int8, int4, got 8"),
            ("quantization", "int4", "int4 is not offered"),
        ],
    )
    def test_out_of_range_gives_the_bound(self, key, value, words):
        error = refusal({"model": "m", key: value})
        assert (error.reason, error.param) == ("bad_value", key)
        assert words in error.message


class TestTogether:
    @pytest.mark.parametrize("keys", [POOL_SIZE_KEYS[:2], POOL_SIZE_KEYS[1:], POOL_SIZE_KEYS])
    def test_one_pool_size(self, keys):
        values = {"pool_pages": 10, "pool_memory_gib": 1, "gpu_memory_utilization": 0.5}
        error = refusal({"model": "m", **{key: values[key] for key in keys}})
        assert error.reason == "conflicting_keys"
        assert all(key in error.message for key in keys)

    @pytest.mark.parametrize(
        ("values", "param"),
        [
            ({"enable_lora": False, "lora_modules": {"a": "p"}}, "lora_modules"),
            ({"served_model_name": "a", "lora_modules": {"a": "p"}}, "lora_modules"),
            ({"prefill_block": 64, "max_num_batched_tokens": 63}, "max_num_batched_tokens"),
            ({"max_lora_rank": 65, "max_rank_rows": 64}, "max_rank_rows"),
        ],
    )
    def test_contradictions(self, values, param):
        error = refusal({"model": "m", **values})
        assert (error.reason, error.param) == ("conflicting_keys", param)

    def test_edges_of_the_rules_pass(self):
        EngineConfig(model="m", prefill_block=64, max_num_batched_tokens=64, max_lora_rank=64, max_rank_rows=64)
        EngineConfig(model="m", enable_lora=False, max_rank_rows=8)

    def test_replace_checks_again(self):
        config = EngineConfig(model="m")
        with pytest.raises(ConfigError, match="port"):
            dataclasses.replace(config, port=70000)


class TestAdapters:
    @pytest.mark.parametrize(
        "value",
        [
            {"a": "/x", "b": "/y=z"},
            ["a=/x", "b=/y=z"],
            [{"name": "a", "path": "/x"}, "b=/y=z"],
            {"a": Path("/x"), "b": "/y=z"},
        ],
    )
    def test_all_forms(self, value):
        assert EngineConfig(model="m", lora_modules=value).lora_modules == {"a": "/x", "b": "/y=z"}

    @pytest.mark.parametrize(
        ("value", "words"),
        [
            ({1: "p"}, "adapter name 1 must be a non-empty string: put it in quotes"),
            ({"a": ""}, "the path of 'a'"),
            ({"a": None}, "the path of 'a'"),
            (["a=x", "a=y"], "'a' is given twice"),
            (["a"], "entries are name=path"),
            ([{"name": "a"}], "entries are name=path"),
            ([{"name": "a", "path": "p", "rank": 3}], "entries are name=path"),
            ("a=x", "a mapping of name to path or a list"),
        ],
    )
    def test_bad_forms(self, value, words):
        error = refusal({"model": "m", "lora_modules": value})
        assert error.param == "lora_modules"
        assert words in error.message

    def test_secrets_are_not_shown(self):
        config = EngineConfig(model="m", api_keys=("s3cret",), admin_keys=("r00t",))
        assert "s3cret" not in repr(config)
        assert "r00t" not in json.dumps(config.to_dict())
        assert "12345" not in refusal({"model": "m", "api_keys": [12345]}).message


class TestYaml:
    def test_paths_count_from_the_file(self, tmp_path, monkeypatch):
        (tmp_path / "cfg" / "base").mkdir(parents=True)
        path = write(
            tmp_path / "cfg",
            "model: base\nlora_modules: {a: ad/a, b: /abs}\nadapter_roots: [ad, ~/x]\nchat_template: t.jinja\n"
            "compilation_cache_dir: cache\n",
        )
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", "/home/me")
        config = EngineConfig.from_yaml("cfg/c.yaml")
        folder = path.parent
        assert config.model == str(folder / "base")
        assert config.base_name == "base"
        assert config.lora_modules == {"a": str(folder / "ad/a"), "b": "/abs"}
        assert config.adapter_roots == (str(folder / "ad"), "/home/me/x")
        assert config.chat_template == str(folder / "t.jinja")
        assert config.compilation_cache_dir == str(folder / "cache")

    def test_overrides_win_and_count_from_the_current_folder(self, tmp_path, monkeypatch):
        (tmp_path / "cfg").mkdir()
        write(tmp_path / "cfg", "model: base\nport: 1\npool_pages: 9\nlora_modules: {a: x}\n")
        monkeypatch.chdir(tmp_path)
        overrides = {"model": "other", "port": 2, "pool_memory_gib": 0.5, "lora_modules": ["b=y"]}
        config = EngineConfig.from_yaml("cfg/c.yaml", overrides)
        assert (config.model, config.port) == (str(tmp_path / "other"), 2)
        assert (config.pool_pages, config.pool_memory_gib) == (None, 0.5)
        assert config.lora_modules == {"b": str(tmp_path / "y")}

    def test_errors_name_the_side_at_fault(self, tmp_path):
        path = write(tmp_path, "model: m\nport: 70000\n")
        with pytest.raises(ConfigError, match=r"c\.yaml: port must be at most 65535"):
            EngineConfig.from_yaml(path)
        with pytest.raises(ConfigError, match="^command line: port must be at least 0"):
            EngineConfig.from_yaml(path, {"port": -3})
        with pytest.raises(ConfigError, match="^command line: unknown key 'prt': did you mean 'port'"):
            EngineConfig.from_yaml(path, {"prt": 3})

    def test_ids_are_not_paths(self, tmp_path, monkeypatch):
        for model, name in [("pypi:llm-x==0.1", "llm-x"), ("org/name-1B", "org/name-1B")]:
            config = EngineConfig.from_yaml(write(tmp_path, f"model: {model}\n"))
            assert (config.model, config.base_name) == (model, name)
        (tmp_path / "org" / "name-1B").mkdir(parents=True)
        config = EngineConfig.from_yaml(write(tmp_path, "model: org/name-1B\n"))
        assert (config.model, config.base_name) == (str(tmp_path / "org" / "name-1B"), "name-1B")
        monkeypatch.chdir(tmp_path)
        assert EngineConfig(model="org/name-1B").base_name == "name-1B"
        assert EngineConfig(model="/m/Tiny.Q4.gguf").base_name == "Tiny.Q4"
        assert EngineConfig(model="/m/x", served_model_name="y").base_name == "y"

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("model: m\nport: 1\nport: 2\n", "'port' is given twice"),
            ("model: m\nlora_modules:\n  a: x\n  a: y\n", "'a' is given twice"),
            ("- model\n", "expected lines of `key: value`, got list"),
            ("model: [\n", "c.yaml"),
            ("model: !!python/object:os.system x\n", "c.yaml"),
        ],
    )
    def test_bad_yaml(self, tmp_path, text, words):
        with pytest.raises(ConfigError) as info:
            EngineConfig.from_yaml(write(tmp_path, text))
        assert info.value.reason == "bad_yaml"
        assert words in info.value.message

    def test_missing_and_empty_files(self, tmp_path):
        with pytest.raises(NotFoundError, match=r"no config file at .*none\.yaml"):
            EngineConfig.from_yaml(tmp_path / "none.yaml")
        with pytest.raises(ConfigError, match="the key model is missing"):
            EngineConfig.from_yaml(write(tmp_path, "# nothing\n"))

    def test_chat_template_inline_or_file(self, tmp_path):
        inline = "{% for m in messages %}{{ m }}{% endfor %}"
        assert EngineConfig.from_dict({"model": "m", "chat_template": inline}).chat_template_text() == inline
        write(tmp_path, "Hi {{ messages }}", "t.jinja")
        config = EngineConfig.from_dict({"model": "m", "chat_template": "t.jinja"}, base_dir=tmp_path)
        assert config.chat_template_text() == "Hi {{ messages }}"
        missing = EngineConfig.from_dict({"model": "m", "chat_template": "no.jinja"}, base_dir=tmp_path)
        with pytest.raises(ConfigError, match=r"chat_template: cannot read .*no\.jinja"):
            missing.chat_template_text()

    @pytest.mark.parametrize("name", ["smollm2", "tiny"])
    def test_shipped_configs(self, configs, name, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        config = EngineConfig.from_yaml(configs / f"{name}.yaml")
        assert config.base_name == name
        assert all(os.path.exists(f"{path}/adapter_config.json") for path in config.lora_modules.values())
        assert len(config.lora_modules) == (4 if name == "smollm2" else 0)
        if name == "tiny":
            assert os.path.exists(f"{config.model}/tokenizer.json")


class TestAdapterTiers:
    def test_keys_and_defaults(self):
        config = EngineConfig(model="m")
        assert (config.lora_eviction_policy, config.max_cpu_loras, config.max_cpu_lora_gib) == ("lru", None, None)
        assert (config.adapter_transfer_mib, config.adapter_prefetch, config.prefetch_lookahead) == (8.0, True, 64)
        assert config.max_extra_vocab == 256
        EngineConfig(
            model="m", lora_eviction_policy="fifo", max_cpu_loras=1, max_cpu_lora_gib=0.01, adapter_transfer_mib=0.01,
            adapter_prefetch=False, prefetch_lookahead=1, max_extra_vocab=0,
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("key", "value", "words"),
        [
            ("lora_eviction_policy", "random", "one of lru, fifo"),
            ("max_cpu_loras", 0, "at least 1"),
            ("max_cpu_lora_gib", 0, "above 0"),
            ("adapter_transfer_mib", 0, "above 0"),
            ("prefetch_lookahead", 0, "at least 1"),
            ("max_extra_vocab", -1, "at least 0"),
        ],
    )
    def test_ranges(self, key, value, words):
        error = refusal({"model": "m", key: value})
        assert (error.reason, error.param) == ("bad_value", key)
        assert words in error.message

    def test_ten_thousand_adapters_are_read_in_a_moment(self, tmp_path):
        lines = [f"  adapter-{i}: adapters/adapter-{i}" for i in range(10_000)]
        path = write(tmp_path, "\n".join(["model: m", "lora_modules:", *lines]) + "\n")
        started = time.monotonic()
        config = EngineConfig.from_yaml(path)
        assert time.monotonic() - started < 3
        assert config.lora_modules["adapter-9999"] == str(tmp_path / "adapters" / "adapter-9999")
