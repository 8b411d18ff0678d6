"""LLM: what goes in, what comes out, when it stops."""

from __future__ import annotations

import json
import shutil
from typing import Any

import numpy as np
import pytest

from multilora_jax.errors import NotFoundError, UserError
from multilora_jax.llm import LLM
from multilora_jax.request import LoRARequest, SamplingParams
from tests.tiny_engine import SIZES, TINY_MODEL, LogitsRecorder, greedy, make_adapter, make_llm, tokens_of


@pytest.fixture(scope="module")
def llm():
    return make_llm(TINY_MODEL)


@pytest.fixture(scope="module")
def loras(llm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    return [make_adapter(folder / name, llm.engine, 4, seed) for seed, name in enumerate(("first", "second"))]


@pytest.fixture(autouse=True)
def nothing_queued(request):
    yield
    llm = request.node.funcargs.get("llm")
    if llm is not None:
        assert not llm.engine.has_unfinished_requests()
        assert llm.engine.stats().pages_kv == 0
        llm.engine.check_integrity()


def generate(llm: LLM, *args: Any, **kwargs: Any) -> list[Any]:
    return llm.generate(*args, use_tqdm=False, **kwargs)


def texts_of(outputs):
    return [output.outputs[0].text for output in outputs]


def refused(call, *args, **kwargs) -> UserError:
    with pytest.raises(UserError) as error:
        call(*args, **kwargs)
    return error.value


# Prompts and lists


def test_prompts_in_every_form(llm):
    ids = list(b"Hello")
    forms = ["Hello", ids, tuple(ids), {"prompt": "Hello"}, {"prompt_token_ids": ids}]
    alone = [generate(llm, form, greedy(6))[0] for form in forms]
    together = generate(llm, forms, greedy(6))
    assert len({tuple(tokens) for tokens in tokens_of([*alone, *together])}) == 1
    assert [output.prompt for output in together] == ["Hello", None, None, "Hello", None]
    assert all(output.prompt_token_ids == ids for output in together)
    both = {"prompt": "shown", "prompt_token_ids": ids}
    (output,) = generate(llm, both, greedy(6))
    assert (output.prompt, output.prompt_token_ids) == ("shown", ids)
    assert generate(llm, [], greedy(6)) == []


def test_order_and_own_parameters_and_adapters(llm, loras):
    prompts = [f"Text {i} " * (1 + i % 5) for i in range(40)]
    params = [greedy(1 + (7 * i) % 11) for i in range(40)]
    chosen = [(None, *loras)[i % 3] for i in range(40)]
    outputs = generate(llm, prompts, params, lora_request=chosen)
    assert [output.prompt for output in outputs] == prompts
    assert [len(tokens) for tokens in tokens_of(outputs)] == [p.max_tokens for p in params]
    for output, lora in zip(outputs, chosen, strict=True):
        assert output.finished
        assert output.lora_request == output.outputs[0].lora_request == lora
        digests = {adapter.name: adapter.digest for adapter in llm.engine.list_loras()}
        assert output.adapter_digest == (digests[lora.name] if lora else None)
    for i in (0, 1, 2, 20):
        alone = generate(llm, prompts[i], params[i], lora_request=chosen[i])
        assert tokens_of(alone) == tokens_of(outputs)[i : i + 1]


def test_one_adapter_for_all(llm, loras):
    base = tokens_of(generate(llm, ["a", "b"], greedy(6)))
    first, second = (tokens_of(generate(llm, ["a", "b"], greedy(6), lora_request=lora)) for lora in loras)
    assert len({str(x) for x in (base, first, second)}) == 3
    mixed = tokens_of(generate(llm, ["a", "b", "a", "b"], greedy(6), lora_request=[None, loras[0], loras[1], None]))
    assert mixed == [base[0], first[1], second[0], base[1]]


@pytest.mark.parametrize("name", ["sampling_params", "lora_request", "priority"])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_lists_of_another_length_are_refused(llm, loras, name, count):
    values = {"sampling_params": greedy(2), "lora_request": loras[0], "priority": 1}
    error = refused(generate, llm, ["a", "b"], **{name: [values[name]] * count})
    assert (error.reason, error.param) == ("length_mismatch", name)
    assert "[[a, b]]" not in error.message  # nobody can have meant one mix for all
    error = refused(generate, llm, ["a"], **{name: [values[name]] * (2 * count)})
    assert ("write [[a, b]]" in error.message) == (name == "lora_request")


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("", "empty_prompt"), ([], "empty_prompt"), ({"prompt": ""}, "empty_prompt"), ([5, 260], "bad_token_id"),
        ([-1], "bad_token_id"), (7, "bad_prompt"), ({}, "bad_prompt"), ([7] * 256, "context_length_exceeded"),
        ("x" * 300, "context_length_exceeded"), (None, "bad_prompt"), ([1.5], "bad_token_id"),
    ],
)  # fmt: skip
def test_a_bad_prompt_in_a_list_leaves_nothing_queued(llm, bad, reason):
    steps = llm.engine.stats().steps
    assert refused(generate, llm, ["good", bad, "good"], greedy(4)).reason == reason
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.stats().steps == steps


def test_d18_an_unknown_adapter_is_never_the_base(llm, loras):
    generate(llm, "a", greedy(1), lora_request=loras[0])
    with pytest.raises(NotFoundError, match="Did you mean 'first'"):
        generate(llm, ["a", "b"], greedy(2), lora_request=[None, LoRARequest("firts", 99)])


def test_d21_context_limits(llm):
    for length, room in ((254, 2), (255, 1)):
        (output,) = generate(llm, [[7] * length], greedy(50))
        assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (room, "length")
    error = refused(generate, llm, [[7] * 256], greedy(1))
    assert "256 tokens" in error.message
    assert "context holds 256" in error.message
    assert refused(SamplingParams, max_tokens=0).param == "max_tokens"


def test_a_failure_on_the_way_leaves_nothing_queued(llm, monkeypatch):
    def fail():
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", fail)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, ["a", "b"], greedy(4))
    assert not llm.engine.has_unfinished_requests()


def test_a_folder_without_a_tokenizer_takes_token_ids(golden_tiny):
    llm = make_llm(golden_tiny / "bases" / "untied", load_format="auto")
    assert llm.get_tokenizer() is None
    (output,) = generate(llm, [[5, 17, 200]], SamplingParams(temperature=0, max_tokens=4, logprobs=2))
    completion = output.outputs[0]
    assert (len(completion.token_ids), completion.text) == (4, "")
    assert all(entry.decoded_token is None for entry in completion.logprobs[0].values())
    assert refused(generate, llm, "text").reason == "no_tokenizer"
    assert refused(generate, llm, [[5]], SamplingParams(stop="x")).reason == "no_tokenizer"
    assert refused(llm.chat, [{"role": "user", "content": "Hi"}]).reason == "no_tokenizer"
    assert not llm.engine.has_unfinished_requests()


def test_progress_bar(llm, capsys):
    llm.generate(["a", "b"], greedy(2))
    assert "Processed prompts: 100%" in capsys.readouterr().err
    generate(llm, ["a", "b"], greedy(2))
    assert capsys.readouterr().err == ""


def test_default_parameters_and_metrics(llm):
    (output,) = llm.generate("Hello", use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= 16
    m = output.metrics
    assert m.arrival_time <= m.first_scheduled_time <= m.first_token_time <= m.finished_time
    assert output.outputs[0].logprobs is None is output.prompt_logprobs is output.outputs[0].cumulative_logprob


# Where a text ends


def test_finish_reasons(llm):
    (full,) = generate(llm, "Hello", greedy(12))
    tokens = list(full.outputs[0].token_ids)
    assert (full.outputs[0].finish_reason, full.outputs[0].stop_reason) == ("length", None)
    place = 4
    stop = tokens[place]
    first = tokens.index(stop)
    (output,) = generate(llm, "Hello", greedy(12, stop_token_ids=[stop, 3]))
    completion = output.outputs[0]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert list(completion.token_ids) == tokens[: first + 1]
    assert completion.text == llm.get_tokenizer().decode(tokens[:first])
    (output,) = generate(llm, "Hello", greedy(12, stop_token_ids=[stop], include_stop_str_in_output=True))
    assert output.outputs[0].text == llm.get_tokenizer().decode(tokens[: first + 1])


def test_eos_and_ignore_eos(llm, tmp_path):
    (full,) = generate(llm, "Hello", greedy(12))
    tokens = list(full.outputs[0].token_ids)
    shutil.copytree(TINY_MODEL, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [tokens[5], 259]}))
    ending = make_llm(tmp_path / "model")
    params = SamplingParams(temperature=0, max_tokens=12)
    completion = generate(ending, "Hello", params)[0].outputs[0]
    first = tokens.index(tokens[5])
    assert list(completion.token_ids) == tokens[: first + 1]
    assert completion.text == llm.get_tokenizer().decode(tokens[:first])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert tokens_of(generate(ending, "Hello", greedy(12))) == [tokens]


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings(llm, include):
    # A letter as its own adapter would write it: every prompt's answer holds some printable character.
    (full,) = generate(llm, "Hello", greedy(40))
    text = full.outputs[0].text
    stop = next(text[i : i + 2] for i in range(4, len(text)) if text[i : i + 2].isascii() and len(text[i : i + 2]) == 2)
    wanted = text[: text.index(stop) + (len(stop) if include else 0)]
    params = greedy(40, stop=["never there", stop], include_stop_str_in_output=include)
    completion = generate(llm, "Hello", params)[0].outputs[0]
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (wanted, "stop", stop)
    assert list(completion.token_ids) == list(full.outputs[0].token_ids)[: len(completion.token_ids)]
    assert len(completion.token_ids) < 40


def test_max_tokens_none_runs_to_the_end_of_the_context(llm):
    (output,) = generate(llm, [[7] * 200], greedy(None))
    assert len(output.outputs[0].token_ids) == 56
    assert output.outputs[0].finish_reason == "length"


def test_without_detokenising(llm):
    (output,) = generate(llm, "Hello", greedy(6, detokenize=False))
    assert output.outputs[0].text == ""
    assert tokens_of([output]) == tokens_of(generate(llm, "Hello", greedy(6)))


# Sampling


def test_a_seed_gives_the_same_text_in_any_batch(llm, loras):
    def params(seed):
        return SamplingParams(temperature=1.0, top_k=100, top_p=0.95, seed=seed, max_tokens=16, ignore_eos=True)

    (alone,) = tokens_of(generate(llm, "Hello", params(11)))
    prompts = ["x", "Hello", "y" * 50, "Hello", "Hello", "Hello"]
    batch = tokens_of(generate(llm, prompts, [*map(params, range(3)), params(11), params(12), params(11)]))
    assert batch[3] == batch[5] == alone
    assert batch[4] != alone
    with_adapters = generate(llm, ["x" * 30, "Hello", "Hello"], [greedy(4), params(11), params(11)],
                             lora_request=[loras[0], None, loras[1]])  # fmt: skip
    assert tokens_of(with_adapters)[1] == alone
    assert tokens_of(with_adapters)[2] != alone


def test_without_a_seed_texts_differ_but_the_engine_s_seed_repeats_them():
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    runs = [tokens_of(generate(make_llm(TINY_MODEL, seed=seed), ["Hello"] * 3, params)) for seed in (0, 0)]
    assert runs[0] == runs[1]
    assert len({tuple(tokens) for tokens in runs[0]}) == 3


# Log-probabilities


def log_softmax(logits):
    x = logits.astype(np.float64)
    x -= x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def check_entry(llm, entry, logprob_V, token, count):
    order = np.argsort(-logprob_V, kind="stable")
    assert set(entry) == {token, *order[:count].tolist()}
    assert next(iter(entry)) == token
    for other, value in entry.items():
        assert value.logprob == pytest.approx(logprob_V[other], abs=1e-4)
        assert value.rank == int(np.flatnonzero(order == other)[0]) + 1
        assert value.decoded_token == llm.get_tokenizer().token_text(other)


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_logprobs_are_those_of_the_model(llm, loras, count):
    """Prompts of one chunk and of several, beside requests that ask for none."""
    recorder = LogitsRecorder(llm.engine)
    prompts = ["Hello", "A longer text, of several chunks: " * 3]
    params = SamplingParams(
        temperature=1.5, seed=4, max_tokens=5, ignore_eos=True, logprobs=count, prompt_logprobs=count
    )
    outputs = generate(
        llm, [*prompts, *prompts, "none"], [*[params] * 4, greedy(5)],
        lora_request=[None, None, loras[0], loras[0], None],
    )  # fmt: skip
    for output in outputs[:4]:
        ids, completion = output.prompt_token_ids, output.outputs[0]
        wanted = log_softmax(recorder.take_by_id(output.request_id))
        assert output.prompt_logprobs[0] is None
        assert (len(output.prompt_logprobs), len(completion.logprobs)) == (len(ids), 5)
        for position in range(1, len(ids)):
            check_entry(llm, output.prompt_logprobs[position], wanted[position - 1], ids[position], count)
        for i, token in enumerate(completion.token_ids):
            check_entry(llm, completion.logprobs[i], wanted[len(ids) - 1 + i], token, count)
        drawn = zip(completion.logprobs, completion.token_ids, strict=True)
        assert completion.cumulative_logprob == pytest.approx(sum(entry[token].logprob for entry, token in drawn))
    assert outputs[4].outputs[0].logprobs is None is outputs[4].prompt_logprobs


# Options


def test_warm_up_happens_at_the_start_unless_told_otherwise(monkeypatch):
    warmed = []
    monkeypatch.setattr("multilora_jax.engine.llm_engine.LLMEngine.warm_up", lambda self: warmed.append(self))
    llm = LLM(TINY_MODEL, progress=False, load_format="dummy", **{**SIZES, "warm_up": True})
    assert warmed == [llm.engine]
    make_llm(TINY_MODEL)
    assert len(warmed) == 1


def test_unknown_options_are_named():
    error = refused(LLM, TINY_MODEL, max_num_seq=3)
    assert "max_num_seqs" in error.message


def test_several_continuations_and_salts(llm):
    prompt = [7] * 40
    params = SamplingParams(n=2, seed=3, max_tokens=4, ignore_eos=True)
    for expected in (0, 32):
        outputs = llm.generate([prompt, prompt], params, cache_salt=["x", "y"], use_tqdm=False)
        assert [output.num_cached_tokens for output in outputs] == [expected] * 2
        assert [[c.index for c in output.outputs] for output in outputs] == [[0, 1]] * 2
    first, second = (llm.generate(prompt, SamplingParams(seed=3 + i, max_tokens=4, ignore_eos=True)) for i in range(2))
    assert [c.token_ids for c in outputs[0].outputs] == [first[0].outputs[0].token_ids, second[0].outputs[0].token_ids]
    with pytest.raises(UserError, match="cache_salt has length 1, but there are 2 prompts"):
        llm.generate([prompt, prompt], params, cache_salt=["x"])
