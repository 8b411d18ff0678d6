"""Messages between hosts."""

from __future__ import annotations

import socket
import struct
import threading

import ml_dtypes
import numpy as np
import pytest

from multilora_jax.engine import wire
from multilora_jax.engine.batch import BatchShape
from multilora_jax.engine.program_keys import decode_key, encode_key
from multilora_jax.lora.layout import Reach


@pytest.fixture
def pair():
    left, right = socket.socketpair()
    with left, right:
        yield left, right


def test_a_message_comes_as_it_was_sent(pair):
    rng = np.random.default_rng(0)
    arrays = [
        rng.integers(0, 2**32, (3, 5), np.uint32), np.float32(2.5), np.zeros((0, 4), np.int32),
        rng.standard_normal((2, 70_000)).astype(ml_dtypes.bfloat16)[:, ::2], np.array([True, False]),
    ]  # fmt: skip
    header = {"op": "call", "args": [3, -1]}
    sender = threading.Thread(target=wire.send, args=(pair[0], wire.encode(header, [np.asarray(a) for a in arrays])))
    sender.start()
    got, found = wire.receive(pair[1])
    sender.join()
    assert got == header
    for array, other in zip(arrays, found, strict=True):
        assert np.asarray(array).dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(array), other)


def test_a_closed_connection_is_told_from_a_message(pair):
    pair[0].sendall(wire.encode({"op": "stop"})[:-3])
    pair[0].close()
    with pytest.raises(wire.ConnectionLost):
        wire.receive(pair[1])


def test_what_is_no_message_is_refused(pair):
    pair[0].sendall(struct.pack("<I", 2**31) + b"GET / HTTP/1.1")
    with pytest.raises(ValueError, match="does not speak this protocol"):
        wire.receive(pair[1])


@pytest.mark.parametrize(
    "key",
    [
        ("begin", BatchShape(32, 4, 8), 64, False),
        ("layers", BatchShape(0, 0, 2), 0, Reach.EXTENDED),
        ("insert", 64, ("q_proj", "k_proj")),
        ("write_page",),
    ],
)
def test_keys_of_programs(key):
    decoded = decode_key(encode_key(key))
    assert decoded == key
    assert hash(decoded) == hash(key)
    assert [type(part) for part in decoded] == [type(part) for part in key]
