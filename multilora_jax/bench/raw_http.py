"""As much of an HTTP/1.1 client as load needs: little work for each piece, and misbehaviour where it is wanted."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator
from typing import Any

_READ_BYTES = 1 << 16
_LAST_CHUNK = b"\r\n0\r\n\r\n"


class BrokenAnswer(Exception):
    """The connection ended before the answer did."""


class Connection:
    """One connection, for one request after another.

    Args:
        reader, writer: of asyncio.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._reader = reader
        self._writer = writer
        self._length: int | None = 0

    @classmethod
    async def open(cls, host: str, port: int) -> Connection:
        """Connects; OSError where nobody listens."""
        return cls(*await asyncio.open_connection(host, port))

    async def send(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> None:
        """Sends a request; a body that is neither bytes nor None goes as JSON."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        fields = {"Host": "server", "Content-Type": "application/json", "Content-Length": str(len(data))}
        lines = [
            f"{method} {path} HTTP/1.1",
            *(f"{name}: {value}" for name, value in (fields | (headers or {})).items()),
        ]
        await self.send_raw("\r\n".join(lines).encode() + b"\r\n\r\n" + data)

    async def send_raw(self, data: bytes) -> None:
        """Sends bytes that need not be HTTP."""
        self._writer.write(data)
        await self._writer.drain()

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the answer. Raises BrokenAnswer where none comes."""
        try:
            lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        except (asyncio.IncompleteReadError, OSError) as error:
            raise BrokenAnswer(f"no answer: {error}") from error
        headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:] if line)
        }
        chunked = headers.get("transfer-encoding", "") == "chunked"
        self._length = None if chunked else int(headers.get("content-length", 0))
        return int(lines[0].split()[1]), headers

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """The body in the pieces that the server sent. Raises BrokenAnswer where it is not whole."""
        reader = self._reader
        try:
            if self._length is not None:
                yield await reader.readexactly(self._length)
                return
            while size := int(await reader.readline() or b"broken", 16):
                yield (await reader.readexactly(size + 2))[:-2]
            await reader.readexactly(2)
        except (asyncio.IncompleteReadError, ValueError, OSError) as error:
            raise BrokenAnswer(f"the answer broke off: {error}") from error

    async def read_out(self) -> tuple[bytes, float]:
        """The body as it lies on the wire, chunk sizes included, and when its first bytes came (time.perf_counter()).

        A fraction of the work of `pieces`, for a client that shares its cores with the server. Only for bodies that
        hold no line end of HTTP's, as those of events and of JSON. Raises BrokenAnswer where it is not whole.
        """
        reader = self._reader
        try:
            if self._length is not None:
                return await reader.readexactly(self._length), time.perf_counter()
            body = await reader.read(_READ_BYTES)
            first = time.perf_counter()
            while not body.endswith(_LAST_CHUNK):
                more = await reader.read(_READ_BYTES)
                if not more:
                    raise BrokenAnswer("the answer broke off")
                body += more
        except (asyncio.IncompleteReadError, OSError) as error:
            raise BrokenAnswer(f"the answer broke off: {error}") from error
        return body, first

    async def whole(self) -> bytes:
        """The whole body."""
        return b"".join([piece async for piece in self.pieces()])

    def abort(self) -> None:
        """Ends the connection at once, as a client does that is killed."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Ends the connection, and waits until it has ended."""
        self._writer.close()
        with contextlib.suppress(OSError):  # the other side was first
            await self._writer.wait_closed()


async def ask(host: str, port: int, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    """One request on a connection of its own: (status, body)."""
    connection = await Connection.open(host, port)
    try:
        await connection.send(method, path, body)
        status, _ = await connection.head()
        return status, await connection.whole()
    finally:
        connection.abort()


def events_of(body: bytes) -> list[Any]:
    """The events of a stream that is whole: JSON values, and "[DONE]"."""
    data = [line[6:] for line in body.split(b"\n") if line.startswith(b"data: ")]
    return ["[DONE]" if line == b"[DONE]" else json.loads(line) for line in data]
