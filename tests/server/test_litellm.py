"""LiteLLM as the client, where it is installed (`pip install -e ".[litellm]"`): a real engine, a real socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.server.harness import listening
from tests.server.real_server import RealServer

# What it and its dependencies warn of while they are imported, and of their own models, is not this project's.
pytestmark = pytest.mark.filterwarnings("ignore")

TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{# <tool_call> #}"
    "{% for m in messages %}{{ m.content }}{% endfor %}>"
)
MESSAGES: Any = [{"role": "user", "content": "hi"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "paint",
            "parameters": {"type": "object", "properties": {"red": {"type": "boolean"}}, "required": ["red"],
                           "additionalProperties": False},
        },
    }
]  # fmt: skip


@pytest.fixture(scope="module")
def litellm() -> Any:
    module = pytest.importorskip("litellm", reason="litellm is not installed", exc_type=ImportError)
    module.telemetry = False
    module.suppress_debug_info = True
    return module


@pytest.fixture(scope="module")
def sent(litellm, configs):
    """Keyword arguments of every call."""
    server = RealServer(
        "tied", configs / "tiny_model", chat_template=TEMPLATE, tool_call_parser="hermes", warm_up=False,
        api_keys=("sk-lite",),
    )  # fmt: skip
    with listening(server.app) as address:
        yield {"api_base": f"{address}/v1", "api_key": "sk-lite", "max_retries": 0, "timeout": 120}
    server.close()


def test_chat_and_its_stream(litellm, sent):
    ask: Any = {**sent, "model": "hosted_vllm/base", "messages": MESSAGES, "max_tokens": 8, "temperature": 0}
    answer = litellm.completion(**ask)
    assert answer.usage.completion_tokens == 8
    assert answer.choices[0].finish_reason == "length"
    chunks = list(litellm.completion(**ask, stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["length"]
    later = asyncio.run(litellm.acompletion(**ask))
    assert later.choices[0].message.content == text


def test_fields_of_its_own_reach_the_engine(litellm, sent):
    answer = litellm.completion(
        **sent, model="hosted_vllm/base", messages=MESSAGES, max_tokens=30,
        extra_body={"structured_outputs": {"choice": ["left", "right"]}},
    )  # fmt: skip
    assert answer.choices[0].message.content in ("left", "right")


def test_completions(litellm, sent):
    answer = litellm.text_completion(
        **sent, model="text-completion-openai/base", prompt="A long walk", max_tokens=6, temperature=0
    )
    assert answer.choices[0].text
    assert answer.usage.completion_tokens == 6


def test_tools(litellm, sent):
    answer = litellm.completion(
        **sent, model="hosted_vllm/base", messages=MESSAGES, tools=TOOLS, tool_choice="required", max_tokens=120
    )
    [call, *_] = answer.choices[0].message.tool_calls
    assert call.function.name == "paint"
    assert isinstance(json.loads(call.function.arguments)["red"], bool)


def test_errors_keep_their_kind_and_their_words(litellm, sent):
    ask: Any = {**sent, "model": "hosted_vllm/base", "messages": MESSAGES}
    with pytest.raises(litellm.NotFoundError, match="nobody"):
        litellm.completion(**{**ask, "model": "hosted_vllm/nobody"})
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**ask, temperature=-1)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(**{**ask, "api_key": "sk-wrong"})
    with pytest.raises(litellm.NotFoundError, match="mbeddings"):
        litellm.embedding(**sent, model="hosted_vllm/base", input=["hi"])
