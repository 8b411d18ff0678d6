"""JSON read in pieces: the same values and the same refusals as json.loads, whatever the size of the pieces."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilora_jax.server import json_reader
from multilora_jax.server.json_reader import read_text

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30)
SYNTAX = st.text('[]{},:"\\ \n019-+.eEtruefalsn"udD8ab', max_size=30)
ESCAPES = st.text('\\ud8DcC"nx0', max_size=40)


@pytest.fixture(autouse=True)
def in_small_pieces(monkeypatch):
    """Bounds so small that short texts are cut as long ones are."""
    monkeypatch.setattr(json_reader, "QUICK_CHARS", 0)
    monkeypatch.setattr(json_reader, "_RUN_CHARS", 12)
    monkeypatch.setattr(json_reader, "_MIN_RUN_CHARS", 4)
    pattern = json_reader._PIECE.pattern.replace("{1,4096}", "{1,3}").replace("{0,256}", "{0,2}")
    assert pattern != json_reader._PIECE.pattern
    monkeypatch.setattr(json_reader, "_PIECE", re.compile(pattern, re.VERBOSE))


def loads(text: str):
    """json.loads, which takes the last of two keys."""
    keys_twice = False

    def hook(pairs):
        nonlocal keys_twice
        keys_twice |= len({key for key, _ in pairs}) < len(pairs)
        return dict(pairs)

    value = json.loads(text, object_pairs_hook=hook)
    if keys_twice:
        raise json.JSONDecodeError("twice", text, 0)
    return value


def compare(text: str) -> None:
    try:
        expected = repr(loads(text))  # repr tells 1 from 1.0 and true, and NaN is equal to itself
    except json.JSONDecodeError:
        with pytest.raises(json.JSONDecodeError) as caught:
            read_text(text)
        assert 0 <= caught.value.pos <= len(text)
    else:
        assert repr(read_text(text)) == expected


@given(VALUES, st.sampled_from([None, 1]), st.booleans())
def test_values_come_back(value, indent, ascii_only):
    compare(json.dumps(value, indent=indent, ensure_ascii=ascii_only))


@given(SYNTAX)
def test_any_text_is_read_or_refused_as_by_json(text):
    compare(text)
    compare(f"[{text}]")


@given(ESCAPES)
def test_escapes_are_not_cut(text):
    compare(f'"{text}"')


@pytest.mark.parametrize("text", [
    '"' + r"\ud83d\ude00" * 9 + '"', '"' + r"a\ud83d\ude00" * 9 + '"', r'"\ud83d\ud83d\ude00\ude00"', r'"\ud83dx"',
    "[1, 2.5, -3e2, true, false, null, NaN, -Infinity, 7, 8, 9, 10, 11]", "[1,2,3,4,5,6,7,8,9,]", "[1,2,,3,4,5,6]",
    "[1 2,3,4,5,6,7,8]", '[1,2,3,4,"x",5,6,7,8,[9,10,11,12],13]', '{"a":1,"b":2,"a":3}', '{"a":{"b":1,"b":1}}', "", " ",
    '"a\nb"', "[1,2,3,4,5,01]", "1 1", "[" * 5, "nul", '{"a" 1}', "{1:2}", '{"a":1,}', "\ufeff1",
])  # fmt: skip
def test_texts_that_are_easily_read_wrong(text):
    compare(text)


@pytest.mark.parametrize(("text", "what"), [
    ("[" * 129 + "]" * 129, "128 deep"), ('{"a":' * 129 + "1" + "}" * 129, "128 deep"), ("9" * 4301, "4300 characters"),
    ("[1,2,3,4,5,6," + "9" * 4301 + ",1,2]", "4300 characters"),
])  # fmt: skip
@pytest.mark.parametrize("quick", [0, 2**16])
def test_bounds(monkeypatch, text, what, quick):
    monkeypatch.setattr(json_reader, "QUICK_CHARS", quick)
    with pytest.raises(json.JSONDecodeError, match=what):
        read_text(text)
    assert read_text("[" * 128 + "]" * 128) is not None


def test_the_number_of_values_is_bounded(monkeypatch):
    monkeypatch.setattr(json_reader, "MAX_VALUES", 800)
    for fits, beyond in (("1," * 790 + "1", "1," * 800 + "1"), ('"a",' * 97 + '"a"', '"a",' * 100 + '"a"')):
        assert read_text(f"[{fits}]")
        with pytest.raises(json.JSONDecodeError, match="send several requests"):
            read_text(f"[{beyond}]")


@pytest.mark.parametrize("quick", [0, 2**16])
def test_a_key_that_stands_twice_is_named(monkeypatch, quick):
    monkeypatch.setattr(json_reader, "QUICK_CHARS", quick)
    with pytest.raises(json.JSONDecodeError, match="the key 'model' stands twice") as caught:
        read_text('{"model": "a",\n "model": "b"}')
    assert (caught.value.lineno, caught.value.colno) == (2, 2)
