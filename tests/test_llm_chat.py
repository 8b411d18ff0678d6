"""LLM.chat: conversations through the model's template or another."""

from __future__ import annotations

from pathlib import Path

import pytest

from multilora_jax.errors import UserError
from tests.tiny_engine import TINY_MODEL, greedy, make_adapter, make_llm, tokens_of


@pytest.fixture(scope="module")
def llm():
    return make_llm(TINY_MODEL)


@pytest.fixture(scope="module")
def lora(llm, tmp_path_factory):
    return make_adapter(tmp_path_factory.mktemp("adapters") / "first", llm.engine, 4, 0)


def refused(call, *args, **kwargs) -> UserError:
    with pytest.raises(UserError) as error:
        call(*args, **kwargs)
    return error.value


def test_chat_renders_the_model_s_template(llm, lora):
    messages = [{"role": "user", "content": "Hi"}]
    rendered = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    (output,) = llm.chat(messages, greedy(5), use_tqdm=False)
    assert output.prompt == rendered
    assert output.prompt_token_ids == llm.get_tokenizer().encode(rendered, add_special_tokens=False)
    assert output.prompt_token_ids.count(258) == 2
    assert tokens_of([output]) == tokens_of(llm.generate(rendered, greedy(5), use_tqdm=False))
    other = [*messages, {"role": "assistant", "content": "Yo"}, {"role": "user", "content": "Bye"}]
    both = llm.chat([messages, other], greedy(5), use_tqdm=False, lora_request=[None, lora])
    assert tokens_of(both)[0] == tokens_of([output])[0]
    assert both[1].prompt.count("<|im_start|>") == 4
    assert both[1].lora_request == lora


def test_chat_options(llm):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well,"}]
    (output,) = llm.chat(messages, greedy(2), use_tqdm=False, continue_final_message=True)
    assert output.prompt.endswith("<|im_start|>assistant\nWell,")
    (output,) = llm.chat(messages, greedy(2), use_tqdm=False, add_generation_prompt=False)
    assert output.prompt.endswith("Well,<|im_end|>\n")
    template = "{{ mood }}: {{ messages[0].content }}"
    (output,) = llm.chat(
        messages, greedy(2), use_tqdm=False, chat_template=template, chat_template_kwargs={"mood": "glad"}
    )
    assert output.prompt == "glad: Hi"


def test_bad_conversations_are_refused(llm):
    for messages in ([], [[]], [{"content": "no role"}], [[{"role": "user", "content": "Hi"}], []]):
        assert refused(llm.chat, messages, greedy(2), use_tqdm=False).param == "messages"
    error = refused(llm.chat, [{"role": "user", "content": "Hi"}], chat_template="{{ raise_exception('no') }}")
    assert error.reason == "chat_template_error"


def test_a_configured_template_is_used(tmp_path):
    path = Path(tmp_path / "template.jinja")
    path.write_text("[{{ messages[0].content }}]")
    llm = make_llm(TINY_MODEL, chat_template=str(path))
    (output,) = llm.chat([{"role": "user", "content": "Hi"}], greedy(2), use_tqdm=False)
    assert output.prompt == "[Hi]"
