"""A FakeEngine with a pool that the page can show."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from multilora_jax.lora.cache import AdapterCache
from multilora_jax.memory.allocator import PageAllocator
from multilora_jax.request import LoRARequest
from tests.server.fake_engine import PAGES, FakeEngine


class PoolEngine(FakeEngine):
    """A FakeEngine with a pool to look at."""

    def __init__(self, **config):
        super().__init__(**config)
        self.allocator = PageAllocator(PAGES + 1)
        self.cache = AdapterCache(self.allocator)
        self.geometry = SimpleNamespace(page_bytes=1024, page_tokens=16)
        self.together = 0  # most requests that a step found

    def step(self):
        self.together = max(self.together, len(self.requests))
        return super().step()

    def _advance(self, request):
        asked = [LoRARequest(adapter.name, adapter.int_id, adapter.path) for adapter in request.adapters]
        return replace(super()._advance(request), lora_request=asked or None)
