"""GET /v1/models and /v1/models/NAME, and the routes that manage adapters: load, unload, pin and unpin.

`/load_lora_adapter` and `/unload_lora_adapter` are SGLang's names for two of them; they answer with SGLang's fields
`success` and `loaded_adapters` (name to path of all that are registered) besides this server's own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from fastapi import Depends, Request
from fastapi.responses import JSONResponse

from multilora_jax.errors import NotFoundError, UserError
from multilora_jax.request import LoRARequest
from multilora_jax.server import answer_schemas
from multilora_jax.server.adapter_protocol import AdapterBody, LoadBody
from multilora_jax.server.auth import require_admin
from multilora_jax.server.bodies import body_router
from multilora_jax.server.context import ServerContext
from multilora_jax.server.errors import error_body

if TYPE_CHECKING:
    from multilora_jax.lora.adapter import Adapter

UNLOAD_WAIT_S = 30.0
"""How long an unload waits for the requests that still run on the adapter; they go on after that too."""

log = logging.getLogger(__name__)

router = body_router()
management = body_router(dependencies=[Depends(require_admin)])

Answer = dict[str, Any]


@router.get("/v1/models", responses={200: {"model": answer_schemas.ModelList}})
async def list_models(request: Request) -> Answer:
    """The base and every adapter that a request may name."""
    context: ServerContext = request.app.state.context
    cards = await cards_of(context, context.engine.list_loras())
    return {"object": "list", "data": [_base_card(context), *cards]}


@router.get("/v1/models/{name:path}", responses={200: {"model": answer_schemas.ModelCard}})
async def show_model(name: str, request: Request) -> Answer:
    """The card of the base or of one adapter."""
    context: ServerContext = request.app.state.context
    target = context.resolve(name)
    if not target.adapters:
        return _base_card(context)
    return await _card_of(context, target.name)


@management.post("/v1/load_lora_adapter", responses={200: {"model": answer_schemas.ModelCard}})
async def load_lora_adapter(body: LoadBody, request: Request) -> Answer:
    """Load an adapter from a folder of this machine and answer with its model card.

    With `load_inplace` it takes the place of one of that name; requests under way finish on the old content. With
    `pinned` it stays in the pool until it is unpinned or unloaded; where there is no room for that (`pin_limit`) it is
    not loaded at all.
    """
    context: ServerContext = request.app.state.context
    engine = context.engine
    replaced = _id_of(context, body.lora_name) if body.load_inplace else None
    started = time.monotonic()
    try:
        lora_request = LoRARequest(
            body.lora_name, replaced or context.new_lora_id(), body.lora_path, load_inplace=body.load_inplace
        )
        adapter = await engine.add_lora(lora_request, pinned=body.pinned)
    except UserError as error:
        log.warning("adapter %r refused (%s): %s", body.lora_name[:256], error.reason, " ".join(error.message.split()))
        raise
    seconds = time.monotonic() - started
    context.metrics.adapter_load_seconds.observe(seconds)
    log.info(
        "adapter %r %s: rank %d, %s, from %r, in %.2f s",
        adapter.name, "replaced" if replaced else "loaded", adapter.rank, (adapter.digest or "")[:12],
        adapter.path, seconds,
    )  # fmt: skip
    [card] = await cards_of(context, [adapter])
    return card


@management.post("/v1/unload_lora_adapter", responses={200: {"model": answer_schemas.Unloaded}})
async def unload_lora_adapter(body: AdapterBody, request: Request) -> Answer:
    """Withdraw an adapter at once and answer when no request runs on it any more, or after UNLOAD_WAIT_S."""
    context: ServerContext = request.app.state.context
    _refuse_base(context, body.lora_name, "unloaded")
    draining = await context.engine.remove_lora(body.lora_name, wait_s=UNLOAD_WAIT_S)
    log.info("adapter %r unloaded, %d requests still run on it", body.lora_name, draining)
    return {"id": body.lora_name, "object": "model", "deleted": True, "requests_draining": draining}


@management.post("/v1/pin_lora_adapter", responses={200: {"model": answer_schemas.ModelCard}})
async def pin_lora_adapter(body: AdapterBody, request: Request) -> Answer:
    """Keep an adapter in the pool until it is unpinned or unloaded, and answer with its model card."""
    context: ServerContext = request.app.state.context
    _refuse_base(context, body.lora_name, "pinned")
    await context.engine.pin_lora(body.lora_name)
    log.info("adapter %r pinned", body.lora_name)
    return await _card_of(context, body.lora_name)


@management.post("/v1/unpin_lora_adapter", responses={200: {"model": answer_schemas.ModelCard}})
async def unpin_lora_adapter(body: AdapterBody, request: Request) -> Answer:
    """Let an adapter leave the pool again when others need the room, and answer with its model card."""
    context: ServerContext = request.app.state.context
    _refuse_base(context, body.lora_name, "unpinned")
    await context.engine.unpin_lora(body.lora_name)
    log.info("adapter %r unpinned", body.lora_name)
    return await _card_of(context, body.lora_name)


@management.post("/load_lora_adapter", responses={200: {"model": answer_schemas.SGLangAnswer}})
async def load_lora_adapter_as_sglang(body: LoadBody, request: Request) -> JSONResponse:
    """SGLang's name for /v1/load_lora_adapter."""
    return await _as_sglang(request, load_lora_adapter(body, request))


@management.post("/unload_lora_adapter", responses={200: {"model": answer_schemas.SGLangAnswer}})
async def unload_lora_adapter_as_sglang(body: AdapterBody, request: Request) -> JSONResponse:
    """SGLang's name for /v1/unload_lora_adapter."""
    return await _as_sglang(request, unload_lora_adapter(body, request))


async def _as_sglang(request: Request, work: Coroutine[Any, Any, Answer]) -> JSONResponse:
    """The answer or the error of `work` with SGLang's fields in addition."""
    context: ServerContext = request.app.state.context
    try:
        status, answer = 200, {"success": True, **await work}
    except UserError as error:
        status, body = error_body(error)
        answer = {"success": False, "error_message": body["error"]["message"], **body}
        if status == 503:
            return JSONResponse(answer, status_code=status)
    loaded = {adapter.name: adapter.path for adapter in context.engine.list_loras()}
    return JSONResponse({**answer, "loaded_adapters": loaded}, status_code=status)


def _id_of(context: ServerContext, name: str) -> int | None:
    """The id of the adapter that has this name, None if none has."""
    try:
        return context.engine.engine.lora_request(name).lora_int_id
    except NotFoundError:
        return None


def _refuse_base(context: ServerContext, name: str, done: str) -> None:
    if name == context.engine.engine.base_name:
        raise UserError(
            f"{name!r} is the base model and cannot be {done}: name an adapter",
            reason="name_is_base_model", param="lora_name",
        )  # fmt: skip


def _base_card(context: ServerContext) -> Answer:
    engine = context.engine.engine
    return {
        "id": engine.base_name,
        "object": "model",
        "created": context.started_at,
        "owned_by": "multilora_jax",
        "root": engine.config.model,
        "parent": None,
        "max_model_len": engine.max_model_len,
    }


async def _card_of(context: ServerContext, name: str) -> Answer:
    for adapter in context.engine.list_loras():
        if adapter.name == name:
            [card] = await cards_of(context, [adapter])
            return card
    raise NotFoundError(f"the adapter {name!r} was just unloaded", reason="unknown_adapter", param="model")


async def cards_of(context: ServerContext, adapters: list[Adapter]) -> list[Answer]:
    """A card each. What is known of the content only is missing until the adapter was first read: digest and rank are
    null, and there are no warnings."""
    places = {name: (tier, pinned) for name, _, tier, pinned in (await context.engine.stats()).tiers}
    cards = []
    for adapter in adapters:
        tier, pinned = places.get(adapter.name, ("registered", False))
        cards.append(
            {
                "id": adapter.name,
                "object": "model",
                "created": int(adapter.created),
                "owned_by": "multilora_jax",
                "root": adapter.path,
                "parent": context.engine.engine.base_name,
                "max_model_len": context.engine.engine.max_model_len,
                "digest": adapter.digest,
                "rank": None if adapter.version is None else adapter.rank,
                "warnings": [] if adapter.version is None else list(adapter.version.warnings),
                "state": tier,
                "pinned": pinned,
            }
        )
    return cards
