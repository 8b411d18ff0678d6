"""What an engine says about itself when it starts (host only, no jax)."""

from __future__ import annotations

from collections.abc import Sequence

from multilora_jax.lora.adapter import Adapter
from multilora_jax.memory.geometry import PoolGeometry
from multilora_jax.models.config import ModelConfig

MAX_ADAPTERS_SHOWN = 20
"""Most adapters that get a line of their own."""


def describe(
    name: str,
    model: ModelConfig,
    geometry: PoolGeometry,
    max_model_len: int,
    adapters: Sequence[Adapter],
    options: Sequence[str] = (),
) -> str:
    """Lines about the model and its options, the pool in tokens and in adapters, and the first MAX_ADAPTERS_SHOWN."""
    pages = geometry.num_pages - 1
    largest = max((adapter.num_pages for adapter in adapters if adapter.version is not None), default=0)
    room = f", or {pages // largest} adapters like the largest one here" if largest else ""
    size = geometry.num_pages * geometry.page_bytes / 2**20
    lines = [
        f"model     {name}: {model.num_parameters / 1e6:.1f} M parameters, {model.num_layers} layers, "
        + ", ".join([geometry.dtype, f"context {max_model_len} tokens", *options]),
        f"pool      {pages} pages of {geometry.page_bytes / 1024:.0f} KiB ({size:.0f} MiB): "
        f"{pages * geometry.page_tokens} tokens{room}",
    ]
    for a in adapters[:MAX_ADAPTERS_SHOWN]:
        if a.digest is None:
            lines.append(f"adapter   {a.name}: read when it is first asked for, {a.path}")
        else:
            lines.append(f"adapter   {a.name}: rank {a.rank}, {a.num_pages} pages, {a.digest[:12]}, {a.path}")
    if len(adapters) > MAX_ADAPTERS_SHOWN:
        lines.append(f"          and {len(adapters) - MAX_ADAPTERS_SHOWN} more adapters")
    return "\n".join(lines)
