"""Long prompts through the engine against the oracle: chunks of several pieces, mixes, features, cached prefixes."""

from __future__ import annotations

import numpy as np
import pytest

from multilora_jax.request import LoRARequest
from pallas_kernels.segmented_lora.xla_pieces import PIECE_TOKENS, PromptPieces
from tests.oracle import Oracle, mix, read_deltas
from tests.tiny_engine import LogitsRecorder, Request, greedy, make_engine, run_all

CASES = ("dora_biased", "bias_all", "lora_bias", "bias_lora_only")
CHUNK = 96


@pytest.fixture
def filled(monkeypatch):
    """How many pieces each step with prompts had."""
    counts: list[int] = []
    fill = PromptPieces.fill

    def counted(self, segments):
        fill(self, segments)
        counts.append(int(self.num_pieces))

    monkeypatch.setattr(PromptPieces, "fill", counted)
    return counts


def test_long_prompts_mixes_and_cached_prefixes(golden_tiny, filled):
    """DoRA, replaced biases and biases of B, alone and mixed with factors of either sign, several to a step."""
    assert CHUNK > PIECE_TOKENS
    engine = make_engine(golden_tiny / "bases" / "biased", max_num_batched_tokens=CHUNK)
    recorder, rng = LogitsRecorder(engine), np.random.default_rng(3)
    oracle = Oracle.from_folder(golden_tiny / "bases" / "biased")
    folders = {name: golden_tiny / "cases" / name for name in CASES}
    deltas = {name: read_deltas(folder, oracle) for name, folder in folders.items()}

    def lora(name: str, scale: float) -> LoRARequest:
        return LoRARequest(name, CASES.index(name) + 1, str(folders[name]), scale=scale)

    def check(rows: dict[int, np.ndarray], prompt: list[int], factors: dict[str, float]) -> None:
        wanted = oracle.logits(prompt, mix((deltas[name], scale) for name, scale in factors.items()))
        for position in [position for position in rows if position < len(prompt)]:
            np.testing.assert_allclose(rows[position], wanted[position], rtol=0, atol=2e-3, err_msg=str(factors))

    jobs: list[tuple[int, dict[str, float]]] = [(180, {name: 1.0}) for name in CASES]
    jobs += [(20, {"bias_all": 1.0}), (21, {"bias_all": 1.0}), (3, {"bias_all": -0.5}), (100, {})]
    jobs += [
        (150, {"dora_biased": 0.5, "bias_all": -1.0, "lora_bias": 1.5}),
        (150, {"dora_biased": -0.5, "lora_bias": 0.0}),
    ]
    prompts = [rng.integers(1, 250, count).tolist() for count, _ in jobs]
    mixes = [[lora(name, scale) for name, scale in factors.items()] for _, factors in jobs]
    run_all(engine, [Request(p, greedy(1), adapters) for p, adapters in zip(prompts, mixes, strict=True)])
    assert max(filled) > 4
    for number, (prompt, (_, factors)) in enumerate(zip(prompts, jobs, strict=True)):
        rows = recorder.take_rows(f"run-{number}")
        assert set(range(len(prompt))) <= rows.keys()
        check(rows, prompt, factors)

    # The rest of a prompt, whose beginning is cached, beside another of the same adapter.
    factors = {"dora_biased": 0.7, "lora_bias": -0.3}
    adapters, first = [lora(*item) for item in factors.items()], rng.integers(1, 250, 100).tolist()
    longer = first + rng.integers(1, 250, 75).tolist()
    run_all(engine, [Request({"prompt_token_ids": first, "cache_salt": "s"}, greedy(1), adapters)])
    recorder.clear()
    again = Request({"prompt_token_ids": longer, "cache_salt": "s"}, greedy(1), adapters)
    found, _ = run_all(engine, [again, Request(prompts[4], greedy(1), adapters)])
    rows = recorder.take_rows("run-0")
    assert found.num_cached_tokens == min(rows) == 96
    check(rows, longer, factors)
    check(recorder.take_rows("run-1"), prompts[4], factors)
