"""Routes of OpenAI's and vLLM's that this server does not have, refused with what it has instead."""

from __future__ import annotations

from fastapi import APIRouter

from multilora_jax.errors import NotFoundError

router = APIRouter(include_in_schema=False)

UNSERVED = {
    "/v1/embeddings": "embeddings need a model made for them, and this server's generate text",
    "/v1/responses": "send the conversation to /v1/chat/completions",
    "/v1/messages": "send the conversation to /v1/chat/completions",
    "/v1/audio": "this server reads and writes text only",
    "/v1/images": "this server reads and writes text only",
    "/v1/videos": "this server reads and writes text only",
    "/v1/realtime": "use stream=true of /v1/chat/completions",
    "/v1/moderations": "it has no model for that",
    "/v1/rerank": "it has no model for that",
    "/v1/score": "it has no model for that",
    "/v1/files": "it keeps no files",
    "/v1/uploads": "it keeps no files",
    "/v1/batches": "send the prompts as a list to /v1/completions: they run in one batch",
    "/v1/fine_tuning": "it trains nothing; adapters are loaded with /v1/load_lora_adapter",
    "/v1/assistants": "send the conversation to /v1/chat/completions",
    "/v1/threads": "send the conversation to /v1/chat/completions",
    "/v1/conversations": "send the conversation to /v1/chat/completions",
    "/v1/vector_stores": "it keeps no files",
    "/embeddings": "embeddings need a model made for them, and this server's generate text",
    "/pooling": "it has no model for that",
    "/classify": "it has no model for that",
    "/score": "it has no model for that",
    "/rerank": "it has no model for that",
}
"""Path, with all below it, to what to do."""

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]


def _add(path: str, hint: str) -> None:
    async def refuse() -> None:
        raise NotFoundError(f"{path} is not served here: {hint}", reason="not_served")

    for pattern in (path, path + "/{rest:path}"):
        router.add_api_route(pattern, refuse, methods=METHODS)


for _path, _hint in UNSERVED.items():
    _add(_path, _hint)
