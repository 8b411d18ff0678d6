"""GET /v1/models, POST /v1/load_lora_adapter and POST /v1/unload_lora_adapter."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, Request

from multilora_jax.errors import UserError
from multilora_jax.request import LoRARequest
from multilora_jax.server.auth import require_admin
from multilora_jax.server.context import ServerContext
from multilora_jax.server.protocol import LoadBody, UnloadBody

if TYPE_CHECKING:
    from multilora_jax.lora.packing import HostAdapter

UNLOAD_WAIT_S = 30.0
"""How long an unload waits for the requests that still run on the adapter; they go on after that too."""

router = APIRouter()
management = APIRouter(dependencies=[Depends(require_admin)])


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The base and every adapter that a request may name."""
    context: ServerContext = request.app.state.context
    engine = context.engine
    resident = {name for name, _, _ in (await engine.stats()).resident}
    base = {
        "id": engine.engine.base_name,
        "object": "model",
        "created": context.started_at,
        "owned_by": "multilora_jax",
        "root": engine.engine.config.model,
        "parent": None,
        "max_model_len": engine.engine.max_model_len,
    }
    adapters = [_card(context, adapter, adapter.name in resident) for adapter in engine.list_loras()]
    return {"object": "list", "data": [base, *adapters]}


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
    adapter = await engine.add_lora(LoRARequest(body.lora_name, int_id, body.lora_path, load_inplace=body.load_inplace))
    context.metrics.adapter_load_seconds.observe(time.monotonic() - started)
    context.loaded_at[adapter.name] = int(time.time())
    return _card(context, adapter, is_resident=False)


@management.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(body: UnloadBody, request: Request) -> dict[str, Any]:
    """Withdraw an adapter at once and answer when no request runs on it any more, or after UNLOAD_WAIT_S."""
    context: ServerContext = request.app.state.context
    if not body.lora_name.strip():
        raise UserError("lora_name is empty", reason="empty_lora_name", param="lora_name")
    draining = await context.engine.remove_lora(body.lora_name, wait_s=UNLOAD_WAIT_S)
    context.loaded_at.pop(body.lora_name, None)
    return {"id": body.lora_name, "object": "model", "deleted": True, "requests_draining": draining}


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
