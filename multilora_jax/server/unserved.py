"""Routes of OpenAI's and vLLM's that this server does not have, refused with what it has instead."""

from __future__ import annotations

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


def hint_for(path: str) -> str | None:
    """What to do instead of asking for a path; None for one that nobody would expect here."""
    parts = path.rstrip("/").split("/")
    starts = ("/".join(parts[:n]) for n in range(2, len(parts) + 1))
    return next((UNSERVED[start] for start in starts if start in UNSERVED), None)
