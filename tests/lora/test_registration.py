"""Names that are registered and read only when they are first wanted."""

from __future__ import annotations

import builtins
import io
import os
import shutil
import time
from pathlib import Path

import pytest

import multilora_jax.lora.reader as reader_module
from multilora_jax.errors import AdapterError, NotFoundError, UserError
from multilora_jax.request import LoRARequest


def empty_folder(folder: Path) -> Path:
    """An adapter folder whose files hold nothing."""
    folder.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / name).touch()
    return folder


def test_ten_thousand_names_cost_neither_files_nor_memory_nor_time(make_registry, host, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError(f"opened a file or started a thread: {args}")

    registry = make_registry(base_names=("base",))
    folder = str(empty_folder(tmp_path / "a"))
    for module, name in ((builtins, "open"), (io, "open"), (os, "open"), (reader_module.threading, "Thread")):
        monkeypatch.setattr(module, name, refuse)
    start = time.thread_time()  # of this thread's own work: others may have the processor meanwhile
    for i in range(10_000):
        registry.register(LoRARequest(f"adapter-{i}", i + 1, folder))
    assert time.thread_time() - start < 2
    assert len(registry.list()) == 10_000
    assert registry.next_int_id() == 10_001
    assert registry.get("adapter-9999").version is None
    assert (len(host), host.bytes) == (0, 0)
    assert registry._name_locks == {}


def test_first_use_loads(registry, host, peft_folder):
    path = str(peft_folder())
    adapter = registry.register(LoRARequest("a", 3, path))
    assert registry.list() == [adapter] == [registry.get("a")]
    assert (adapter.name, adapter.int_id, adapter.path, adapter.digest) == ("a", 3, path, None)
    assert registry.resolve(LoRARequest("a", 3, path)) is adapter
    assert registry.resolve(LoRARequest("a", 3)) is adapter
    assert len(host) == 0
    registry.ensure_loaded(adapter)
    version = adapter.version
    assert (adapter.rank, host.adapters()) == (8, [adapter])
    shutil.rmtree(path)
    registry.ensure_loaded(adapter)
    assert adapter.version is version


def test_d06_what_is_wrong_is_told_at_the_first_use_and_mended_by_the_next(registry, host, tmp_path, peft_folder):
    adapter = registry.register(LoRARequest("a", 1, str(empty_folder(tmp_path / "a"))))
    for _ in range(2):
        with pytest.raises(AdapterError) as caught:
            registry.ensure_loaded(adapter)
        assert caught.value.reason == "bad_adapter_config"
    assert registry.list() == [adapter]
    assert (adapter.version, len(host)) == (None, 0)
    peft_folder("a")
    registry.ensure_loaded(adapter)
    assert adapter.rank == 8


def test_a_check_refuses_the_first_use(make_registry, host, peft_folder, outcome):
    def check(adapter):
        raise UserError(f"{adapter.num_pages} pages", reason="no_room")

    registry = make_registry(check=check)
    adapter = registry.register(LoRARequest("a", 1, str(peft_folder())))
    assert outcome(registry.ensure_loaded, adapter) == "no_room"
    assert adapter.version is None
    assert (len(host), host.bytes) == (0, 0)


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_files_must_be_there(registry, tmp_path, missing):
    folder = empty_folder(tmp_path / "a")
    (folder / missing).unlink()
    with pytest.raises(NotFoundError, match=f"adapter 'a': folder .*{missing}") as caught:
        registry.register(LoRARequest("a", 1, str(folder)))
    assert (caught.value.reason, caught.value.param) == ("adapter_file_not_found", "lora_path")
    with pytest.raises(NotFoundError, match="adapter 'a': folder .* does not exist") as caught:
        registry.register(LoRARequest("a", 1, str(tmp_path / "nowhere")))
    assert caught.value.reason == "adapter_path_not_found"
    assert registry.list() == []


def test_refusals_are_those_of_a_load(registry, peft_folder, peft_tensors, outcome):
    path = str(peft_folder())
    registry.register(LoRARequest("a", 1, path))
    assert outcome(registry.register, LoRARequest("a", 1, path)) == "adapter_exists"
    assert outcome(registry.register, LoRARequest("b", 1, path)) == "lora_int_id_in_use"
    assert outcome(registry.register, LoRARequest("base", 2, path)) == "name_is_base_model"
    assert outcome(registry.register, LoRARequest("b", 2, "")) == "bad_lora_path"
    assert outcome(registry.register, LoRARequest("x" * 257, 2, path)) == "bad_lora_name"
    registry.remove("a")
    registry.register(LoRARequest("b", 1, path))


def test_a_replacement_is_loaded_at_once(registry, tmp_path, peft_folder, outcome):
    adapter = registry.register(LoRARequest("a", 1, str(peft_folder("good"))))
    bad = LoRARequest("a", 1, str(empty_folder(tmp_path / "bad")), load_inplace=True)
    assert outcome(registry.register, bad) == "bad_adapter_config"
    assert registry.list() == [adapter]
    replaced = registry.register(LoRARequest("a", 1, str(peft_folder("new")), load_inplace=True))
    assert registry.list() == [replaced]
    assert replaced.rank == 8
    assert adapter.version is None
    new = registry.register(LoRARequest("b", 2, str(tmp_path / "bad"), load_inplace=True))  # nothing to replace
    assert new.version is None


def test_d24_roots_bind_registrations_and_links_that_change(make_registry, peft_folder, tmp_path, outcome):
    outside = peft_folder("outside")
    inside = Path(shutil.copytree(outside, tmp_path / "root" / "inside"))
    registry = make_registry([str(tmp_path / "root")])
    assert outcome(registry.register, LoRARequest("o", 1, str(outside))) == "path_outside_roots"
    assert registry.register(LoRARequest("o", 1, str(outside)), trusted=True).name == "o"
    registry.ensure_loaded(registry.get("o"))
    adapter = registry.register(LoRARequest("a", 2, str(inside)))
    (inside / "adapter_model.safetensors").unlink()
    (inside / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    assert outcome(registry.ensure_loaded, adapter) == "path_outside_roots"


@pytest.mark.parametrize(
    "name",
    [
        "adapter_model-00001-of-00002.safetensors", "adapter_model.safetensors.index.json", "adapter_model.bin",
        "other.safetensors", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
        "chat_template.jinja", "additional_chat_templates/x.jinja", "additional_chat_templates",
    ],
)  # fmt: skip
def test_d24_every_file_that_is_read_lies_in_the_roots(make_registry, peft_folder, tmp_path, outcome, name):
    inside = Path(shutil.copytree(peft_folder("outside"), tmp_path / "root" / "inside"))
    (tmp_path / "secret").mkdir()
    (inside / name).parent.mkdir(exist_ok=True)
    (inside / name).symlink_to(tmp_path / "secret")
    registry = make_registry([str(tmp_path / "root")])
    assert outcome(registry.register, LoRARequest("a", 1, str(inside))) == "path_outside_roots"
    (inside / name).unlink()
    (inside / name).symlink_to(inside / "adapter_config.json")
    assert registry.register(LoRARequest("a", 1, str(inside))).name == "a"


def test_links_that_move_on_do_not_change_a_registration(registry, peft_folder, peft_tensors, tmp_path):
    old, new, link = peft_folder("old"), peft_folder("new", peft_tensors(seed=1)), tmp_path / "latest"
    link.symlink_to(old)
    adapter = registry.register(LoRARequest("a", 1, str(link)))
    link.unlink()
    link.symlink_to(new)
    registry.ensure_loaded(adapter)
    other = registry.load(LoRARequest("b", 2, str(old)))
    assert (adapter.path, adapter.digest) == (str(link), other.digest)
    replaced = registry.load(LoRARequest("a", 1, str(link), load_inplace=True))
    assert replaced.digest != other.digest
