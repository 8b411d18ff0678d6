"""The HTTP application: routes, keys and error shapes put together."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import PlainTextResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from multilora_jax.async_engine import AsyncEngine
from multilora_jax.config import EngineConfig
from multilora_jax.server import adapter_status, adapters, chat, completions, tokenization
from multilora_jax.server.answer_schemas import Health, Ready, Version
from multilora_jax.server.auth import Keys, require_metrics
from multilora_jax.server.context import ServerContext
from multilora_jax.server.errors import install_handlers
from multilora_jax.server.guard import install_guards
from multilora_jax.server.openapi import install_openapi
from multilora_jax.server.page_routes import install_page
from multilora_jax.server.request_ids import RequestIdMiddleware
from multilora_jax.server.request_log import RequestLog
from multilora_jax.server.tracing import Tracing

probes = APIRouter()


def create_app(async_engine: AsyncEngine | None, config: EngineConfig) -> FastAPI:
    """An OpenAI-compatible application over an engine.

    Args:
        async_engine: the engine; None while it is being built: then /health and all else that needs it answer 503
            until `app.state.context.attach(engine)`.
        config: the server's keys of it, its chat_template and max_loras are used here.

    Raises:
        ConfigError: a bad keys_file, or traces are asked for and cannot be sent.
    """
    app = FastAPI(title="multilora_jax", version=package_version(), docs_url=None, redoc_url=None)
    app.state.context = ServerContext(config)
    if async_engine is not None:
        app.state.context.attach(async_engine)
    app.state.keys = Keys.of_config(config)
    install_guards(app, config, app.state.keys, app.state.context.calls)
    app.add_middleware(RequestIdMiddleware)
    app.state.context.calls.add_observer(RequestLog(config))
    app.state.tracing = Tracing(config.otlp_endpoint) if config.otlp_endpoint else None
    if app.state.tracing:
        app.state.context.calls.add_observer(app.state.tracing)
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


@probes.get("/ready", response_model=Ready)
async def ready(request: Request) -> dict[str, Any]:
    """200 when requests should be sent here; 503 while starting, draining, or when /health says so."""
    request.app.state.context.check_ready()
    return {"status": "ready"}


@probes.get("/version", response_model=Version)
async def show_version() -> dict[str, Any]:
    """This package's version."""
    return {"version": package_version()}


@probes.get("/metrics", response_class=PlainTextResponse, dependencies=[Depends(require_metrics)])
async def metrics(request: Request) -> Response:
    """Figures for Prometheus."""
    context: ServerContext = request.app.state.context
    engine = context.whole_engine
    text = context.metrics.render(await engine.stats(), engine.engine, request.app.state.keys.callers())
    return Response(text, media_type=CONTENT_TYPE_LATEST)
