"""The server's own OpenAPI document is true: schemathesis finds no answer, to whatever input, that it does not have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.config import SchemathesisConfig

from multilora_jax.async_engine import AsyncEngine
from multilora_jax.config import EngineConfig
from multilora_jax.server.app import create_app
from multilora_jax.server.protocol import Body
from tests.server.fake_engine import GOLDEN, FakeEngine

TEMPLATE = (
    "{{ bos_token }}{% for t in tools or [] %}<tool_call>{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


MODULES = {"adapter-a": str(GOLDEN / "cases" / "all_linear"), "adapter-b": str(GOLDEN / "cases" / "attn_only")}
ENGINE = {"lora_modules": MODULES, "adapter_roots": (str(GOLDEN),), "chat_template": TEMPLATE}
# The document is there before the engine is: reading it starts none.
APP = create_app(None, EngineConfig(model="fake", served_model_name="base", **ENGINE))
quick = schemathesis.openapi.from_asgi(
    "/openapi.json", APP, config=SchemathesisConfig.from_dict({"phases": {"coverage": {"enabled": False}}})
)
thorough = schemathesis.openapi.from_asgi("/openapi.json", APP)


@pytest.fixture(scope="module", autouse=True)
def engine() -> Iterator[FakeEngine]:
    fake = FakeEngine(**ENGINE)
    async_engine = AsyncEngine(fake)  # type: ignore[arg-type]
    APP.state.context.attach(async_engine)
    yield fake
    async_engine.shutdown(drain=False)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return APP.openapi()


load_all_checks()
# Whether data of the right form is also accepted (a model that exists, a prompt that fits) no schema can say.
CHECKED = [check for check in CHECKS.get_all() if check.__name__ in (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
    "response_headers_conformance", "negative_data_rejection",
)]  # fmt: skip


SUPPRESSED: Any = list(HealthCheck)
few, many = (
    settings(max_examples=count, derandomize=True, deadline=None, suppress_health_check=SUPPRESSED)
    for count in (20, 60)
)


@quick.parametrize()
@few
def test_no_input_gets_an_answer_that_the_document_does_not_have(case):
    case.call_and_validate(checks=CHECKED)


@pytest.mark.slow
@thorough.parametrize()
@many
def test_no_input_of_very_many_does(case):
    case.call_and_validate(checks=CHECKED)


def test_it_has_every_field_and_no_other(document):
    bodies = {cls.__name__: cls for cls in all_subclasses(Body)}
    described = {name: found for name, found in document["components"]["schemas"].items() if name in bodies}
    assert {"CompletionBody", "ChatBody", "TokenizeBody", "DetokenizeBody", "LoadBody"} <= set(described)
    for name, found in described.items():
        body = bodies[name]
        assert set(found["properties"]) == {*body.model_fields, *body.not_served}, name
        assert found["additionalProperties"] is False


def test_every_answer_is_described(document):
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            answers = operation["responses"]
            assert "422" not in answers
            assert {"200", "500", "503"} <= set(answers), (method, path)
            for status, answer in answers.items():
                assert all(content.get("schema") for content in answer["content"].values()), (method, path, status)


def all_subclasses(cls: type) -> list[type]:
    return [found for sub in cls.__subclasses__() for found in (sub, *all_subclasses(sub))]
