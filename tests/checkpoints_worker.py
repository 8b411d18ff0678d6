"""Restores one model in two processes, each with one of two shards, and prints what it read as JSON.

python -m tests.checkpoints_worker FOLDER RANK ADDRESS

FOLDER holds `Numbered`, ADDRESS is host:port of the process of rank 0.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from multilora_jax.models.checkpoint import expected_shapes, open_checkpoint
from multilora_jax.models.config import ModelConfig, RopeConfig
from multilora_jax.models.layers import LlamaSpec
from multilora_jax.models.loader import _join, layer_records, load_llama, top_records

CONFIG = ModelConfig(
    name="wide", vocab_size=4096, hidden_size=1024, num_layers=1, num_heads=8, num_kv_heads=4, head_dim=128,
    ffn_size=3072, rms_norm_eps=1e-5, rope=RopeConfig(), max_position_embeddings=64,
)  # fmt: skip


class Numbered:
    """A model whose tensors can be told apart."""

    config = CONFIG
    source = "numbered"

    def names(self) -> list[str]:
        return list(expected_shapes(self.config))

    def shape(self, name: str) -> tuple[int, ...]:
        return expected_shapes(self.config)[name]

    def tensor(self, name: str) -> np.ndarray:
        seed = self.names().index(name)
        return np.random.default_rng(seed).standard_normal(self.shape(name), np.float32)

    def load_tokenizer(self, tokenizer: str | None = None) -> None:
        return None


def bytes_read() -> int:
    """Bytes that this process has read from files so far."""
    text = Path("/proc/self/io").read_text()
    return int(text.splitlines()[0].split()[1])


def whole(spec: LlamaSpec, record: Any) -> np.ndarray:
    """What loading makes of a record, on one device."""
    return _join(spec, record, (Numbered().tensor(source) for source in record.sources))


def main(folder: Path, rank: int, address: str) -> None:
    jax.distributed.initialize(address, num_processes=2, process_id=rank, initialization_timeout=120)
    mesh = Mesh(np.asarray(jax.devices()).reshape(1, 2), ("data", "model"))
    spec = LlamaSpec(CONFIG, CONFIG.geometry(2, 16, 2), axis_name="model")
    checkpoint = open_checkpoint(folder)
    before = bytes_read()
    params = load_llama(spec, 16, mesh, checkpoint).params()
    read = bytes_read() - before
    groups = [(top_records(spec), params["top"])]
    groups += [(layer_records(spec, layer), arrays) for layer, arrays in enumerate(params["layers"])]
    wrong = []
    for records, arrays in groups:
        for record in records:
            expected = whole(spec, record)
            shards = arrays[record.name].addressable_shards
            if not all(np.array_equal(np.asarray(shard.data), expected[shard.index]) for shard in shards):
                wrong.append(record.name)
    stored = sum(path.stat().st_size for path in (folder / "weights").rglob("*") if path.is_file())
    print(json.dumps({"wrong": wrong, "bytes_read": read, "bytes_stored": stored}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
