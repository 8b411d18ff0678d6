"""Many adapters in one engine, each answer compared with the base or with weights merged in numpy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from multilora_jax.errors import NotFoundError, UserError
from multilora_jax.memory.geometry import MODULES
from multilora_jax.request import LoRARequest, SamplingParams
from tests.oracle import Oracle, read_deltas
from tests.tiny_engine import LogitsRecorder, Request, greedy, make_adapter, make_engine, run_all, tokens_of

PROMPT = [5, 17, 200, 31, 7, 99, 250]
LONG = [(11 + 37 * i) % 254 + 2 for i in range(40)]


@pytest.fixture(scope="module")
def base_folder(golden_tiny):
    """Two layers, hidden 64, 4 query and 2 kv heads of 16, ffn 96, vocabulary 256."""
    return golden_tiny / "bases" / "untied"


@pytest.fixture(scope="module")
def oracle(base_folder):
    return Oracle.from_folder(base_folder)


@pytest.fixture(scope="module")
def engine(base_folder):
    return make_engine(base_folder)


@pytest.fixture(scope="module")
def all_logits(engine):
    return LogitsRecorder(engine)


@pytest.fixture
def recorder(all_logits):
    all_logits.clear()
    return all_logits


@pytest.fixture(scope="module")
def plain(base_folder):
    """The base without any support for adapters."""
    return make_engine(base_folder, enable_lora=False)


@pytest.fixture
def adapter(engine, tmp_path, request):
    """Writes an adapter under a name of its own for this test; registered ones are removed at the end."""
    names = []

    def make(name, rank, seed, change=None, **options):
        lora = make_adapter(tmp_path / f"{request.node.name}-{name}", engine, rank, seed, **options)
        if change:
            path = tmp_path / lora.name / "adapter_config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | change))
        names.append(lora.name)
        return lora

    yield make
    for name in {a.name for a in engine.list_loras()} & set(names):
        engine.remove_lora(name)
    assert engine.stats().pages_adapter == 0


def check_against_oracle(recorder, oracle, number, request, output):
    tokens = list(output.outputs[0].token_ids)
    deltas = None if request.lora is None else read_deltas(Path(request.lora.path))
    wanted = oracle.logits([*request.prompt, *tokens[:-1]], deltas)
    np.testing.assert_allclose(recorder.take(number), wanted, rtol=0, atol=2e-3)
    oracle.check_greedy(request.prompt, tokens, deltas)


def run_and_check(engine, recorder, oracle, requests):
    outputs = run_all(engine, requests)
    for number, (request, output) in enumerate(zip(requests, outputs, strict=True)):
        check_against_oracle(recorder, oracle, number, request, output)
    return outputs


def with_all(prompts, loras, max_tokens=12):
    return [Request(prompt, greedy(max_tokens, logprobs=3), lora) for prompt in prompts for lora in loras]


@pytest.mark.parametrize("batches", [["AA", "bb"], ["Ab"], ["bABb"], ["bbbb"]])
def test_d08_base_rows_are_exactly_base(engine, recorder, plain, adapter, batches):
    loras = {"A": adapter("A", 8, 1), "B": adapter("B", 16, 2), "b": None}
    plain_recorder = LogitsRecorder(plain)
    (alone,) = run_all(plain, [Request(PROMPT, greedy(16, logprobs=5))])
    alone_logits = plain_recorder.take(0)
    for batch in batches:
        outputs = run_all(engine, [Request(PROMPT, greedy(16, logprobs=5), loras[who]) for who in batch])
        for number, (who, output) in enumerate(zip(batch, outputs, strict=True)):
            logits = recorder.take(number)
            if who == "b":
                assert output.outputs[0].token_ids == alone.outputs[0].token_ids
                np.testing.assert_allclose(logits, alone_logits, rtol=0, atol=2e-5)
                for got, wanted in zip(output.outputs[0].logprobs, alone.outputs[0].logprobs, strict=True):
                    assert got.keys() == wanted.keys()
                    assert all(abs(got[t].logprob - wanted[t].logprob) < 1e-5 for t in got)
            else:
                assert output.outputs[0].token_ids != alone.outputs[0].token_ids


def test_d12_any_rank_alone_or_mixed(engine, recorder, oracle, adapter):
    loras = [None, *(adapter(f"rank{rank}", rank, rank) for rank in (1, 3, 4, 8, 32, 64))]
    mixed = run_and_check(engine, recorder, oracle, with_all([PROMPT, LONG], loras))
    assert len({tuple(t) for t in tokens_of(mixed[: len(loras)])}) == len(loras)
    for request, together in zip(with_all([PROMPT, LONG], loras), mixed, strict=True):
        (alone,) = run_and_check(engine, recorder, oracle, [request])
        assert alone.outputs[0].token_ids == together.outputs[0].token_ids


def test_d05_absent_projections_are_no_delta(engine, recorder, oracle, adapter):
    loras = [
        None,
        adapter("qv", 8, 1, modules=("q_proj", "v_proj")),
        adapter("k", 8, 2, modules=("k_proj",)),
        adapter("gate", 8, 3, modules=("gate_proj",), delta_std=0.3),
        adapter("o1", 8, 4, modules=("o_proj",), layers=[1], delta_std=0.3),
        adapter("mixed", {(0, "k_proj"): 3, (1, "v_proj"): 9, (1, "up_proj"): 1, (1, "down_proj"): 5}, 5),
    ]
    outputs = run_and_check(engine, recorder, oracle, with_all([PROMPT, LONG], loras))
    assert len({tuple(t) for t in tokens_of(outputs[: len(loras)])}) == len(loras)


def test_d01_rank_stabilised_scale(engine, recorder, oracle, adapter):
    options = {"lora_alpha": 16.0, "delta_std": 0.05}
    loras = [
        adapter("plain", 16, 7, **options),
        adapter("rslora", 16, 7, {"use_rslora": True}, **options),
        adapter("float", 16, 7, {"lora_alpha": 12.5}, **options),
    ]
    loras = [LoRARequest(lora.name, 2000 + i, lora.path) for i, lora in enumerate(loras)]
    outputs = run_and_check(engine, recorder, oracle, with_all([PROMPT], loras))
    first = [output.outputs[0].logprobs[0] for output in outputs]
    assert len({max(f.values(), key=lambda x: x.logprob).logprob for f in first}) == 3


def test_d02_rank_and_alpha_patterns(engine, recorder, oracle, adapter):
    ranks = {(layer, module): 8 for layer in (0, 1) for module in MODULES}
    ranks |= {(1, "q_proj"): 4, (0, "v_proj"): 2, (1, "v_proj"): 2}
    patterns = {
        "lora_alpha": 16, "rank_pattern": {"layers.1.self_attn.q_proj": 4, ".*v_proj": 2},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 64},
    }  # fmt: skip
    lora = adapter("patterns", ranks, 8, patterns)
    run_and_check(engine, recorder, oracle, with_all([PROMPT, LONG], [lora, None]))


def test_d03_target_modules_in_any_form(engine, adapter):
    forms = [["q_proj", "v_proj"], "all-linear", r".*\.(q|v)_proj", ["self_attn.q_proj", "self_attn.v_proj"]]
    loras = []
    for i, form in enumerate(forms):
        lora = adapter(f"form{i}", 8, 9, {"target_modules": form}, modules=("q_proj", "v_proj"))
        loras.append(LoRARequest(lora.name, 3000 + i, lora.path))
    texts = tokens_of(run_all(engine, with_all([PROMPT], [*loras, None])))
    assert texts[0] == texts[1] == texts[2] == texts[3] != texts[4]


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_d11_llama3_rope_far_into_a_text(base_folder, tmp_path, key):
    config = json.loads((base_folder / "config.json").read_text())
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    scaled = config | {"rope_scaling": {key: "llama3", **scaling}, "max_position_embeddings": 256}
    shutil.copytree(base_folder, tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps(scaled))
    engine = make_engine(tmp_path / "model")
    recorder = LogitsRecorder(engine)
    prompt = [(7 * i * i + 3) % 254 + 2 for i in range(205)]
    (output,) = run_all(engine, [Request(prompt, greedy(4))])
    tokens = [*prompt, *output.outputs[0].token_ids[:-1]]
    wanted = Oracle.from_folder(tmp_path / "model").logits(tokens)
    np.testing.assert_allclose(recorder.take(0)[200:], wanted[200:], rtol=0, atol=2e-3)
    assert np.abs(Oracle.from_folder(base_folder).logits(tokens)[200] - wanted[200]).max() > 0.5


def test_d15_more_adapters_than_slots(base_folder, engine, adapter):
    loras = [None, *(adapter(f"a{i}", 4 + i, 20 + i) for i in range(6))]
    requests = with_all([PROMPT, LONG, PROMPT[:1], LONG[:16]], loras, max_tokens=8)
    assert len(requests) == 28
    narrow = make_engine(base_folder, max_loras=2)
    widths, execute = [], narrow.runner.execute

    def watched(step, pages_of):
        widths.append(len(step.adapters))
        return execute(step, pages_of)

    narrow.runner.execute = watched
    assert tokens_of(run_all(narrow, requests)) == tokens_of(run_all(engine, requests))
    assert max(widths) == 2


def test_a_huge_adapter_leaves_no_trace_in_other_requests(engine, recorder, adapter):
    """Finite weights whose products overflow fill KV pages with no numbers; the next owner of the pages sees none."""
    bad = adapter("huge", 8, 40, delta_std=5e37)
    (before,) = tokens_of(run_all(engine, [Request(LONG, greedy(8))]))
    run_all(engine, [Request(LONG, greedy(30), bad)] * 2)
    assert not np.isfinite(recorder.take(0)).any()
    # The allocator hands out the pages freed last.
    assert tokens_of(run_all(engine, [Request(LONG, greedy(8))] * 4)) == [before] * 4
    together = run_all(engine, [Request(LONG, greedy(8), bad), Request(LONG, greedy(8))])
    assert tokens_of(together)[1] == before


def test_an_unloaded_adapter_finishes_what_runs(engine, recorder, oracle, adapter):
    lora = adapter("leaving", 8, 50)
    engine.add_request("run-0", PROMPT, greedy(12), lora)
    engine.add_request("run-1", PROMPT, greedy(12))
    engine.step()
    engine.remove_lora(lora.name)
    with pytest.raises(NotFoundError, match="leaving"):
        engine.add_request("late", PROMPT, greedy(12), LoRARequest(lora.name, lora.lora_int_id))
    with pytest.raises(NotFoundError, match="leaving"):
        engine.lora_request(lora.name)
    assert engine.stats().pages_adapter > 0
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    for number, request in enumerate(with_all([PROMPT], [lora, None])):
        check_against_oracle(recorder, oracle, number, request, done[f"run-{number}"])
    assert engine.stats().pages_adapter == 0
    engine.check_integrity()


def test_a_replaced_adapter_finishes_on_its_version(engine, recorder, oracle, adapter, tmp_path):
    lora, other = adapter("versions", 8, 51), adapter("versions2", 4, 52)
    engine.add_request("run-0", PROMPT, greedy(12), lora)
    engine.step()
    old = engine.list_loras()[-1].digest
    new = LoRARequest(lora.name, lora.lora_int_id, other.path, load_inplace=True)
    engine.add_lora(new)
    engine.add_request("run-1", PROMPT, greedy(12), LoRARequest(lora.name, lora.lora_int_id))
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    check_against_oracle(recorder, oracle, 0, Request(PROMPT, greedy(12), lora), done["run-0"])
    check_against_oracle(recorder, oracle, 1, Request(PROMPT, greedy(12), other), done["run-1"])
    assert done["run-0"].adapter_digest == old != done["run-1"].adapter_digest
    assert [a.digest for a in engine.list_loras()] == [done["run-1"].adapter_digest]


def test_d13_load_use_unload_leaves_nothing(engine, adapter):
    start = engine.stats()
    for i in range(20):
        lora = adapter(f"cycle{i}", 1 + 3 * i, 60 + i)
        run_all(engine, [Request(PROMPT, greedy(2), lora)])
        assert engine.stats().pages_adapter == engine.list_loras()[-1].num_pages
        engine.remove_lora(lora.name)
        now = engine.stats()
        assert (now.pages_free, now.resident) == (start.pages_free, start.resident)
        assert not engine.runner.rows.rank_rows._blocks


def test_abort_frees_at_once(engine, adapter):
    lora = adapter("aborted", 8, 90)
    free = engine.stats().pages_free + engine.stats().pages_cached
    engine.add_request("run", LONG, greedy(20), lora)
    engine.add_request("wait", LONG, greedy(20), lora)
    engine.step()
    assert engine.stats().running_by_adapter == {lora.name: 1}
    assert engine.stats().waiting_by_adapter == {lora.name: 1}
    assert [engine.abort_request(name) for name in ("run", "wait", "run")] == [True, True, False]
    engine.remove_lora(lora.name)
    assert engine.stats().pages_free + engine.stats().pages_cached == free
    assert not engine.has_unfinished_requests()
    assert engine.step() == []
    engine.check_integrity()


def test_bad_requests_change_nothing(engine, adapter):
    lora = adapter("known", 8, 91)
    engine.add_lora(lora)
    engine.add_request("run-0", PROMPT, greedy(2), lora)
    before = engine.stats()
    for reason, args in {
        "duplicate_request_id": ("run-0", PROMPT, greedy(2)),
        "unknown_adapter": ("x", PROMPT, greedy(2), LoRARequest("nobody", 7)),
        "adapter_exists": ("x", PROMPT, greedy(2), LoRARequest(lora.name, 7, lora.path)),
        "empty_prompt": ("x", [], greedy(2)),
        "context_length_exceeded": ("x", [5] * 256, greedy(2)),
        "bad_token_id": ("x", [256], greedy(2)),
        "no_tokenizer": ("x", "text", greedy(2)),
    }.items():
        with pytest.raises(UserError) as error:
            engine.add_request(*args)
        assert error.value.reason == reason
    assert engine.stats() == before
    while engine.has_unfinished_requests():
        engine.step()


def test_adapters_can_be_switched_off(plain, adapter):
    lora = adapter("off", 8, 92)
    for call in (lambda: plain.add_lora(lora), lambda: plain.add_request("x", PROMPT, greedy(2), lora)):
        with pytest.raises(UserError) as error:
            call()
        assert error.value.reason == "lora_disabled"


def test_priority_goes_first(engine):
    order = []
    for i, priority in enumerate([0] * 17 + [-1]):
        engine.add_request(str(i), PROMPT, greedy(1), priority=priority)
    while engine.has_unfinished_requests():
        order += [int(output.request_id) for output in engine.step()]
    assert order == [17, *range(17)]


def test_context_end_finishes_a_request(engine):
    (output,) = run_all(engine, [Request([5] * 250, greedy(None))])
    assert len(output.outputs[0].token_ids) == 6
    assert output.outputs[0].finish_reason == "length"


def test_stats_and_banner(base_folder, golden_tiny):
    engine = make_engine(base_folder, lora_modules={"mlp": str(golden_tiny / "cases" / "mlp_only")})
    run_all(engine, [Request(PROMPT, SamplingParams(temperature=0, max_tokens=5), engine.lora_request("mlp"))])
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens, stats.steps) == (7, 5, 5)
    assert (stats.adapter_misses, stats.adapter_hits, stats.adapter_loads) == (1, 0, 1)
    pages = engine.list_loras()[0].num_pages
    assert stats.adapter_load_bytes == pages * engine.geometry.page_bytes
    assert (stats.pages_adapter, stats.pages_kv, stats.pages_free) == (pages, 0, 511 - pages)
    assert stats.resident == [("mlp", 4, False)]
    banner = engine.describe()
    for words in ("untied", "2 layers", "float32", "8176 tokens", f"or {511 // pages} adapters", "rank 4"):
        assert words in banner


def test_weights_that_are_no_numbers_are_refused(engine, adapter):
    lora = adapter("nan", 8, 93)
    path = lora.path + "/adapter_model.safetensors"
    tensors = load_file(path)
    next(iter(tensors.values()))[0, 0] = np.nan
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(UserError, match="NaN"):
        engine.add_request("x", PROMPT, greedy(2), lora)
    assert lora.name not in {a.name for a in engine.list_loras()}
