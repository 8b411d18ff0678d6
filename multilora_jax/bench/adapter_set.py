"""The adapters of a benchmark: made, or taken from a folder, registered without being read, then read once."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tqdm import tqdm

from multilora_jax.adapters.make import make_adapters
from multilora_jax.adapters.validate import adapter_folders
from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.errors import UserError
from multilora_jax.lora.adapter_files import open_weights
from multilora_jax.models.config import ModelConfig
from multilora_jax.request import LoRARequest

FILE_DTYPE = "bfloat16"
"""Type of the files of random adapters: half of float32's bytes, and no slower to read."""

_AT_ONCE = 64


@dataclass(frozen=True)
class Size:
    """What an adapter's files say of it.

    Attributes:
        rank: the largest.
        num_elements: numbers in all its tensors.
    """

    rank: int
    num_elements: int


@contextmanager
def adapter_set(
    model: ModelConfig, num: int, *, folder: str | None, ranks: Sequence[int], modules: Sequence[str], seed: int = 0
) -> Iterator[list[str]]:
    """The folders of `num` adapters.

    Args:
        model: the base.
        num: how many.
        folder: where they are; made there, and left, if there are none. None for a folder that goes afterwards.
        ranks, modules, seed: of those that are made, see make_adapters.

    Raises:
        UserError: `folder` has adapters, but too few (`too_few_adapters`).
    """
    with tempfile.TemporaryDirectory(prefix="multilora_bench_") as temporary:
        out = os.path.join(temporary, "adapters") if folder is None else folder
        if os.path.isdir(out) and os.listdir(out):
            found = adapter_folders([out])
            if len(found) < num:
                raise UserError(
                    f"{out!r} holds {len(found)} adapters but {num} are needed: lower --counts, or make more with "
                    f"python -m multilora_jax.adapters make --num {num} in another folder",
                    reason="too_few_adapters", param="adapters_dir",
                )  # fmt: skip
            yield found[:num]
        else:
            yield make_adapters(model, out, num, ranks=ranks, modules=modules, seed=seed, dtype=FILE_DTYPE)


def size_of(path: str) -> Size:
    """Rank and size of an adapter of A and B only, from the header of its file."""
    shapes = [entry.shape for entry in open_weights(path).tensors.values()]
    return Size(max(min(shape) for shape in shapes), sum(math.prod(shape) for shape in shapes))


def pages_of(sizes: Sequence[Size], model: ModelConfig, page_tokens: int) -> list[int]:
    """Pool pages that adapters of these sizes take."""
    geometry = model.geometry(2, page_tokens)
    return [geometry.pages_for_units(size.num_elements // geometry.unit) for size in sizes]


def register(engine: LLMEngine, paths: Sequence[str]) -> list[LoRARequest]:
    """Registers adapters under the names of their folders, which reads nothing, then reads each once.

    So every adapter's version is known and what has room is in host memory, as in a server that has run for a while.
    """
    requests = [LoRARequest(os.path.basename(path), engine.adapters.registry.next_int_id(), path) for path in paths]
    for request in requests:
        engine.register_lora(request)
    for start in tqdm(range(0, len(requests), _AT_ONCE), desc="Reading adapters", disable=None):
        engine.prepare(requests[start : start + _AT_ONCE])
    return requests
