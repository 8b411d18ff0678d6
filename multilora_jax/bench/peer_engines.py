"""The engines that `bench peers` compares, behind one small interface."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from multilora_jax.bench.answers import Request, answer, greedy
from multilora_jax.bench.llama_server import LlamaServer
from multilora_jax.bench.peer_process import PeerProcess
from multilora_jax.bench.runs import run_once
from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.request import LoRARequest

HF_METHODS = ("mixed", "loop")


class Peer(Protocol):
    """An engine that is loaded and waits.

    Attributes:
        name, dtype: as the report shows them.
        tokens: its latest answers by number of distinct adapters, where it gives them.
    """

    name: str
    dtype: str
    tokens: dict[int, list[list[int]]]

    def takes(self, count: int) -> bool:
        """Whether it can run so many distinct adapters."""
        ...

    def run(self, prompts: Sequence[list[int]], count: int, adapters: Sequence[int | None], max_tokens: int) -> float:
        """Answers all prompts greedily, with exactly max_tokens tokens each; the seconds that it took.

        Args:
            prompts: token ids of each.
            count: distinct adapters; adapters: the number of each request's, None for the base.
            max_tokens: of each answer.
        """
        ...


class Ours:
    """This engine.

    Args:
        engine: idle.
        loras: the adapters by number.
        ids: request ids.
    """

    name = "multilora_jax"

    def __init__(self, engine: LLMEngine, loras: Sequence[LoRARequest], ids: Iterator[str]):
        self.dtype = engine.geometry.dtype
        self.tokens: dict[int, list[list[int]]] = {}
        self._engine, self._loras, self._ids = engine, loras, ids

    def takes(self, count: int) -> bool:
        del count
        return True

    def run(self, prompts: Sequence[list[int]], count: int, adapters: Sequence[int | None], max_tokens: int) -> float:
        del count
        return run_once(self._engine, prompts, self._chosen(adapters), max_tokens, self._ids).seconds

    def answer(self, prompts: Sequence[list[int]], adapters: Sequence[int | None], max_tokens: int) -> list[list[int]]:
        """The tokens of the same answers."""
        pairs = zip(prompts, self._chosen(adapters), strict=True)
        return answer(self._engine, [Request(prompt, greedy(max_tokens), lora) for prompt, lora in pairs]).token_ids

    def _chosen(self, adapters: Sequence[int | None]) -> list[LoRARequest | None]:
        return [None if number is None else self._loras[number] for number in adapters]


class HF:
    """transformers and PEFT in one type and with one method, a guest of a process that may have several.

    Args:
        process: with hf_worker in it, loaded.
        dtype: one that it has loaded.
        method: of HF_METHODS: "mixed" for batches of all adapters, "loop" for a batch of each adapter, one after
            another.
    """

    def __init__(self, process: PeerProcess, dtype: str, method: str):
        self.name, self.dtype = f"hf-{method}", dtype
        self.tokens: dict[int, list[list[int]]] = {}
        self._process, self._method = process, method

    def takes(self, count: int) -> bool:
        return count > 0 or self._method == "mixed"

    def run(self, prompts: Sequence[list[int]], count: int, adapters: Sequence[int | None], max_tokens: int) -> float:
        answer = self._process.ask({
            "cmd": "run", "dtype": self.dtype, "method": self._method, "prompts": list(prompts),
            "adapters": list(adapters), "max_tokens": max_tokens,
        })  # fmt: skip
        self.tokens[count] = answer["tokens"]
        return answer["seconds"]


class Llama:
    """llama.cpp's server."""

    name, dtype = "llama.cpp", "gguf"

    def __init__(self, server: LlamaServer):
        self.tokens: dict[int, list[list[int]]] = {}
        self._server = server

    def takes(self, count: int) -> bool:
        return count <= self._server.num_adapters

    def run(self, prompts: Sequence[list[int]], count: int, adapters: Sequence[int | None], max_tokens: int) -> float:
        del count
        return self._server.run(prompts, adapters, max_tokens)


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """The share of tokens of `ours` before the first of each answer in which the two differ.

    What follows a difference continues another text, and says nothing more.
    """
    same = 0
    for mine, its in zip(ours, theirs, strict=True):
        pairs = zip(mine, its, strict=False)
        same += next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(mine), len(its)))
    return same / sum(map(len, ours))
