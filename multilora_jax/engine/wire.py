"""Messages between the hosts of one model: JSON and the bytes of numpy arrays over TCP (host only, no jax).

A message is 4 bytes with the length of its header, the header, and the arrays one after another. The header is a JSON
object whose "arrays" say type and shape of each. Nothing that is received is ever executed or unpickled.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

_LENGTH = struct.Struct("<I")
_MAX_HEADER = 1 << 26
_TYPES = {
    np.dtype(name).name: np.dtype(name)
    for name in ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32")
} | {"bfloat16": np.dtype(ml_dtypes.bfloat16)}


class ConnectionLost(ConnectionError):
    """The other side closed the connection or cannot be reached any more."""


def keep_alive(connection: socket.socket) -> None:
    """Small messages go at once; a host that is gone is noticed within 8 seconds, by this machine's kernel alone.

    The kernels ask and answer, so that a busy process is not taken for a lost one.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 5), ("TCP_USER_TIMEOUT", 8000)):
        if hasattr(socket, name):  # each is missing on some system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def encode(header: dict[str, Any], arrays: Sequence[np.ndarray] = ()) -> bytes:
    """A message as bytes."""
    whole = [np.ascontiguousarray(array) for array in arrays]
    text = json.dumps(header | {"arrays": [[a.dtype.name, list(a.shape)] for a in arrays]}).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *(array.tobytes() for array in whole)])


def send(connection: socket.socket, data: bytes) -> None:
    """Sends bytes; raises ConnectionLost."""
    try:
        connection.sendall(data)
    except OSError as error:
        raise ConnectionLost(str(error)) from error


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[np.ndarray]]:
    """The next message: its header and its arrays.

    Raises:
        ConnectionLost: the other side is gone.
        ValueError: what came is no message.
    """
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    if length > _MAX_HEADER:
        raise ValueError(f"a header of {length} bytes: the other side does not speak this protocol")
    header = json.loads(bytes(_read(connection, length)))
    arrays = []
    for name, shape in header.pop("arrays"):
        dtype = _TYPES[name]
        data = _read(connection, math.prod(shape) * dtype.itemsize)
        arrays.append(np.frombuffer(data, dtype).reshape(shape))
    return header, arrays


def _read(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        try:
            got = connection.recv_into(view)
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        if not got:
            raise ConnectionLost("the connection was closed")
        view = view[got:]
    return data
