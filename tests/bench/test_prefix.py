"""`bench prefix` on a tiny model: what it runs, what it reports, what it refuses."""

from __future__ import annotations

import json

import pytest

from multilora_jax.bench import prefix
from multilora_jax.errors import ConfigError

WORDS = "--shared-len 40 --question-len 5 --output-len 2 --rounds 2 --rank 8 --max-num-seqs 4"


def test_only_the_second_request_is_answered_from_the_cache(run_tiny, narrow_engines, tmp_path, capsys):
    out = tmp_path / "out.json"
    picture = tmp_path / "out.png"
    assert run_tiny(prefix, WORDS, "--json", str(out), "--plot", str(picture)) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == list(prefix.COLUMNS)
    rows = json.loads(out.read_text())["rows"]
    assert [row["request"] for row in rows] == list(prefix.REQUESTS)
    size = narrow_engines[0].geometry.page_tokens
    assert [row["cached_tokens"] for row in rows] == [0, 40 // size * size, 0, 0, 0]
    assert {row["prompt_tokens"] for row in rows} == {45}
    assert [row["aim_ratio"] for row in rows] == [None, prefix.AIM, None, None, None]
    assert rows[0]["ratio_to_first_by_round"] == [1.0, 1.0]
    assert all(len(row["ttft_s_by_round"]) == 2 for row in rows)


@pytest.mark.usefixtures("narrow_engines")
def test_a_hit_across_salts_is_an_error(run_tiny, monkeypatch):
    monkeypatch.setitem(prefix.REQUESTS, "other salt", (0, "a"))
    with pytest.raises(RuntimeError, match="'other salt' found [0-9]+ cached tokens, 0 were expected"):
        run_tiny(prefix, WORDS)


@pytest.mark.parametrize("key", ["enable_prefix_caching", "enable_lora"])
def test_without_the_cache_or_adapters_there_is_nothing_to_measure(run_tiny, key):
    with pytest.raises(ConfigError, match=f"{key} is false"):
        run_tiny(prefix, WORDS, f"--no{key}")
