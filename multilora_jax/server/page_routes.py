"""The page at / for browsers: its files, the live data behind it, and a prompt to several adapters at once.

The files are open, as they are the same for everybody. What the page shows of the server comes from /page/live, which
needs what the management routes need, because it tells of all adapters and all callers. The playground's requests are
ordinary ones, with the caller's key and limits.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, FastAPI, Query, Request
from fastapi.responses import Response

from multilora_jax.server.auth import require_admin
from multilora_jax.server.bodies import body_router
from multilora_jax.server.compare import CompareBody, Comparison
from multilora_jax.server.context import ServerContext
from multilora_jax.server.page_files import INDEX, PAGE_PATHS, page_file
from multilora_jax.server.streaming import EventStream

router = body_router(include_in_schema=False)


def install_page(app: FastAPI) -> None:
    """Add the page's routes to an app."""
    for path in sorted(PAGE_PATHS):
        router_path = path.removeprefix("/page/") if path != "/" else INDEX
        app.add_api_route(path, _file_route(router_path), include_in_schema=False, methods=["GET", "HEAD"])
    app.include_router(router)


@router.get("/page/live", dependencies=[Depends(require_admin)])
async def live(request: Request, cursor: Annotated[str, Query(max_length=64)] = "") -> dict[str, Any]:
    """The pool, the adapters, the requests and the last minutes; see LiveView.look."""
    context: ServerContext = request.app.state.context
    return await context.live.look(cursor)


@router.post("/page/compare")
async def compare(body: CompareBody, request: Request) -> Response:
    """One prompt to the base and up to eight adapters; see Comparison."""
    return EventStream(Comparison(request.app, request.scope, body).events(), [])


def _file_route(name: str) -> Any:
    async def send_file(request: Request) -> Response:
        file = page_file(name)
        if request.headers.get("if-none-match") == file.etag:
            return Response(status_code=304, headers=file.headers)
        return Response(file.content, headers=file.headers)

    return send_file
