"""A whole engine that attends by a Pallas kernel, in the interpreter, beside one that attends by XLA."""

from __future__ import annotations

import functools

from multilora_jax.engine import devices, start
from multilora_jax.models.layers import LlamaSpec
from tests.tiny_engine import Request, greedy, make_adapter, run_all, tiny_engine, tokens_of

PROMPTS = ["Hello", "a prompt of more than two pages of the pool " * 2, "x", "one more"]


def answers(tmp_path, wanted):
    """Tokens of prompts of several lengths, base and adapter, chunks beside decodes."""
    engine = tiny_engine(max_num_seqs=2)
    assert f", attention by {wanted}" in engine.describe()
    assert engine.stats().attention_backend == wanted
    lora = make_adapter(tmp_path / wanted, engine, 4, 1)
    requests = [Request(prompt, greedy(6), lora if i % 2 else None) for i, prompt in enumerate(PROMPTS)]
    return tokens_of(run_all(engine, requests))


def test_kernels_answer_as_xla_does(monkeypatch, tmp_path):
    wanted = answers(tmp_path, "xla")
    monkeypatch.setattr(devices, "attention_backend", lambda *_: "triton")
    monkeypatch.setattr(start, "LlamaSpec", functools.partial(LlamaSpec, interpret=True))
    assert answers(tmp_path, "triton") == wanted
