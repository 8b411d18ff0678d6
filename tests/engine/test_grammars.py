"""Compiling what structured_outputs ask for, and walking it byte by byte."""

from __future__ import annotations

import gc
import threading
import weakref

import numpy as np
import pytest

from multilora_jax.engine import grammars as module
from multilora_jax.engine.grammars import MAX_WHITESPACE, Grammar, Grammars
from multilora_jax.errors import UserError
from multilora_jax.sampling_params import MAX_CONSTRAINT_CHARS, StructuredOutputsParams
from tests.server.fake_engine import EOS, VOCAB_SIZE, byte_tokenizer

TOKENIZER = byte_tokenizer()
ENDS = frozenset({EOS, 5})
BOUNDED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
CHOICES = ["yes", 'a "quoted" \\ line\n', "yes!", "😀"]
MANY = [f"choice {i}" for i in range(6000)]


def compiled(grammars: Grammars | None = None, **fields) -> Grammar:
    return (grammars or Grammars()).compile(StructuredOutputsParams(**fields), TOKENIZER, VOCAB_SIZE, ENDS)


def next_tokens(walk) -> set[int]:
    mask_W = np.zeros(20, np.uint32)
    walk.fill(mask_W)
    return set(np.flatnonzero(np.unpackbits(mask_W.view(np.uint8), bitorder="little")).tolist())


def accepts(grammar: Grammar, text: str) -> bool:
    walk = grammar.start()
    for byte in text.encode():
        if byte not in next_tokens(walk):
            return False
        walk.advance(byte)
    return next_tokens(walk) >= ENDS


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"json": BOUNDED}, ['{"a":1}', '{ "a" : -20\n}'], ['{"a":1', '{"a":"x"}', '{"a":1,"b":2}', "{}", " {}", "[]"]),
        ({"json": '{"type": "array"}'}, ["[]", '[1, {"x": null}]'], ["{}", "[1,]"]),
        ({"json": BOUNDED, "disable_any_whitespace": True}, ['{"a":1}'], ['{"a": 1}']),
        ({"json_object": True}, ["{}", '{"é": [1.5e3, "\\n"]}'], ["[]", "null", ""]),
        ({"regex": "[ab]{2}c?|é+"}, ["ab", "aac", "éé"], ["a", "abb", "", "abcc"]),
        ({"choice": CHOICES}, CHOICES, ["y", "yes\n"]), ({"choice": MANY}, MANY[::997], ["choice ", "choice 6000"]),
        ({"grammar": 'start: "a" b\nb: "x" | "y" b'}, ["ax", "ayyx"], ["a", "ay"]),
        ({"grammar": 'root ::= "a" b\nb ::= "x" | "y" b'}, ["ax", "ayyx"], ["a", "ay"]),
    ],
)  # fmt: skip
def test_what_a_grammar_accepts(fields, good, bad):
    grammar = compiled(**fields)
    assert [text for text in good if not accepts(grammar, text)] == []
    assert [text for text in bad if accepts(grammar, text)] == []


def test_white_space_comes_to_an_end():
    grammar = compiled(json=BOUNDED)
    assert accepts(grammar, '{"a":' + " " * MAX_WHITESPACE + "1}")
    assert not accepts(grammar, '{"a":' + " " * (MAX_WHITESPACE + 1) + "1}")


def test_every_end_token_may_end_an_answer_and_no_special_token_is_text():
    walk = compiled(regex="(.|\\n)*").start()
    assert next_tokens(walk) >= ENDS
    assert 256 not in next_tokens(walk)  # the BOS
    assert 0x41 in next_tokens(walk)
    walk.advance(5)  # an end changes nothing
    assert 0x41 in next_tokens(walk)


@pytest.mark.parametrize(
    ("fields", "reason", "words"),
    [
        ({"regex": "(["}, "bad_grammar", "unclosed"), ({"regex": "(a)\\1"}, "bad_grammar", "backreferences"),
        ({"json": "{"}, "bad_grammar", "json"), ({"json": "[1]"}, "bad_grammar", "json"),
        ({"json": {"type": "foo"}}, "bad_grammar", "foo"),
        ({"json": {"uniqueItems": True}}, "bad_grammar", "uniqueItems"),
        ({"json": {"$ref": "http://example.org/x"}}, "bad_grammar", "example.org"),
        ({"json": {"x": {1, 2}}}, "bad_grammar", "written as JSON"),
        ({"json": {"type": "string", "pattern": "^a$", "minLength": 3}}, "bad_grammar", "Unsatisfiable"),
        ({"choice": ["\ud83d"]}, "bad_grammar", "surrogates"), ({"grammar": "start: foo"}, "bad_grammar", "foo"),
        ({"grammar": 'root ::= "a'}, "bad_grammar", "grammar"),
        ({"regex": "[^\\x00-\\x{10FFFF}]"}, "bad_grammar", "no text"),
        ({"json": {"const": float("nan")}}, "bad_grammar", "JSON"), ({"json": '{"const": NaN}'}, "bad_grammar", "NaN"),
        ({"json": {"$ref": "#"}}, "bad_grammar", "no text"), ({"grammar": "start: start"}, "bad_grammar", "no text"),
        ({"regex": "(a{1000}){1000}"}, "bad_grammar", "too many"),
        ({"json": {"type": "object", "properties": {f"p{i}": {} for i in range(1000)}}}, "bad_grammar", "items"),
        ({"regex": "a" * (MAX_CONSTRAINT_CHARS + 1)}, "grammar_too_long", str(MAX_CONSTRAINT_CHARS)),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_with_the_reason(fields, reason, words):
    with pytest.raises(UserError, match=words) as error:
        compiled(**fields)
    assert (error.value.reason, error.value.param) == (reason, "structured_outputs")


def test_a_model_that_cannot_end_is_refused():
    with pytest.raises(UserError) as error:
        Grammars().compile(StructuredOutputsParams(regex="a"), TOKENIZER, VOCAB_SIZE, frozenset())
    assert error.value.reason == "no_eos_token"


def nested(depth: int) -> dict:
    schema: dict = {}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def test_deep_input_ends_no_process():
    """Chains as long as the limit allows: on an ordinary stack they end the process."""
    chain = "start: " + "".join(f"r{i}\nr{i}: " for i in range(6000)) + '"a"'
    assert accepts(compiled(grammar=chain), "a")
    refs = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(2500)}
    schema = {"$ref": "#/$defs/a0", "$defs": {**refs, "a2500": {"type": "integer"}}}
    assert accepts(compiled(json=schema), "7")
    for depth in (500, 4000):
        with pytest.raises(UserError):
            compiled(json=nested(depth))
    with pytest.raises(UserError):
        compiled(regex="(" * 40_000 + "a" + ")" * 40_000)


def test_walks_are_independent():
    grammar = compiled(choice=["ab", "cd"])
    first, second = grammar.start(), grammar.start()
    first.advance(ord("a"))
    assert next_tokens(first) == {ord("b")}
    assert next_tokens(second) == {ord("a"), ord("c")}
    with pytest.raises(UserError, match="cannot go on"):
        first.advance(ord("x"))
    assert next_tokens(second) == {ord("a"), ord("c")}


def test_a_grammar_is_compiled_once_and_found_while_it_is_held(monkeypatch):
    monkeypatch.setitem(module._MAX_KEPT, "grammar", 2)
    grammars = Grammars()
    held = compiled(grammars, regex="a")
    assert compiled(grammars, regex="a") is held
    for other in "bcd":
        compiled(grammars, regex=other)
    assert compiled(grammars, regex="a") is held
    gone = weakref.ref(held)
    del held
    for other in "bcd":
        compiled(grammars, regex=other)
    gc.collect()
    assert gone() is None
    assert len(grammars._grammars._kept) == 2


def test_long_grammars_count_for_several(monkeypatch):
    """Their states take memory: 256 of the longest would take gigabytes."""
    monkeypatch.setitem(module._MAX_KEPT, "grammar", 10)
    grammars = Grammars()
    for letter in "abcdef":
        compiled(grammars, regex=letter)
    assert len(grammars._grammars._kept) == 6
    compiled(grammars, regex="long" * 5000)
    assert len(grammars._grammars._kept) == 5  # itself and the last four
    for letter in "gh":
        compiled(grammars, regex=letter * 20_000)
    assert len(grammars._grammars._kept) == 1


def test_many_threads_compile_one_grammar_once(monkeypatch):
    calls, deep = [], module._on_a_deep_stack

    def counted(call):
        calls.append(call)
        return deep(call)

    monkeypatch.setattr(module, "_on_a_deep_stack", counted)
    grammars, found = Grammars(), []
    threads = [threading.Thread(target=lambda: found.append(compiled(grammars, json=BOUNDED))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len(set(map(id, found))) == 1


def test_a_refusal_is_not_kept():
    grammars = Grammars()
    for _ in range(2):
        with pytest.raises(UserError):
            compiled(grammars, regex="([")
    assert not grammars._grammars._kept
