"""The files of an adapter folder: formats of the weights, shards, tokenizer and template, and what is never opened."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from multilora_jax.errors import AdapterError, NotFoundError, UserError
from multilora_jax.lora.adapter_files import weight_files
from multilora_jax.lora.weights import AdapterWeights, load_adapter
from tests.torch_files import write_arrays

WEIGHTS, INDEX, PICKLE = "adapter_model.safetensors", "adapter_model.safetensors.index.json", "adapter_model.bin"


@pytest.fixture
def load(model_config):
    return lambda folder: load_adapter(str(folder), model_config, max_lora_rank=16)


@pytest.fixture
def refusal(load):
    """Loads a folder that must be refused; returns (reason, message)."""

    def run(folder: Path, error: type[UserError] = AdapterError) -> tuple[str, str]:
        with pytest.raises(error) as caught:
            load(folder)
        assert caught.value.param == "lora_path"
        return caught.value.reason, caught.value.message

    return run


def assert_same(first: AdapterWeights, second: AdapterWeights) -> None:
    assert first.a.keys() == second.a.keys()
    assert first.scale == second.scale
    for key, a in first.a.items():
        np.testing.assert_array_equal(a, second.a[key])
        np.testing.assert_array_equal(first.b[key], second.b[key])


def shard(folder: Path, names: tuple[str, ...] = ("s-1-of-2.safetensors", "s-2-of-2.safetensors")) -> Path:
    """Splits the folder's weights over files of these names, with an index."""
    tensors, weight_map = load_file(folder / WEIGHTS), {}
    parts: dict[str, dict[str, np.ndarray]] = {name: {} for name in names}
    for index, (key, tensor) in enumerate(tensors.items()):
        weight_map[key] = names[index % len(names)]
        parts[weight_map[key]][key] = tensor
    for name, part in parts.items():
        save_file(part, folder / name)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    (folder / WEIGHTS).unlink()
    return folder


def test_shards_are_one_adapter(load, peft_folder):
    whole, split = load(peft_folder("whole")), load(shard(peft_folder("split")))
    assert_same(whole, split)
    assert split.digest == load(shard(peft_folder("again"))).digest
    one = load(shard(peft_folder("one"), ("only.safetensors",)))
    assert_same(whole, one)


def edit_index(folder: Path, change) -> Path:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def test_shards_and_index_must_agree(load, refusal, peft_folder):
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    cases = {
        "unlisted": lambda weight_map: weight_map.pop(key),
        "moved": lambda weight_map: weight_map.update({key: "s-2-of-2.safetensors"}),
        "absent": lambda weight_map: weight_map.update({key + "x": "s-1-of-2.safetensors"}),
    }
    for name, change in cases.items():
        reason, message = refusal(edit_index(shard(peft_folder(name)), change))
        assert reason == "sharded_weights"
        assert key in message
    missing = shard(peft_folder("missing"))
    (missing / "s-2-of-2.safetensors").unlink()
    reason, message = refusal(missing, NotFoundError)
    assert reason == "adapter_file_not_found"
    assert "s-2-of-2.safetensors" in message


@pytest.mark.parametrize(
    "name", ["../other/adapter_model.safetensors", "/etc/passwd", "sub/a.safetensors", "..", "", "adapter_config.json",
             "a\0.safetensors", 3, None],
)  # fmt: skip
def test_an_index_leads_nowhere_else(refusal, peft_folder, name):
    peft_folder("other")
    folder = edit_index(shard(peft_folder("a")), lambda weight_map: weight_map.update(dict.fromkeys(weight_map, name)))
    assert refusal(folder)[0] == "sharded_weights"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "[" * 50_000])
def test_damaged_indexes(refusal, peft_folder, text):
    folder = shard(peft_folder("a"))
    (folder / INDEX).write_text(text)
    assert refusal(folder)[0] == "sharded_weights"


def test_shards_without_an_index(refusal, peft_folder):
    folder = peft_folder("a")
    (folder / WEIGHTS).rename(folder / "adapter_model-00001-of-00002.safetensors")
    reason, message = refusal(folder)
    assert reason == "sharded_weights"
    assert INDEX in message


def test_bin_files_hold_what_safetensors_files_do(load, peft_folder):
    folder = peft_folder("a")
    whole = load(folder)
    write_arrays(folder / PICKLE, load_file(folder / WEIGHTS))
    (folder / WEIGHTS).unlink()
    pickled = load(folder)
    assert_same(whole, pickled)
    assert load(folder).digest == pickled.digest
    write_arrays(folder / PICKLE, {name: array + 1 for name, array in load_file(peft_folder("b") / WEIGHTS).items()})
    assert load(folder).digest != pickled.digest


def test_bin_files_are_checked_like_others(refusal, peft_folder):
    folder = peft_folder("a")
    (folder / WEIGHTS).unlink()
    write_arrays(folder / PICKLE, {"base_model.model.x.weight": np.ones(3, np.float32)})
    assert refusal(folder)[0] == "unbound_tensors"
    write_arrays(folder / PICKLE, {"base_model.model.x.weight": np.ones(3, np.float64)})
    assert refusal(folder)[0] == "unsupported_dtype"
    (folder / PICKLE).write_bytes((folder / PICKLE).read_bytes()[:100])
    assert refusal(folder)[0] == "corrupt_weights"
    (folder / PICKLE).write_text("version https://git-lfs.github.com/spec/v1\n")
    assert refusal(folder)[0] == "lfs_pointer"


class _Bomb:
    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """Names of the files that are opened from now on."""
    names: list[str] = []

    def recorded(real):
        def call(path, *args, **kwargs):
            names.append(os.path.basename(str(path)))
            return real(path, *args, **kwargs)

        return call

    monkeypatch.setattr(os, "open", recorded(os.open))
    monkeypatch.setattr("builtins.open", recorded(open))
    return names


def test_d25_pickles_are_not_opened_beside_safetensors_and_never_run(load, refusal, peft_folder, tmp_path, opened):
    marker = tmp_path / "marker"
    folder = peft_folder("a")
    bomb = pickle.dumps(_Bomb(marker), 2)
    (folder / PICKLE).write_bytes(bomb)
    opened.clear()
    assert load(folder).rank == 8
    assert {"adapter_config.json", WEIGHTS} <= set(opened)
    assert PICKLE not in opened
    (folder / WEIGHTS).unlink()
    for _ in range(2):
        reason, message = refusal(folder)
        assert reason == "pickle_weights"
        assert "weights_only=True" in message
        with zipfile.ZipFile(folder / PICKLE, "w") as archive:
            archive.writestr("adapter_model/data.pkl", bomb)
    assert not marker.exists()
    pickle.loads(bomb)
    assert marker.exists()  # the file would have been harmful


def test_tokenizer_and_template(load, refusal, peft_folder):
    plain = load(peft_folder("plain"))
    assert (plain.tokenizer_folder, plain.chat_template) == (None, None)
    folder, digests = peft_folder("a"), {plain.digest}
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "one"}))
    weights = load(folder)
    assert (weights.tokenizer_folder, weights.chat_template) == (None, "one")
    digests.add(weights.digest)
    (folder / "chat_template.jinja").write_text("two")
    assert load(folder).chat_template == "two"
    digests.add(load(folder).digest)
    (folder / "chat_template.jinja").write_text("too")
    digests.add(load(folder).digest)
    (folder / "chat_template.jinja").write_text("two")
    (folder / "tokenizer.json").write_text("{}")
    weights = load(folder)
    assert (weights.tokenizer_folder, weights.chat_template) == (str(folder), "two")
    digests.add(weights.digest)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("three")
    digests.add(load(folder).digest)
    assert len(digests) == 6
    shutil.copytree(folder, folder.parent / "copy")
    assert load(folder.parent / "copy").digest == load(folder).digest
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe\xfd")
    assert refusal(folder)[0] == "bad_tokenizer"


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "additional_chat_templates/a.jinja", "tokenizer.json", "tokenizer_config.json"]
)
def test_tokenizer_and_template_must_be_files(load, refusal, peft_folder, name):
    folder = peft_folder("a")
    (folder / name).parent.mkdir(exist_ok=True)
    os.mkfifo(folder / name)
    reason, message = refusal(folder)
    assert (reason, message) == ("corrupt_weights", f"{Path(name).name}: not a regular file")
    (folder / name).unlink()
    (folder / "additional_chat_templates" / "notes").mkdir(parents=True)  # nobody reads it
    load(folder)


@pytest.mark.parametrize(
    ("entry", "template"),
    [
        ([{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}], "d"), ({"default": "d"}, "d"),
        ([{"name": ["x"]}, 3], None), ({"tools": "t"}, None), (None, None), (5, None),
    ],
)  # fmt: skip
def test_named_templates(load, peft_folder, entry, template):
    folder = peft_folder("a")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}))
    assert load(folder).chat_template == template


def test_odd_tokenizer_configs(load, refusal, peft_folder):
    folder = peft_folder("a")
    (folder / "tokenizer_config.json").write_text("[]")
    assert load(folder).chat_template is None
    (folder / "tokenizer_config.json").write_text("{")
    assert refusal(folder)[0] == "bad_tokenizer"


def test_a_tokenizer_that_is_not_read_gets_a_warning(load, peft_folder):
    folder = peft_folder("a")
    (folder / "tokenizer.model").write_bytes(b"x")
    assert ["tokenizer.model" in warning for warning in load(folder).warnings] == [True]


def test_every_file_that_is_opened_is_listed(load, peft_folder, opened):
    folder = shard(peft_folder("a"))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "special_tokens_map.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("x")
    opened.clear()
    load(folder)
    listed = weight_files(str(folder))
    assert all(path.startswith(str(folder)) for path in listed)
    assert len(opened) > 6
    assert {name for name in opened if not name.isdecimal()} <= {os.path.basename(path) for path in listed}
    wanted = {str(folder / name) for name in ("adapter_config.json", WEIGHTS, INDEX, PICKLE)}
    assert wanted <= set(weight_files(str(folder)))
    assert wanted & set(weight_files(str(folder / "none"))) == set()
