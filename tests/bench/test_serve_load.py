"""The load of `bench serve`: prompts, choices of adapters, times of arrival."""

from __future__ import annotations

import json
import math
from collections import Counter

import numpy as np
import pytest

from multilora_jax.bench.serve_client import body_of
from multilora_jax.bench.serve_load import (
    Item,
    arrival_times,
    assign_models,
    open_tokenizer,
    random_items,
    read_items,
)
from multilora_jax.errors import ConfigError
from tests.tiny_engine import TINY_MODEL


def test_random_prompts_are_of_the_asked_length():
    tokenizer = open_tokenizer(TINY_MODEL)
    exact = random_items(5, 12, 3, 7, tokenizer, as_text=False)
    assert all(len(item.prompt) == 12 and item.max_tokens == 3 and item.model is None for item in exact)
    assert not any(token in tokenizer.special_ids for item in exact for token in item.prompt)
    words = random_items(5, 12, 3, 7, None, as_text=True)
    assert all(isinstance(item.prompt, str) and len(item.prompt.split()) == 12 for item in words)
    assert len({str(item.prompt) for item in words}) == 5
    assert words == random_items(5, 12, 3, 7, None, as_text=True) != random_items(5, 12, 3, 8, None, as_text=True)
    assert all(isinstance(item.prompt, str) for item in random_items(2, 4, 3, 7, tokenizer, as_text=True))


def test_a_file_of_requests(tmp_path):
    path = tmp_path / "load.jsonl"
    lines = [
        {"prompt": "one", "max_tokens": 5},
        {"prompt": [1, 2], "model": "a", "output_tokens": 6},
        {"messages": [{"role": "user", "content": "hi"}]},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    items = read_items(str(path), None, 9)
    assert items == [Item("one", 5), Item([1, 2], 6, "a"), Item([{"role": "user", "content": "hi"}], 9)]
    assert [item.is_chat for item in items] == [False, False, True]
    assert read_items(str(path), 5, 9) == items + items[:2]
    assert read_items(str(path), 2, 9) == items[:2]


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{", "load.jsonl:2: no JSON"),
        ("[1]", "load.jsonl:2: must be an object"),
        ('{"text": "x"}', 'load.jsonl:2: must have "prompt"'),
        ('{"prompt": []}', 'load.jsonl:2: must have "prompt"'),
        ('{"prompt": [true]}', 'load.jsonl:2: must have "prompt"'),
        ('{"messages": "hi"}', 'load.jsonl:2: must have "prompt"'),
        ('{"prompt": "x", "max_tokens": 0}', "load.jsonl:2: max_tokens must be an integer of at least 1, got 0"),
        ('{"prompt": "x", "model": 3}', "load.jsonl:2: model must be a name, got 3"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, match):
    path = tmp_path / "load.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(ConfigError, match=match):
        read_items(str(path), None, 9)


def test_a_file_that_is_empty_or_not_there(tmp_path):
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="has no lines"):
        read_items(str(tmp_path / "empty"), None, 9)
    with pytest.raises(ConfigError, match="cannot read"):
        read_items(str(tmp_path / "none"), None, 9)


def test_assignments():
    names = ["a", "b", "c", "d"]
    in_turn = assign_models(names, 6, "round-robin", 1.5, 0)
    assert in_turn == ["a", "b", "c", "d", "a", "b"] == assign_models(names, 6, "distinct", 1.5, 0)
    even = Counter(assign_models(names, 4000, "random", 1.5, 0))
    assert max(even.values()) < 1.2 * min(even.values())
    assert assign_models(names, 50, "random", 1.5, 0) == assign_models(names, 50, "uniform", 1.5, 0)
    skewed = Counter(assign_models(names, 4000, "skewed", 2.0, 0))
    share = 1 / sum(k**-2.0 for k in (1, 2, 3, 4))
    assert skewed["a"] / 4000 == pytest.approx(share, abs=0.03)
    assert skewed["b"] / 4000 == pytest.approx(share / 4, abs=0.03)


def test_arrivals():
    assert arrival_times(3, math.inf, 1.0, 0) == [0, 0, 0]
    poisson, even = arrival_times(4000, 5.0, 1.0, 0), arrival_times(4000, 5.0, 100.0, 0)
    for times in (poisson, even):
        assert times[0] == 0
        assert np.all(np.diff(times) >= 0)
        assert times[-1] == pytest.approx(800, rel=0.1)
    assert np.std(np.diff(poisson)) == pytest.approx(0.2, rel=0.1)  # of an exponential distribution: the mean
    assert np.std(np.diff(even)) == pytest.approx(0.02, rel=0.1)
    assert poisson == arrival_times(4000, 5.0, 1.0, 0)


def test_bodies():
    def body(item: Item, *, chat: bool, ignore_eos: bool = False) -> dict:
        return json.loads(body_of(item, "m", chat=chat, ignore_eos=ignore_eos))

    assert body(Item([1, 2], 4), chat=False) == {
        "model": "m", "max_tokens": 4, "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
        "prompt": [1, 2],
    }  # fmt: skip
    assert body(Item("hi", 4), chat=True)["messages"] == [{"role": "user", "content": "hi"}]
    assert body(Item([{"role": "system"}], 4), chat=True)["messages"] == [{"role": "system"}]
    assert body(Item("hi", 4), chat=False, ignore_eos=True)["ignore_eos"] is True
    for item, chat in ((Item([1, 2], 4), True), (Item([{"role": "user"}], 4), False)):
        with pytest.raises(ConfigError, match="--endpoint takes the other kind"):
            body(item, chat=chat)
