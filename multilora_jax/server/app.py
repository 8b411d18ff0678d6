"""The HTTP application: routes, keys and error shapes put together."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from multilora_jax.async_engine import AsyncEngine
from multilora_jax.config import EngineConfig
from multilora_jax.server import adapter_status, adapters, chat, completions, tokenization
from multilora_jax.server.answer_schemas import Health, Version
from multilora_jax.server.auth import AuthMiddleware, Keys
from multilora_jax.server.context import ServerContext
from multilora_jax.server.errors import install_handlers
from multilora_jax.server.openapi import install_openapi
from multilora_jax.server.page_routes import install_page
from multilora_jax.server.request_ids import RequestIdMiddleware

probes = APIRouter()


def create_app(async_engine: AsyncEngine | None, config: EngineConfig) -> FastAPI:
    """An OpenAI-compatible application over an engine.

    Args:
        async_engine: the engine; None while it is being built: then /health and all else that needs it answer 503
            until `app.state.context.attach(engine)`.
        config: its host, api_keys, admin_keys, chat_template and max_loras are used here.
    """
    app = FastAPI(title="multilora_jax", version=package_version(), docs_url=None, redoc_url=None)
    app.state.context = ServerContext(config)
    if async_engine is not None:
        app.state.context.attach(async_engine)
    app.state.keys = Keys(config.api_keys, config.admin_keys, config.host)
    app.add_middleware(AuthMiddleware, keys=app.state.keys)
    app.add_middleware(RequestIdMiddleware)
    install_handlers(app)
    for router in (
        probes, completions.router, chat.router, tokenization.router, adapters.router, adapter_status.management
    ):  # fmt: skip
        app.include_router(router)
    if config.page:
        install_page(app)
    install_openapi(app)
    return app


def package_version() -> str:
    """Version of the installed package; "unknown" in a source tree that is not installed."""
    try:
        return version("multilora_jax")
    except PackageNotFoundError:
        return "unknown"


@probes.get("/health", response_model=Health)
async def health(request: Request) -> dict[str, Any]:
    """200 when requests can be served; 503 while starting and once the engine is dead or hangs."""
    request.app.state.context.check_healthy()
    return {"status": "ok"}


@probes.get("/version", response_model=Version)
async def show_version() -> dict[str, Any]:
    """This package's version."""
    return {"version": package_version()}


@probes.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Figures for Prometheus."""
    context: ServerContext = request.app.state.context
    stats = await context.engine.stats()
    return Response(context.metrics.render(stats, context.engine.engine), media_type=CONTENT_TYPE_LATEST)
