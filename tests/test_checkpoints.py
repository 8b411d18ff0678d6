"""Models and adapters as Orbax checkpoints: the same bits back, and nothing served of what is not whole."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from multilora_jax import checkpoints
from multilora_jax.errors import ConfigError, NotFoundError, UserError
from multilora_jax.models.checkpoint import open_checkpoint
from multilora_jax.models.checkpoint.orbax import OrbaxCheckpoint
from multilora_jax.models.layers import LlamaSpec
from multilora_jax.models.loader import load_llama
from multilora_jax.orbax_writer import FolderWriter
from multilora_jax.request import LoRARequest
from multilora_jax.stored_tensors import MANIFEST_FILE, UNFINISHED_FILE
from tests.checkpoints_worker import CONFIG, Numbered
from tests.converted import bits, edit, tied_adapter
from tests.tiny_engine import Request, greedy, make_engine, run_all, tokens_of

ROOT = Path(__file__).parent.parent
UP = "model.layers.1.mlp.up_proj.weight"
BASES = ("untied", "biased", "bf16file", "sharded")


@pytest.fixture(scope="module")
def converted(golden_tiny, tmp_path_factory):
    """The tied tiny base, converted in several groups."""
    out = tmp_path_factory.mktemp("converted") / "tied"
    checkpoints.save(golden_tiny / "bases" / "tied", out, group_bytes=100_000)
    return out


@pytest.fixture
def copy(converted, tmp_path):
    return shutil.copytree(converted, tmp_path / "copy")


def refusal(folder) -> str:
    with pytest.raises(ConfigError) as caught:
        open_checkpoint(folder)
    assert (caught.value.reason, caught.value.param) == ("bad_checkpoint", "model")
    return caught.value.message


@pytest.mark.parametrize("base", BASES)
def test_every_bit_comes_back(golden_tiny, tmp_path, base):
    source = golden_tiny / "bases" / base
    checkpoints.save(source, tmp_path / base)
    original, stored = open_checkpoint(source), open_checkpoint(tmp_path / base)
    assert stored.config == original.config
    for name in original.names():
        tensor, again = original.tensor(name), stored.tensor(name)
        assert tensor.dtype == again.dtype
        np.testing.assert_array_equal(tensor.view(np.uint8), again.view(np.uint8))
    assert bits(tmp_path / base, dtype="float32") == bits(source, dtype="float32")


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_restoring_converts_as_loading_does(golden_tiny, converted, tmp_path, kind):
    source = golden_tiny / "bases" / "tied"
    assert bits(converted, dtype=kind) == bits(source, dtype=kind)
    checkpoints.save(source, tmp_path / kind, dtype=kind)
    assert bits(tmp_path / kind, dtype=kind) == bits(source, dtype=kind)


def test_rows_that_pad_a_vocabulary_are_zeros(tmp_path):
    class Odd(Numbered):
        config = replace(CONFIG, vocab_size=301, hidden_size=64, num_heads=1, num_kv_heads=1, head_dim=64, ffn_size=64)

    checkpoints.save(Odd(), tmp_path / "odd")
    for dtype in ("float32", "bfloat16"):
        one, other = (checkpoints.restore(m, dtype=dtype).params()["top"]["embed"] for m in (Odd(), tmp_path / "odd"))
        assert len(other) > 301
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
        assert not np.asarray(other[301:]).any()


def test_eight_bits_are_those_that_the_engine_rounds_to(golden_tiny, converted, tmp_path):
    source = golden_tiny / "bases" / "biased"
    checkpoints.save(source, tmp_path / "int8", quantization="int8", group_bytes=50_000)
    expected = bits(source, dtype="float32", quantization="int8")
    assert bits(tmp_path / "int8", dtype="float32") == expected  # without being asked for
    checkpoints.save(source, tmp_path / "float")
    assert bits(tmp_path / "float", dtype="float32", quantization="int8") == expected
    engine = make_engine(tmp_path / "int8")
    assert engine.runner.spec.quantization == "int8"
    assert "weights in int8" in engine.describe()


def test_a_converted_folder_is_served_as_the_original(configs, golden_tiny, tmp_path):
    """With tokenizer, chat template and generation config; an adapter in Orbax's format beside it."""
    source = shutil.copytree(golden_tiny / "bases" / "tied", tmp_path / "source")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(configs / "tiny_model" / name, source)
    (source / "generation_config.json").write_text('{"eos_token_id": [7]}')
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "short.jinja").write_text("{{ messages[0].content }}")
    checkpoints.save(source, tmp_path / "served")
    adapter = tied_adapter(golden_tiny)
    checkpoints.save_adapter(adapter, tmp_path / "adapter")
    found = []
    for model, path in ((source, adapter), (tmp_path / "served", tmp_path / "adapter")):
        engine = make_engine(model)
        assert 7 in engine.model_config.eos_token_ids
        lora = LoRARequest("mine", 1, str(path))
        digest = engine.add_lora(lora).digest
        messages = [{"role": "user", "content": "hello"}]
        assert engine.tokenizer is not None
        text = engine.tokenizer.apply_chat_template(messages)
        assert engine.tokenizer.apply_chat_template(messages, chat_template="short") == "hello"
        outputs = run_all(engine, [Request([5, 6, 7], greedy(8), lora), Request([5, 6, 7], greedy(8))])
        found.append((digest, text, tokens_of(outputs)))
    assert found[0] == found[1]


def test_another_orbax_program_can_read_it(converted, golden_tiny):
    original = open_checkpoint(golden_tiny / "bases" / "tied")
    seen = {}
    with ocp.PyTreeCheckpointer() as checkpointer:
        for group in sorted((converted / "weights").iterdir()):
            seen |= checkpointer.restore(group)
    assert len(list((converted / "weights").iterdir())) > 2
    assert sorted(seen) == sorted(original.names())
    for name, tensor in seen.items():
        np.testing.assert_array_equal(np.asarray(tensor), original.tensor(name))


def test_a_missing_or_changed_file_is_named(copy):
    victim = next(path for path in sorted((copy / "weights").rglob("*")) if path.name == "0.0")
    data, name = victim.read_bytes(), victim.relative_to(copy).as_posix()
    victim.write_bytes(data[:-1])
    assert f"{name} has {len(data) - 1} bytes instead of {len(data)}" in refusal(copy)
    victim.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "git lfs pull" in refusal(copy)
    victim.unlink()
    assert f"{name} is missing" in refusal(copy)
    (copy / "config.json").unlink()
    victim.write_bytes(data)
    assert "config.json: this file is missing" in refusal(copy)


def test_an_interrupted_conversion_is_never_taken_for_a_whole_one(golden_tiny, tmp_path):
    source, out = golden_tiny / "bases" / "tied", tmp_path / "out"
    code = (
        "import os, sys; from multilora_jax import checkpoints, orbax_writer\n"
        "add = orbax_writer.FolderWriter.add\n"
        "def once(self, *given):\n"
        "    if self._num_groups: os._exit(9)\n"
        "    add(self, *given)\n"
        "orbax_writer.FolderWriter.add = once\n"
        "checkpoints.save(sys.argv[1], sys.argv[2], group_bytes=100_000)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(source), str(out)], cwd=ROOT, capture_output=True)
    assert done.returncode == 9, done.stderr
    partial = tmp_path / "out.partial"
    assert not out.exists()
    assert (partial / UNFINISHED_FILE).exists()
    assert "an interrupted conversion, never finished" in refusal(partial)
    with pytest.raises(NotFoundError):
        open_checkpoint(out)
    checkpoints.save(source, out)  # replaces what was left
    assert not partial.exists()
    assert bits(out, dtype="float32") == bits(source, dtype="float32")


def test_a_failure_leaves_nothing(golden_tiny, tmp_path):
    of_files: Any = type(open_checkpoint(golden_tiny / "bases" / "tied"))

    class Broken(of_files):
        def tensor(self, name):
            if "layers.1" in name:
                raise ConfigError("broken")
            return super().tensor(name)

    with pytest.raises(ConfigError, match="broken"):
        checkpoints.save(Broken(golden_tiny / "bases" / "tied"), tmp_path / "out", group_bytes=50_000)
    assert list(tmp_path.iterdir()) == []


def test_tensors_of_other_shapes_or_types_are_refused(copy, golden_tiny, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"
    edit(copy, lambda m: m["tensors"][name].update(dtype="bfloat16"))
    assert f"tensor {name} in weights/" in refusal(copy)
    assert f"is float32[96, 64] and {MANIFEST_FILE} says bfloat16[96, 64]" in refusal(copy)
    edit(copy, lambda m: m["tensors"][name].update(dtype="float32", shape=[64, 96]))
    assert "says float32[64, 96]" in refusal(copy)
    edit(copy, lambda m: m["tensors"].pop(name))
    assert f"missing {name} [96, 64]" in refusal(copy)
    # The manifest of one model with the configuration of another.
    checkpoints.save(golden_tiny / "bases" / "tied", tmp_path / "wide")
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    (tmp_path / "wide" / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    assert "has shape [96, 64], the configuration asks for [128, 64]" in refusal(tmp_path / "wide")


def unlist(manifest: dict[str, Any], part: str) -> None:
    """Takes a file out of a manifest, and a larger tensor, so that the files still have bytes enough."""
    del manifest["files"][f"weights/{manifest['tensors'][UP]['group']}/{UP}/{part}"]
    del manifest["tensors"]["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(format=2), "has format 2, and this version reads 1"),
        (lambda m: m.update(kind="adapter"), "holds an adapter, not a model"),
        (lambda m: m.update(ocdbt=True), "lie together in OCDBT files, as earlier versions wrote them"),
        (lambda m: m.pop("ocdbt"), "convert the original again"),
        (lambda m: m.update(quantization="int3"), "its weights are in 'int3'"),
        (lambda m: m.update(quantization="int8"), "is float32 and should be of int8"),
        (lambda m: m.update(files={}), "lists no files"),
        (lambda m: m["files"].update({"weights/../../x": 1}), "which is no file of weights"),
        (lambda m: unlist(m, "0.0"), "does not list its part 0.0"),
        (lambda m: unlist(m, ".zarray"), "does not list its .zarray"),
        (lambda m: m["files"].update({"weights/0000": 4096}), "is not a regular file"),
        (lambda m: m["tensors"].update({"a/b": m["tensors"]["model.norm.weight"]}), "is malformed"),
        (lambda m: m["tensors"]["model.norm.weight"].update(group="../.."), "is malformed"),
        (lambda m: m["tensors"]["model.norm.weight"].update(shape=[2**40]), "more than the files have"),
        (lambda m: m["tensors"]["model.norm.weight"].update(group="0001"), "cannot be opened"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(copy, change, words):
    edit(copy, change)
    assert words in refusal(copy)


def test_a_damaged_manifest_is_refused(copy):
    (copy / MANIFEST_FILE).write_text("{")
    assert "is damaged" in refusal(copy)


def test_orbax_trees_of_others_are_refused_by_name(tmp_path):
    with ocp.PyTreeCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run" / "params", {"w": np.ones(3, np.float32)})
    for folder in (tmp_path / "run", tmp_path / "run" / "params"):
        with pytest.raises(ConfigError, match="an Orbax checkpoint that multilora_jax did not write"):
            open_checkpoint(folder)


def test_what_cannot_be_converted_is_refused(golden_tiny, converted, tmp_path):
    source = golden_tiny / "bases" / "tied"
    with pytest.raises(UserError, match="exists: give another folder"):
        checkpoints.save(source, converted)
    with pytest.raises(ConfigError, match="dtype must be auto"):
        checkpoints.save(source, tmp_path / "x", dtype="float8")
    with pytest.raises(ConfigError, match="quantize must be int8"):
        checkpoints.save(source, tmp_path / "x", quantization="int4")
    checkpoints.save(source, tmp_path / "int8", quantization="int8")
    with pytest.raises(ConfigError, match="is rounded to int8 already"):
        checkpoints.save(tmp_path / "int8", tmp_path / "x")

    class Large(OrbaxCheckpoint):
        def tensor(self, name):
            return super().tensor(name) * np.float32(1e30)

    with pytest.raises(ConfigError, match="beyond float16's range"):
        checkpoints.save(Large(converted), tmp_path / "x", dtype="float16")
    with pytest.raises(UserError, match="out: cannot make"):
        checkpoints.save(source, source / "config.json" / "x")
    assert not (tmp_path / "x").exists()


def test_a_float_checkpoint_does_not_pass_for_eight_bits(tmp_path, golden_tiny):
    checkpoints.save(golden_tiny / "bases" / "tied", tmp_path / "int8", quantization="int8")
    checkpoint = open_checkpoint(tmp_path / "int8")
    spec = LlamaSpec(checkpoint.config, checkpoint.config.geometry(2, 16))
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    with pytest.raises(ConfigError, match="set quantization to int8"):
        load_llama(spec, 16, mesh, checkpoint)


LIMITED = (
    "import resource, signal, sys; from multilora_jax import checkpoints, orbax_writer\n"
    "from multilora_jax.errors import UserError\n"
    "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    "complete = orbax_writer.FolderWriter._complete\n"
    "def limit(size): resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))\n"
    "def limited(self): limit(100); complete(self)\n"
    "size, source, out = int(sys.argv[1]), *sys.argv[2:]\n"
    "if size: limit(size)\n"
    "else: orbax_writer.FolderWriter._complete = limited\n"
    "try: checkpoints.save(source, out, group_bytes=50_000)\n"
    "except UserError as error: limit(1 << 30); print(error.reason, error.message)\n"
)


@pytest.mark.parametrize("size", [20_000, 200, 0])
def test_a_disk_that_takes_no_more_is_told_and_leaves_nothing(golden_tiny, tmp_path, size):
    source = golden_tiny / "bases" / "tied"
    command = [sys.executable, "-c", LIMITED, str(size), str(source), str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"bad_value out: cannot make '{tmp_path / 'out'}': "), done
    assert done.stdout.endswith(": File too large\n")
    assert list(tmp_path.iterdir()) == []


def test_a_conversion_under_way_is_left_alone(golden_tiny, tmp_path):
    source = golden_tiny / "bases" / "tied"
    with FolderWriter(tmp_path / "out", "model") as writer:
        before = sorted(writer.folder.rglob("*"))
        with pytest.raises(UserError, match=r"another conversion to .*out is at work") as caught:
            checkpoints.save(source, tmp_path / "out")
        assert caught.value.reason == "already_exists"
        assert sorted(writer.folder.rglob("*")) == before
        writer.add({"a": np.zeros(3, np.float32)})
    assert (tmp_path / "out" / MANIFEST_FILE).exists()


def test_a_folder_that_came_meanwhile_is_kept(golden_tiny, tmp_path, monkeypatch):
    complete = FolderWriter._complete

    def late(self):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").touch()
        complete(self)

    monkeypatch.setattr(FolderWriter, "_complete", late)
    with pytest.raises(UserError, match=r"out: cannot make .*Directory not empty"):
        checkpoints.save(golden_tiny / "bases" / "tied", tmp_path / "out")
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "mine"]


def test_more_parts_than_there_can_be_are_not_counted(copy):
    about = copy / "weights" / "0000" / "model.embed_tokens.weight" / ".zarray"
    described = json.loads(about.read_text())
    rows = 1 << 40  # a file with holes takes no room
    described |= {"shape": [rows, 1], "chunks": [1, 1]}
    about.write_text(json.dumps(described))
    with (copy / "weights" / "holes").open("wb") as file:
        file.truncate(4 * rows)

    def change(manifest):
        manifest["tensors"]["model.embed_tokens.weight"]["shape"] = [rows, 1]
        manifest["files"] |= {"weights/holes": 4 * rows}
        manifest["files"][about.relative_to(copy).as_posix()] = about.stat().st_size

    edit(copy, change)
    assert "has 1099511627776 parts" in refusal(copy)
