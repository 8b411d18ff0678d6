"""GET /v1/models and /v1/models/NAME, POST /v1/load_lora_adapter and POST /v1/unload_lora_adapter."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, Request

from multilora_jax.errors import NotFoundError, UserError
from multilora_jax.request import LoRARequest
from multilora_jax.server.auth import require_admin
from multilora_jax.server.context import ServerContext
from multilora_jax.server.protocol import LoadBody, UnloadBody

if TYPE_CHECKING:
    from multilora_jax.lora.packing import HostAdapter

UNLOAD_WAIT_S = 30.0
"""How long an unload waits for the requests that still run on the adapter; they go on after that too."""

log = logging.getLogger(__name__)

router = APIRouter()
management = APIRouter(dependencies=[Depends(require_admin)])


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The base and every adapter that a request may name."""
    context: ServerContext = request.app.state.context
    resident = await _resident(context)
    adapters = [_card(context, adapter, adapter.name in resident) for adapter in context.engine.list_loras()]
    return {"object": "list", "data": [_base_card(context), *adapters]}


@router.get("/v1/models/{name:path}")
async def show_model(name: str, request: Request) -> dict[str, Any]:
    """The card of the base or of one adapter."""
    context: ServerContext = request.app.state.context
    target = context.resolve(name)
    if target.lora_request is None:
        return _base_card(context)
    resident = await _resident(context)
    for adapter in context.engine.list_loras():
        if adapter.name == target.name:
            return _card(context, adapter, adapter.name in resident)
    raise NotFoundError(f"the adapter {name!r} was just unloaded", reason="unknown_adapter", param="model")


@management.post("/v1/load_lora_adapter")
async def load_lora_adapter(body: LoadBody, request: Request) -> dict[str, Any]:
    """Load an adapter from a folder of this machine and answer with its model card."""
    context: ServerContext = request.app.state.context
    engine = context.engine
    for name, value in (("lora_name", body.lora_name), ("lora_path", body.lora_path)):
        if not value.strip():
            raise UserError(f"{name} is empty", reason=f"empty_{name}", param=name)
    replaced = {a.name: a.int_id for a in engine.list_loras()} if body.load_inplace else {}
    int_id = replaced.get(body.lora_name) or context.new_lora_id()
    started = time.monotonic()
    try:
        lora_request = LoRARequest(body.lora_name, int_id, body.lora_path, load_inplace=body.load_inplace)
        adapter = await engine.add_lora(lora_request)
    except UserError as error:
        log.warning("adapter %r refused (%s): %s", body.lora_name[:256], error.reason, _one_line(error.message))
        raise
    seconds = time.monotonic() - started
    context.metrics.adapter_load_seconds.observe(seconds)
    log.info(
        "adapter %r %s: rank %d, %s, from %r, in %.2f s",
        adapter.name, "replaced" if adapter.name in replaced else "loaded", adapter.rank, adapter.digest[:12],
        adapter.path, seconds,
    )  # fmt: skip
    context.loaded_at[adapter.name] = int(time.time())
    return _card(context, adapter, is_resident=False)


@management.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(body: UnloadBody, request: Request) -> dict[str, Any]:
    """Withdraw an adapter at once and answer when no request runs on it any more, or after UNLOAD_WAIT_S."""
    context: ServerContext = request.app.state.context
    if not body.lora_name.strip():
        raise UserError("lora_name is empty", reason="empty_lora_name", param="lora_name")
    base_name = context.engine.engine.base_name
    if body.lora_name == base_name:
        raise UserError(
            f"{base_name!r} is the base model and cannot be unloaded: name an adapter",
            reason="name_is_base_model", param="lora_name",
        )  # fmt: skip
    draining = await context.engine.remove_lora(body.lora_name, wait_s=UNLOAD_WAIT_S)
    context.loaded_at.pop(body.lora_name, None)
    log.info("adapter %r unloaded, %d requests still run on it", body.lora_name, draining)
    return {"id": body.lora_name, "object": "model", "deleted": True, "requests_draining": draining}


async def _resident(context: ServerContext) -> set[str]:
    """Names of the adapters that are in the pool now."""
    return {name for name, _, _ in (await context.engine.stats()).resident}


def _one_line(message: str) -> str:
    return " ".join(message.split())


def _base_card(context: ServerContext) -> dict[str, Any]:
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


def _card(context: ServerContext, adapter: HostAdapter, is_resident: bool) -> dict[str, Any]:
    return {
        "id": adapter.name,
        "object": "model",
        "created": context.loaded_at.get(adapter.name, context.started_at),
        "owned_by": "multilora_jax",
        "root": adapter.path,
        "parent": context.engine.engine.base_name,
        "max_model_len": context.engine.engine.max_model_len,
        "digest": adapter.digest,
        "rank": adapter.rank,
        "state": "resident" if is_resident else "host",
    }
