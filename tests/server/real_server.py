"""A server over the real engine on a tiny reference model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from multilora_jax.async_engine import AsyncEngine
from multilora_jax.config import EngineConfig
from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.server.app import create_app
from tests.server.fake_engine import GOLDEN

COMPLETIONS = "/v1/completions"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class RealServer:
    """The app over a real engine; `client` calls it in process.

    Args:
        base: name of a base of golden_tiny.
        tokenizer: folder of one; the bases have none.
        config: further keys of the configuration.
    """

    def __init__(self, base: str, tokenizer: Path, **config: Any):
        keys = {
            "model": str(GOLDEN / "bases" / base), "served_model_name": "base", "dtype": "float32",
            "tokenizer": str(tokenizer), "max_model_len": 256, "pool_pages": 120, "max_num_seqs": 4,
            "max_num_batched_tokens": 32, "max_rank_rows": 64, **config,
        }  # fmt: skip
        self.engine = LLMEngine(EngineConfig.from_dict(keys), progress=False)
        if self.engine.config.warm_up:
            self.engine.warm_up()
        self.async_engine = AsyncEngine(self.engine)
        self.app = create_app(self.async_engine, self.engine.config)

    @property
    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url="http://test", timeout=60)

    async def complete(self, model: str, prompt: Any, **fields: Any) -> dict[str, Any]:
        """Body of a successful completion."""
        async with self.client as client:
            response = await client.post(COMPLETIONS, json={"model": model, "prompt": prompt, **fields})
        assert response.status_code == 200, response.text
        return response.json()

    def free_of_requests(self) -> bool:
        stats = self.engine.stats()
        return (stats.num_running, stats.num_waiting, stats.pages_kv) == (0, 0, 0)

    def close(self) -> None:
        self.async_engine.shutdown(drain=False)
        self.engine.check_integrity()
