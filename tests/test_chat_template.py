"""Chat templates: the sandbox, the functions that models use, messages, continuing a message."""

from __future__ import annotations

from datetime import datetime

import pytest

from multilora_jax.errors import UserError
from multilora_jax.tokenizer import Tokenizer
from tests.tiny_tokenizers import BOS, EOS, byte_level

USER = [{"role": "user", "content": "Hi"}]


def render(template: str, messages=USER, **options) -> str:
    tokenizer = Tokenizer(byte_level(), special_tokens={"bos_token": BOS, "eos_token": EOS}, chat_template=template)
    return tokenizer.apply_chat_template(messages, **options)


def test_variables_of_a_template():
    assert render("{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}") == f"{BOS}Hi{EOS}"
    assert render("{{ tools is none }}{{ documents is none }}") == "TrueTrue"
    assert render("{{ thinking }}", thinking="yes") == "yes"
    assert render("{{ add_generation_prompt }}") == "True"
    assert render("{{ add_generation_prompt }}", add_generation_prompt=False) == "False"


def test_blocks_leave_no_lines():
    assert render("{% if true %}\n  {% if true %}\nA\n  {% endif %}\n{% endif %}\nB") == "A\nB"


def test_functions_and_tags_that_models_use():
    assert render("{{ {'b': 'é<>', 'a': 1} | tojson }}") == '{"b": "é<>", "a": 1}'
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'
    assert render("{{ strftime_now('%Y') }}") == datetime.now().strftime("%Y")
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}") == "02"
    assert render("a{% generation %}{% set x = 3 %}{{ messages[0].content }}{{ x }}{% endgeneration %}b") == "aHi3b"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected"),
        ("{{ messages[0].content + 1 }}", "str"),
        ("{{ missing.field }}", "missing"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range"),
    ],
)
def test_failing_template_is_the_callers_error(template, says):
    with pytest.raises(UserError, match=says) as error:
        render(template)
    assert (error.value.status, error.value.reason) == (400, "chat_template_error")


def test_template_cannot_change_the_callers_messages():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    render("{{ messages[0].content }}", messages)
    assert messages == [{"role": "user", "content": [{"type": "text", "text": "a"}]}]


def test_text_parts_become_one_string():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"
    assert render("[{{ messages[0].content }}]", [{"role": "assistant", "content": None}]) == "[]"
    assert render("{{ messages[0].name }}", [{"role": "tool", "content": "x", "name": "f"}]) == "f"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "bad_messages"),
        ("Hi", "bad_messages"),
        (["Hi"], "bad_messages"),
        ([{"content": "Hi"}], "bad_messages"),
        ([{"role": "user", "content": 3}], "bad_messages"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "unsupported_content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "unsupported_content"),
        ([{"role": "user", "content": ["Hi"]}], "unsupported_content"),
    ],
)
def test_malformed_messages_are_refused(messages, reason):
    with pytest.raises(UserError) as error:
        render("x", messages)
    assert (error.value.reason, error.value.param) == (reason, "messages")


CLOSING = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
TRIMMING = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "last", "result"),
    [
        (CLOSING, "Sure", "<user>Sure</user><assistant>Sure"),
        (CLOSING, "Sure: ", "<user>Sure</user><assistant>Sure: "),
        (TRIMMING, " Sure: ", "<user>Sure</user><assistant>Sure:"),
    ],
)
def test_final_message_is_left_open(template, last, result):
    messages = [{"role": "user", "content": "Sure"}, {"role": "assistant", "content": last}]
    assert render(template, messages, continue_final_message=True, add_generation_prompt=False) == result


def test_final_message_that_cannot_be_continued_is_refused():
    options = {"continue_final_message": True, "add_generation_prompt": False}
    for template, content in ((CLOSING, ""), ("nothing", "Hi")):
        with pytest.raises(UserError, match="continue_final_message") as error:
            render(template, [{"role": "assistant", "content": content}], **options)
        assert error.value.reason == "chat_template_error"
    with pytest.raises(UserError, match="add_generation_prompt=False"):
        render(CLOSING, continue_final_message=True)
