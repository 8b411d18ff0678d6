"""Command-line flags: every configuration key, in each way of writing it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags as absl_flags

from multilora_jax import flags
from multilora_jax.config import EngineConfig, describe_keys
from multilora_jax.errors import ConfigError, UserError


def parsed(*words: str) -> EngineConfig:
    values = absl_flags.FlagValues()
    flags.define_flags(values)
    assert values(flags.normalise_argv(["prog", *words])) == ["prog"]
    return flags.config_from_flags(values)


def test_every_key_is_a_flag_with_its_default():
    values = absl_flags.FlagValues()
    flags.define_flags(values)
    values(["prog"])
    config = EngineConfig(model="m")
    for f in dataclasses.fields(EngineConfig):
        default = None if f.name == "model" else getattr(config, f.name)
        assert values[f.name].value == (None if default in ((), {}) else default)
    assert parsed("--model", "/m") == EngineConfig(model="/m")


def test_flags_override_the_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: /m\nport: 1\nmax_num_seqs: 4\nwarm_up: false\n")
    config = parsed("--config", str(path), "--port", "8123", "--dtype", "float32", "--pool_memory_gib=1")
    assert (config.port, config.dtype, config.max_num_seqs, config.warm_up) == (8123, "float32", 4, False)
    assert config.pool_memory_gib == 1.0


@pytest.mark.parametrize("word", ["--max-num-seqs", "--max_num_seqs"])
def test_dashes_and_underscores(word):
    assert parsed("--model", "/my-m", word, "7").max_num_seqs == 7
    assert parsed("--model=/my-m", f"{word}=7").model == "/my-m"


@pytest.mark.parametrize(
    ("words", "on"),
    [
        (["--warm_up"], True), (["--nowarm_up"], False), (["--no-warm-up"], False), (["--no_warm_up"], False),
        (["--warm-up", "false"], False), (["--warm_up=false"], False), (["--warm_up", "True"], True),
        (["--warm-up", "--port", "1"], True),
    ],
)  # fmt: skip
def test_booleans(words, on):
    assert parsed("--model", "/m", *words).warm_up is on


@pytest.mark.parametrize(
    "words",
    [
        ["--lora_modules", "a=/x,b=/y"],
        ["--lora-modules", "a=/x", "b=/y"],
        ["--lora-modules=a=/x", "--lora-modules=b=/y"],
        ["--lora_modules", "a=/x, b=/y", "--port", "1"],
    ],
)
def test_mappings(words):
    assert parsed("--model", "/m", *words).lora_modules == {"a": "/x", "b": "/y"}


def test_lists_and_quoted_commas():
    assert parsed("--model", "/m", "--api-keys", "k1, k2").api_keys == ("k1", "k2")
    assert parsed("--model", "/m", "--api-keys", '"k,1"', "k2").api_keys == ("k,1", "k2")


def test_words_after_two_dashes_stay():
    assert flags.normalise_argv(["p", "--a-b", "--", "--c-d"]) == ["p", "--a_b", "--", "--c-d"]


def test_nothing_given():
    with pytest.raises(ConfigError, match="--config FILE or --model MODEL"):
        parsed()


def test_bad_value_names_the_command_line():
    with pytest.raises(ConfigError, match="^command line: port must be at most 65535"):
        parsed("--model", "/m", "--port", "70000")


@pytest.mark.parametrize(
    ("words", "commands", "match"),
    [
        (["x"], (), "unexpected argument 'x'"),
        (["serve", "x"], ("serve",), "unexpected argument 'x'"),
        ([], ("serve", "bench"), "one of serve, bench"),
        (["serv"], ("serve",), "did you mean serve"),
    ],
)
def test_words_that_are_no_flags(words, commands, match):
    with pytest.raises(UserError, match=match):
        flags._check_words(words, commands)


def test_run_prints_errors_without_a_traceback_and_help_lists_the_keys(tmp_path):
    program = tmp_path / "prog.py"
    program.write_text(
        "from multilora_jax import flags\n"
        "flags.define_flags()\n"
        "def main(words):\n"
        "    print(words, flags.config_from_flags().port)\n"
        "    return 3\n"
        "flags.run(main, commands=('throughput',))\n"
    )

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
        return subprocess.run([sys.executable, str(program), *words], capture_output=True, text=True, env=env)

    good = call("throughput", "--model", "/m", "--port", "77")
    assert (good.stdout, good.returncode) == ("['throughput'] 77\n", 3), good.stderr
    bad = call("throughput", "--model", "/m", "--pool-pages", "1")
    assert (bad.stderr, bad.returncode) == ("error: command line: pool_pages must be at least 2, got 1\n", 1)
    for words, message in {
        ("--dtype", "fp16"): "dtype must be one of auto, float32, bfloat16, float16, got 'fp16': did you mean float16?",
        ("--max-num-seqs", "abc"): "max_num_seqs must be an integer, got 'abc'",
        ("--pool-memory-gib", "much"): "pool_memory_gib must be a number, got 'much'",
        ("--warm-up=maybe",): "warm_up must be true or false, got 'maybe'",
        ("--max-num-sqs", "1"): "unknown flag --max_num_sqs: did you mean --max_num_seqs?",
        ("--zzzzzz", "1"): "unknown flag --zzzzzz",
        ("--port",): "port needs a value: --port VALUE",
    }.items():
        bad = call("throughput", "--model", "/m", *words)
        assert (bad.stderr, bad.returncode) == (f"error: command line: {message} (see --help)\n", 1)
    shown = call("--help").stdout
    assert shown.startswith("usage: python prog.py throughput [--config FILE] [--key value ...]\n")
    assert str(tmp_path) not in shown
    assert "e+" not in shown
    assert "  --port INT\n" in shown
    assert "  --dtype auto|float32|bfloat16|float16\n" in shown
    assert "[default: 8000]" in shown
    assert "[default: true]" in shown
    assert "[no default]" in shown
    for key, doc in describe_keys().items():
        assert key in shown
        assert doc.split()[0] in shown
