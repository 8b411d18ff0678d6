"""Tool calls read from text: the same whatever the pieces, and what is no call comes back as content."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilora_jax.server.json_scanner import CallScanner
from multilora_jax.server.tool_answers import AnswerWriter

CALL = '{"name": "f", "arguments": {"a": "}\\"{", "b": [1, {"c": null}]}}'
ARGUMENTS = '{"a": "}\\"{", "b": [1, {"c": null}]}'
PARAMETERS = CALL.replace("arguments", "parameters")


def read(style, pieces, most=None):
    """(content, [(name, arguments)]) of an answer that comes in pieces."""
    writer = AnswerWriter(style, most)
    content, calls = "", {}
    for i, piece in enumerate(pieces):
        delta = writer.delta(piece, ended=i == len(pieces) - 1)
        content += delta.get("content", "")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(calls)
                calls[call["index"]] = [call["function"]["name"], ""]
            calls[call["index"]][1] += call["function"]["arguments"]
    return content, [tuple(calls[i]) for i in range(len(calls))]


HERMES = [
    ("hello", "hello", []),
    ("  spaced \n", "  spaced \n", []),
    (f"<tool_call>\n{CALL}\n</tool_call>", "", [("f", ARGUMENTS)]),
    (f"I look.\n<tool_call>{CALL}</tool_call>\n", "I look.", [("f", ARGUMENTS)]),
    (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call> Done.", " Done.", [("f", ARGUMENTS)] * 2),
    ('<tool_call>{"name": "g"}</tool_call>', "", [("g", "{}")]),
    ('<tool_call>{"arguments": {"x": 1}, "name": "g"}</tool_call>', "", [("g", '{"x": 1}')]),
    ('<tool_call>{"name": "g", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("g", '{"x": 1}')]),
    ('<tool_call>{"name": "g", "arguments": null}</tool_call>', "", [("g", "{}")]),
    ('<tool_call>{"name": "g", "id": 5, "arguments": {}}</tool_call>', "", [("g", "{}")]),
    (f"<tool_call>{CALL}", "", [("f", ARGUMENTS)]),
    ('<tool_call>{"name": "g", "arguments": {"x": [1, 2', "", [("g", '{"x": [1, 2')]),
    ('<tool_call>{"name": "g", "argu', '<tool_call>{"name": "g", "argu', []),
    ("<tool_call>not JSON</tool_call>", "<tool_call>not JSON</tool_call>", []),
    ('<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ("<tool_call>{}</tool_call>", "<tool_call>{}</tool_call>", []),
    (f"<tool_call>oh <tool_call>{CALL}</tool_call>", "<tool_call>oh", [("f", ARGUMENTS)]),
    ("a <tool", "a <tool", []),
    ('{"name": "f", "arguments": {}}', '{"name": "f", "arguments": {}}', []),
]
LLAMA = [
    ("hello", "hello", []),
    ("  hello", "  hello", []),
    (PARAMETERS, "", [("f", ARGUMENTS)]),
    (f"\n<|python_tag|>{PARAMETERS}\n", "", [("f", ARGUMENTS)]),
    (f"{PARAMETERS}; {PARAMETERS};", "", [("f", ARGUMENTS)] * 2),
    (f'{{"type": "function", {PARAMETERS[1:]}', "", [("f", ARGUMENTS)]),
    (CALL, "", [("f", ARGUMENTS)]),
    ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),
    ('{"name": "Bob"}', '{"name": "Bob"}', []),
    (' {"answer": [1, 2]}', ' {"answer": [1, 2]}', []),
    ("{", "{", []),
    ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ('{"name": "g", "parameters": {"x": 1', "", [("g", '{"x": 1')]),
    (f"{PARAMETERS} And so on.", " And so on.", [("f", ARGUMENTS)]),
]


@pytest.mark.parametrize(("style", "text", "content", "calls"), [("hermes", *case) for case in HERMES]
                         + [("llama3_json", *case) for case in LLAMA])  # fmt: skip
def test_whole_and_character_by_character(style, text, content, calls):
    assert read(style, [text]) == (content, calls)
    assert read(style, [*text, ""]) == (content, calls)


@given(st.data())
def test_the_pieces_change_nothing(data):
    style, cases = data.draw(st.sampled_from([("hermes", HERMES), ("llama3_json", LLAMA)]))
    text = "".join(data.draw(st.lists(st.sampled_from([case[0] for case in cases]), min_size=1, max_size=3)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(style, pieces) == read(style, [text])


@given(st.text(alphabet='<tool_cal>{}"name:rgumets,[]\\ \n;', max_size=60), st.sampled_from(["hermes", "llama3_json"]))
def test_any_text_is_read_and_none_that_is_no_call_is_lost(text, style):
    content, calls = read(style, [text])
    assert calls or content == text


@given(
    st.dictionaries(st.text(max_size=5), st.recursive(
        st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    ), max_size=4),
    st.text(min_size=1, max_size=10), st.booleans(), st.sampled_from([None, 2]),
)  # fmt: skip
def test_whatever_json_a_call_is_written_in(arguments, name, ascii_only, indent):
    call = {"name": name, "arguments": arguments}
    text = json.dumps(call, ensure_ascii=ascii_only, indent=indent)
    scanner = CallScanner(("arguments",))
    rest = "".join(scanner.feed(char) for char in text + "#")
    assert (scanner.name, scanner.done, scanner.bad, rest) == (name, True, False, "#")
    assert json.loads(scanner.arguments) == arguments


def test_only_so_many_calls_are_given():
    text = f"<tool_call>{CALL}</tool_call>" * 3 + "and more"
    assert read("hermes", [text], most=1) == ("", [("f", ARGUMENTS)])
    assert read("hermes", [*text], most=2) == ("", [("f", ARGUMENTS)] * 2)
    assert read("llama3_json", [*"; ".join([PARAMETERS] * 3)], most=1) == ("", [("f", ARGUMENTS)])
