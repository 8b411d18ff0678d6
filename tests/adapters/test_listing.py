"""`adapters list` against a server, and against what is none."""

from __future__ import annotations

import io
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from absl import flags as absl_flags

from multilora_jax import flags
from multilora_jax.adapters import listing
from multilora_jax.errors import UnavailableError, UserError
from tests.server.fake_engine import GOLDEN, FakeEngine
from tests.server.harness import Server, listening

NAMES = {"one": "all_linear", "two": "attn_only"}


@contextmanager
def running(**options) -> Iterator[str]:
    paths = {name: str(GOLDEN / "cases" / case) for name, case in NAMES.items()}
    server = Server(FakeEngine(lora_modules=paths, **options))
    try:
        with listening(server.app) as url:
            yield url
    finally:
        server.close()


def run(*words: str) -> str:
    """What the command prints. (Not by capsys: a uvicorn that starts meanwhile makes absl close the real stderr.)"""
    values = absl_flags.FlagValues()
    listing.define_flags(values)
    values(flags.normalise_argv(["list", *words]))
    out = io.StringIO()
    with redirect_stdout(out):
        assert listing.main([], values) == 0
    return out.getvalue()


def test_command_lists_the_adapters_of_a_server():
    with running() as url:
        header, one, two = run("--url", url).splitlines()
        cards = json.loads(run("--url", f"{url}/v1/", "--json"))
        assert json.loads(run("--url", url.removeprefix("http://"), "--json")) == cards
    assert header.split() == ["name", "state", "rank", "digest", "pinned", "path"]
    assert (one.split()[0], two.split()[0]) == ("one", "two")
    assert [card["name"] for card in cards] == ["one", "two"]
    for card, line in zip(cards, (one, two), strict=True):
        assert list(card) == header.split()
        assert card["state"] in ("registered", "host", "loading", "resident")
        assert card["pinned"] is False
        assert line.split()[1:] == [
            card["state"], str(card["rank"] or "-"), (card["digest"] or "-")[:12], "no", card["path"],
        ]  # fmt: skip


def test_keys_are_sent_and_refusals_are_told():
    with running(api_keys=["secret"]) as url:
        assert len(listing.ask_server(url, "secret")) == 2
        for key in (None, "wrong"):
            with pytest.raises(UserError, match="answers 401: ") as caught:
                listing.ask_server(url, key)
            assert "secret" not in caught.value.message


def test_no_server():
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(UnavailableError, match="is a server running there") as caught:
        listing.ask_server(url)
    assert caught.value.reason == "no_server"
    for url in ("nonsense", "ftp:/x"):
        with pytest.raises(UserError):
            listing.ask_server(url)


@pytest.mark.parametrize(
    ("status", "body", "match"),
    [
        (200, b"hello", "does not list adapters"),
        (200, b'{"data": [{"id": "x"}]}', "does not list adapters"),
        (200, b'{"data": [{"id": "x", "parent": null}]}', None),
        (404, b"<html>", "answers 404: is it a server"),
        (503, b'{"error": {"message": "still loading", "reason": "starting"}}', "answers 503: still loading"),
    ],
)
def test_other_servers(status, body, match):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        if match is None:
            assert listing.ask_server(url) == []
            assert listing.show_rows([]) == "no adapters"
        else:
            with pytest.raises(UserError, match=match):
                listing.ask_server(url)
        server.shutdown()
        thread.join()
