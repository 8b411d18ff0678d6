"""What is known of the adapters beyond their model cards, and a dry run of a load; all for administrators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Query, Request

from multilora_jax.errors import NotFoundError, UserError
from multilora_jax.server import answer_schemas
from multilora_jax.server.adapter_protocol import PathBody
from multilora_jax.server.adapters import cards_of, management
from multilora_jax.server.context import ServerContext

if TYPE_CHECKING:
    from multilora_jax.lora.adapter import Adapter

MAX_LISTED = 1000


@management.get("/v1/lora_adapters", responses={200: {"model": answer_schemas.AdapterList}})
async def list_adapters(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 100,
    after: Annotated[str | None, Query(description="the id that the list before ended with")] = None,
    state: Annotated[str | None, Query(pattern="^(registered|host|loading|resident)$")] = None,
) -> dict[str, Any]:
    """Adapters in the order of their registration, each with its state, pages and requests."""
    context: ServerContext = request.app.state.context
    adapters = context.engine.list_loras()
    if after is not None:
        names = [adapter.name for adapter in adapters]
        if after not in names:
            raise NotFoundError(f"after: no adapter is called {after[:100]!r}", reason="unknown_adapter", param="after")
        adapters = adapters[names.index(after) + 1 :]
    found = await _statuses(context, adapters)
    if state is not None:
        found = [status for status in found if status["state"] == state]
    return {"object": "list", "data": found[:limit], "has_more": len(found) > limit}


@management.get("/v1/lora_adapters/{name:path}", responses={200: {"model": answer_schemas.AdapterStatus}})
async def show_adapter(name: str, request: Request) -> dict[str, Any]:
    """One adapter: its card, and its state, pages and requests."""
    context: ServerContext = request.app.state.context
    adapter = context.engine.engine.adapters.registry.get(name, param="name")
    [status] = await _statuses(context, [adapter])
    return status


@management.post("/v1/validate_lora_adapter", responses={200: {"model": answer_schemas.ValidAdapter}})
async def validate_lora_adapter(body: PathBody, request: Request) -> dict[str, Any]:
    """Check an adapter's files as a load would, and load nothing.

    What a load would refuse gets the same error here. A name that is taken, and room to pin it, are not looked at.
    """
    context: ServerContext = request.app.state.context
    if not context.config.enable_lora:
        raise UserError("this server runs without adapters (enable_lora is false)", reason="lora_disabled")
    adapter = await context.engine.examine_lora(body.lora_path)
    version = adapter.version
    assert version is not None
    return {
        "valid": True, "lora_path": adapter.path, "digest": version.digest, "rank": adapter.rank,
        "rank_rows": adapter.num_rows, "pages": adapter.num_pages, "base_model": version.base_model,
        "own_tokenizer": version.tokenizer is not None, "own_chat_template": version.chat_template is not None,
        "warnings": list(version.warnings),
    }  # fmt: skip


async def _statuses(context: ServerContext, adapters: list[Adapter]) -> list[dict[str, Any]]:
    """Pages are those that the adapter takes in the pool when it is there; null until it was first read."""
    stats = await context.engine.stats()
    cards = await cards_of(context, adapters)
    return [
        {
            **card,
            "pages": None if adapter.version is None else adapter.num_pages,
            "requests_running": stats.running_by_adapter.get(adapter.name, 0),
            "requests_waiting": stats.waiting_by_adapter.get(adapter.name, 0),
        }
        for card, adapter in zip(cards, adapters, strict=True)
    ]
