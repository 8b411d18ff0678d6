"""`bench prefix` on a tiny model: what it runs, what it reports, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from absl import flags as absl_flags

from multilora_jax import flags
from multilora_jax.bench import prefix
from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.errors import ConfigError
from tests.tiny_engine import narrowed

TINY = str(Path(__file__).parent.parent.parent / "configs" / "tiny.yaml")
SIZES = {"shared-len": 40, "question-len": 5, "output-len": 2, "rounds": 2, "rank": 8, "max-num-seqs": 4}
WORDS = [f"--{name}={value}" for name, value in SIZES.items()]


def bench(*words: str) -> int:
    values = absl_flags.FlagValues()
    prefix.define_flags(values)
    values(flags.normalise_argv(["bench", "--config", TINY, *WORDS, *words]))
    return prefix.main([], values)


@pytest.fixture
def engines(monkeypatch) -> list[LLMEngine]:
    built: list[LLMEngine] = []

    def build(config):
        built.append(narrowed(LLMEngine(config, progress=False)))
        return built[-1]

    monkeypatch.setattr(prefix, "LLMEngine", build)
    return built


def test_only_the_second_request_is_answered_from_the_cache(engines, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert bench("--json", str(out)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == list(prefix.COLUMNS)
    rows = json.loads(out.read_text())["rows"]
    assert [row["request"] for row in rows] == list(prefix.REQUESTS)
    size = engines[0].geometry.page_tokens
    assert [row["cached_tokens"] for row in rows] == [0, 40 // size * size, 0, 0, 0]
    assert {row["prompt_tokens"] for row in rows} == {45}
    assert rows[0]["ratio_to_first_by_round"] == [1.0, 1.0]
    assert all(len(row["ttft_s_by_round"]) == 2 for row in rows)


def test_a_hit_across_salts_is_an_error(engines, monkeypatch):
    monkeypatch.setitem(prefix.REQUESTS, "other salt", (0, "a"))
    with pytest.raises(RuntimeError, match="'other salt' found [0-9]+ cached tokens, 0 were expected"):
        bench()


@pytest.mark.parametrize("key", ["enable_prefix_caching", "enable_lora"])
def test_without_the_cache_or_adapters_there_is_nothing_to_measure(key):
    with pytest.raises(ConfigError, match=f"{key} is false"):
        bench(f"--no{key}")
