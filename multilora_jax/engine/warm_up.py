"""Every program that a runner can need, to be compiled before the first request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from multilora_jax.engine.row_buffers import ATTENTION
from multilora_jax.lora.layout import Reach
from multilora_jax.memory.geometry import MODULES

if TYPE_CHECKING:
    from multilora_jax.engine.model_runner import ModelRunner


def program_keys(runner: ModelRunner) -> list[tuple[Any, ...]]:
    """Keys of `Programs.get`."""
    buckets, keys = runner.rows.buckets, list[tuple[Any, ...]]()
    for rows in (0, *buckets):
        for shape in runner.plain_shapes(rows):
            keys += [("begin", shape, rows, False), *runner.plain_layers(shape, rows)]
    finishes = ("finish", "finish_edited")
    keys += [(finish, shape, False) for finish in finishes for shape in runner.shapes] + [("logprobs", False)]
    if runner.spec.in_place:
        keys += [("units",), ("insert_units",)] if buckets else []
    else:
        for rows in buckets:
            keys += [("insert", rows, MODULES), ("insert", rows, ATTENTION), ("rows", rows)]
    for rows in buckets[-1:]:
        keys += [("write_page",), ("read_page",), ("logprobs", True)]
        for shape in runner.extended_shapes:
            keys += [("begin", shape, rows, True), ("layers", shape, rows, Reach.EXTENDED)]
            keys += [(finish, shape, True) for finish in finishes]
    return keys
