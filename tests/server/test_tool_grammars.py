"""The grammars of tool calls: what an answer may be under each tool_choice, in each style."""

from __future__ import annotations

import numpy as np
import pytest

from multilora_jax.engine.grammars import Grammars
from multilora_jax.request import StructuredOutputsParams
from multilora_jax.server.tools import check_tool_choice, check_tools, tool_grammar
from tests.server.fake_engine import EOS, VOCAB_SIZE, byte_tokenizer

NUMBER = {"type": "object", "properties": {"n": {"$ref": "#/$defs/N"}}, "required": ["n"],
          "additionalProperties": False, "$defs": {"N": {"type": "integer"}}}  # fmt: skip
NESTED = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["next"],
          "additionalProperties": False}  # fmt: skip
TOKENIZER, GRAMMARS = byte_tokenizer(), Grammars()


def tools(strict=False):
    return check_tools(
        [
            {"type": "function", "function": {"name": "num", "parameters": NUMBER, "strict": strict}},
            {"type": "function", "function": {"name": "nest", "parameters": NESTED}},
        ]
    )


def accepted(text, **kwargs):
    """Whether an answer may be this text and end there."""
    asked = tool_grammar(**kwargs)
    assert asked is not None
    walk = GRAMMARS.compile(asked, TOKENIZER, VOCAB_SIZE, frozenset({EOS})).start()
    for token in [*text.encode(), EOS]:
        mask_W = np.zeros(-(-VOCAB_SIZE // 32), np.uint32)
        walk.fill(mask_W)
        if not mask_W[token // 32] >> np.uint32(token % 32) & 1:
            return False
        walk.advance(token)
    return True


def call(style, name="num", arguments='{"n": 1}'):
    key = "arguments" if style == "hermes" else "parameters"
    text = f'{{"name": "{name}", "{key}": {arguments}}}'
    return f"<tool_call>\n{text}\n</tool_call>" if style == "hermes" else text


GAP = {"hermes": "\n", "llama3_json": "; "}


@pytest.mark.parametrize("style", ["hermes", "llama3_json"])
def test_required(style):
    def ok(text, **more):
        choice = check_tool_choice("required", tools())
        return accepted(text, tools=tools(), choice=choice, style=style, **more)

    one, nest = call(style), call(style, "nest", '{"next": {"next": null}}')
    assert ok(one)
    assert ok(nest)
    assert ok(one + GAP[style] + nest)
    assert not ok(one + GAP[style] + nest, parallel=False)
    assert not ok("hello")
    assert not ok("")
    assert not ok(call(style, "other"))
    assert not ok(call(style, "num", '{"n": "x"}'))
    assert not ok(call(style, "nest", '{"next": {"next": 1}}'))
    assert not ok(one + " and text")


@pytest.mark.parametrize("style", ["hermes", "llama3_json"])
def test_named(style):
    choice = check_tool_choice({"type": "function", "function": {"name": "nest"}}, tools())
    nest = call(style, "nest", '{"next": null}')
    for text, expected in ((nest, True), (nest + GAP[style] + nest, False), (call(style), False), ("no", False)):
        assert accepted(text, tools=tools(), choice=choice, style=style) == expected, text


@pytest.mark.parametrize("style", ["hermes", "llama3_json"])
def test_auto_binds_the_calls_of_strict_tools_alone(style):
    auto = check_tool_choice(None, tools())
    assert tool_grammar(tools(), auto, style) is None

    def ok(text, **more):
        return accepted(text, tools=tools(strict=True), choice=auto, style=style, **more)

    one = call(style)
    assert ok("hello <tool> ; there")
    assert ok("")
    assert ok(one)
    assert ok(one + GAP[style] + one)
    assert not ok(one + GAP[style] + one, parallel=False)
    assert not ok(call(style, "num", '{"n": "x"}'))
    assert ok(call(style, "nest", '{"any": "thing"}')), "that one is not strict"
    assert not ok(call(style, "other"))
    if style == "hermes":
        assert ok(f"I look: {one} There.")
        assert not ok("I look: <tool_call>what")


@pytest.mark.parametrize("style", ["hermes", "llama3_json"])
def test_a_response_format_holds_for_answers_that_call_nothing(style):
    schema = {"type": "object", "properties": {"answer": {"type": "boolean"}}, "required": ["answer"]}
    for answer, other in (
        (StructuredOutputsParams(json=schema), '{"answer": 1}'), (StructuredOutputsParams(json_object=True), "[1]")
    ):  # fmt: skip
        given = {"tools": tools(), "choice": check_tool_choice("auto", tools()), "style": style, "answer": answer}
        for text, expected in ((call(style), True), ('{"answer": true}', True), (other, False), ("text", False)):
            assert accepted(text, **given) == expected, text
