"""Names, paths and threads of the registry."""

from __future__ import annotations

import gc
import os
import shutil
import weakref
from pathlib import Path

import pytest

from multilora_jax.errors import AdapterError, NotFoundError, PermissionDeniedError, UserError
from multilora_jax.lora.adapter import Adapter
from multilora_jax.lora.registry import AdapterRegistry
from multilora_jax.lora.weights import load_adapter
from multilora_jax.request import LoRARequest


def names(registry: AdapterRegistry) -> list[str]:
    return [adapter.name for adapter in registry.list()]


def test_load_get_list_remove(registry, peft_folder, peft_tensors):
    one, two = str(peft_folder("one")), str(peft_folder("two", peft_tensors(seed=1)))
    first = registry.load(LoRARequest("a", 1, one))
    second = registry.load(LoRARequest("b", 2, two))
    assert registry.get("a") is first
    assert registry.list() == [first, second]
    assert (first.name, first.int_id, first.path, first.rank) == ("a", 1, one, 8)
    assert first.digest != second.digest
    assert registry.remove("a") is first
    assert registry.list() == [second]
    with pytest.raises(NotFoundError):
        registry.remove("a")
    registry.load(LoRARequest("c", 1, one))  # the id is free again


def test_duplicates_are_refused_unless_in_place(registry, peft_folder, peft_tensors):
    path = peft_folder("a")
    first = registry.load(LoRARequest("a", 1, str(path)))
    with pytest.raises(UserError, match="load_inplace") as caught:
        registry.load(LoRARequest("a", 1, str(path)))
    assert (caught.value.reason, caught.value.param, caught.value.status) == ("adapter_exists", "lora_name", 400)
    peft_folder("a", peft_tensors(seed=1))
    second = registry.load(LoRARequest("a", 1, str(path), load_inplace=True))
    assert registry.list() == [second]
    assert second.digest != first.digest
    third = registry.load(LoRARequest("a", 5, str(path), load_inplace=True))
    assert registry.list() == [third]
    assert third.int_id == 5


def test_a_failed_replacement_keeps_the_old_version(registry, peft_folder):
    path = peft_folder("a")
    first = registry.load(LoRARequest("a", 1, str(path)))
    (path / "adapter_model.safetensors").write_bytes(b"damaged")
    with pytest.raises(AdapterError):
        registry.load(LoRARequest("a", 1, str(path), load_inplace=True))
    assert registry.list() == [first]


def test_the_owner_s_check_runs_before_anything_changes(make_registry, peft_folder, outcome):
    seen = []

    def check(adapter: Adapter) -> None:
        seen.append((adapter.name, names(registry)))
        if adapter.int_id == 2:
            raise UserError("no room", reason="no_room")

    registry = make_registry(check=check)
    path = str(peft_folder())
    first = registry.load(LoRARequest("a", 1, path))
    for request in (LoRARequest("a", 2, path, load_inplace=True), LoRARequest("b", 2, path)):
        assert outcome(registry.load, request) == "no_room"
        assert outcome(registry.resolve, request) == "no_room"
    assert registry.list() == [first]
    assert seen == [("a", []), ("a", ["a"]), ("a", ["a"]), ("b", ["a"]), ("b", ["a"])]


def test_d06_a_failed_load_leaves_nothing_behind(registry, peft_folder, peft_tensors):
    bad = str(peft_folder("bad", peft_tensors(17), r=17))
    for _ in range(3):
        with pytest.raises(AdapterError, match="rank 17"):
            registry.load(LoRARequest("a", 1, bad))
    assert registry.list() == []
    assert registry.load(LoRARequest("a", 1, str(peft_folder("good")))).rank == 8


def test_clashes_with_the_base_and_of_ids(registry, peft_folder, outcome):
    path = str(peft_folder())
    assert outcome(registry.load, LoRARequest("base", 1, path)) == "name_is_base_model"
    assert outcome(registry.load, LoRARequest("base", 1, path, load_inplace=True)) == "name_is_base_model"
    assert outcome(registry.resolve, LoRARequest("base", 1, path)) == "name_is_base_model"
    registry.load(LoRARequest("a", 1, path))
    registry.load(LoRARequest("b", 2, path))
    assert outcome(registry.load, LoRARequest("c", 1, path)) == "lora_int_id_in_use"
    assert outcome(registry.load, LoRARequest("b", 1, path, load_inplace=True)) == "lora_int_id_in_use"
    assert names(registry) == ["a", "b"]


@pytest.mark.parametrize("name", ["x" * 257, "x" * 4000, "a\0b", "a\nb", "\x1b[31m", "\ud800"])
def test_d24_bad_names(registry, peft_folder, name):
    for call in (registry.load, registry.resolve):
        with pytest.raises(UserError) as caught:
            call(LoRARequest(name, 1, str(peft_folder())))
        assert (caught.value.reason, caught.value.param) == ("bad_lora_name", "lora_name")
        assert len(caught.value.message) < 200
    assert registry.list() == []
    registry.load(LoRARequest("x" * 256, 1, str(peft_folder())))
    registry.load(LoRARequest("../ü 名", 2, str(peft_folder())))  # a name is no path


def test_resolve(registry, peft_folder, peft_tensors, outcome):
    path, other = str(peft_folder("a")), str(peft_folder("b"))
    first = registry.resolve(LoRARequest("a", 1, path))
    assert registry.list() == [first]
    assert registry.resolve(LoRARequest("a", 1, path)) is first
    assert registry.resolve(LoRARequest("a", 1)) is first
    assert registry.resolve(LoRARequest("a", 1, os.path.relpath(path))) is first
    assert outcome(registry.resolve, LoRARequest("a", 1, other)) == "adapter_exists"
    assert outcome(registry.resolve, LoRARequest("a", 2, path)) == "adapter_exists"
    assert registry.resolve(LoRARequest("a", 2)) is first  # no path: whichever version has the name now
    assert outcome(registry.resolve, LoRARequest("b", 2)) == "unknown_adapter"
    peft_folder("a", peft_tensors(seed=1))
    assert registry.resolve(LoRARequest("a", 1, path)) is first
    second = registry.resolve(LoRARequest("a", 1, path, load_inplace=True))
    assert registry.list() == [second]
    assert second.digest != first.digest


def test_paths_through_links_that_move_on(registry, peft_folder, tmp_path):
    old, new, link = peft_folder("old"), peft_folder("new"), tmp_path / "latest"
    link.symlink_to(old)
    first = registry.load(LoRARequest("a", 1, str(link)))
    link.unlink()
    link.symlink_to(new)
    assert registry.resolve(LoRARequest("a", 1, str(link))) is first


def test_unknown_names_are_answered_with_the_closest_and_a_bounded_list(registry, peft_folder):
    path = str(peft_folder())
    for i in range(40):
        registry.load(LoRARequest(f"adapter-{i:02d}", i + 1, path))
    with pytest.raises(NotFoundError, match="Did you mean 'adapter-07'") as caught:
        registry.get("adaptr-07")
    assert (caught.value.reason, caught.value.param, caught.value.status) == ("unknown_adapter", "model", 404)
    assert "'adaptr-07'" in caught.value.message
    assert "base, adapter-00" in caught.value.message
    assert caught.value.message.count("adapter-") == 20
    assert "and 21 more" in caught.value.message
    with pytest.raises(NotFoundError) as caught:
        registry.get("y" * 100_000)
    assert len(caught.value.message) < 1000
    assert "Did you mean" not in caught.value.message
    registry.load(LoRARequest("y" * 256, 41, path))
    with pytest.raises(NotFoundError) as caught:
        registry.get("y" * 257)  # too long to be compared
    assert "Did you mean" not in caught.value.message
    with pytest.raises(NotFoundError) as caught:
        registry.remove("zzz")
    assert caught.value.param == "lora_name"


def test_unknown_name_without_any_adapter(make_registry):
    with pytest.raises(NotFoundError, match="Available: none"):
        make_registry().get("a")


def test_a_same_content_in_place_changes_nothing(make_registry, host, peft_folder, tmp_path):
    replaced = []
    registry = make_registry(on_replaced=replaced.append)
    path = peft_folder("a")
    first = registry.load(LoRARequest("a", 1, str(path)))
    pages = host.get(first)
    for call in (registry.load, registry.resolve, registry.register):
        assert call(LoRARequest("a", 1, str(path), load_inplace=True)) is first
    assert host.adapters() == [first]
    assert host.get(first) is pages
    assert replaced == []
    copy = registry.load(LoRARequest("a", 1, str(shutil.copytree(path, tmp_path / "copy")), load_inplace=True))
    assert registry.list() == [copy] == host.adapters()
    assert replaced == [first]
    assert copy.digest == first.digest


def test_two_names_of_one_folder_are_two_adapters(registry, host, peft_folder):
    path = str(peft_folder())
    a, b = registry.load(LoRARequest("a", 1, path)), registry.load(LoRARequest("b", 2, path))
    assert a is not b
    assert host.get(a) is not host.get(b)
    registry.remove("a")
    assert host.adapters() == [b]


def test_what_is_in_use_is_kept_until_it_is_not(make_registry, host, peft_folder, peft_tensors):
    running, replaced = set(), []
    registry = make_registry(in_use=running.__contains__, on_replaced=replaced.append)
    first = registry.load(LoRARequest("a", 1, str(peft_folder("one"))))
    running.add(first)
    second = registry.load(LoRARequest("a", 1, str(peft_folder("two", peft_tensors(seed=1))), load_inplace=True))
    assert replaced == [first]
    assert host.adapters() == [first, second]
    running.clear()
    registry.forget(first)
    registry.forget(first)
    assert host.adapters() == [second]
    running.add(second)
    registry.remove("a")
    assert host.adapters() == [second]
    registry.forget(second)
    assert (len(host), host.bytes) == (0, 0)


def test_adapters_from_memory(registry, host, model_config, peft_folder, peft_tensors, outcome):
    weights = [
        load_adapter(str(peft_folder(str(seed), peft_tensors(seed=seed))), model_config, max_lora_rank=16)
        for seed in range(2)
    ]
    first = registry.add("a", None, weights[0])
    assert (first.name, first.int_id, first.path, first.digest) == ("a", 1, "", weights[0].digest)
    assert registry.resolve(LoRARequest("a", 1)) is first
    assert outcome(registry.add, "a", None, weights[1]) == "adapter_exists"
    assert outcome(registry.add, "b", 1, weights[1]) == "lora_int_id_in_use"
    assert outcome(registry.add, "base", None, weights[1]) == "name_is_base_model"
    assert outcome(registry.add, "a\n", None, weights[1]) == "bad_lora_name"
    assert host.adapters() == registry.list() == [first]
    assert registry.add("a", None, weights[0], load_inplace=True) is first
    second = registry.add("a", None, weights[1], load_inplace=True)
    assert host.adapters() == registry.list() == [second]
    assert (second.int_id, second.digest) == (1, weights[1].digest)
    third = registry.load(LoRARequest("a", 1, str(peft_folder("0")), load_inplace=True))  # and from a file
    assert host.adapters() == registry.list() == [third]
    registry.remove("a")
    assert (len(host), host.bytes) == (0, 0)


@pytest.fixture
def roots(make_registry, peft_folder, tmp_path):
    """A registry bound to tmp_path/root with the adapter root/ok, and an adapter outside."""
    peft_folder("outside")
    shutil.copytree(tmp_path / "outside", tmp_path / "root" / "ok")
    shutil.copytree(tmp_path / "outside", tmp_path / "root_2" / "ok")
    return make_registry([str(tmp_path / "root")]), tmp_path / "root"


def test_d24_paths_inside_the_roots(roots):
    registry, root = roots
    (root / "link").symlink_to("ok")
    paths = (root / "ok", f"{root}/ok/", f"{root}/ok/../ok", root / "link", os.path.relpath(root / "ok"))
    for i, path in enumerate(paths):
        assert registry.load(LoRARequest(str(i), i + 1, str(path))).rank == 8


def test_d24_paths_that_lead_out_are_refused(roots, monkeypatch, outcome):
    registry, root = roots
    outside = root.parent / "outside"
    (root / "link").symlink_to(outside)
    (root / "chain").symlink_to("link")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copytree(root / "ok", root / f"by {name}")
        (root / f"by {name}" / name).unlink()
        (root / f"by {name}" / name).symlink_to(outside / name)
    monkeypatch.chdir(root)
    escapes = [
        "../../etc", "/etc", "/", "..", "ok/../../outside", str(outside), str(root / ".." / "outside"), "link", "chain",
        "link/../outside",
        "link/.", str(root.parent / "root_2" / "ok"), "by adapter_config.json", "by adapter_model.safetensors",
        "/does/not/exist",
    ]  # fmt: skip
    for path in escapes:
        with pytest.raises(PermissionDeniedError, match="adapter_roots") as caught:
            registry.load(LoRARequest("a", 1, path))
        assert (caught.value.reason, caught.value.param) == ("path_outside_roots", "lora_path"), path
        assert caught.value.status == 403
        assert outcome(registry.resolve, LoRARequest("a", 1, path)) == "path_outside_roots", path
    assert registry.list() == []
    assert registry.load(LoRARequest("a", 1, str(outside)), trusted=True).rank == 8


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("", "bad_lora_path"), ("ok\0", "bad_lora_path"), ("\0", "bad_lora_path"), ("ok\ud800", "bad_lora_path"),
        ("raw\udcff", "bad_lora_path"),
        ("%2e%2e/outside", "adapter_path_not_found"), ("x" * 4000, "adapter_path_not_found"),
        ("a/" * 3000, "adapter_path_not_found"), ("ok/adapter_config.json", "adapter_path_not_found"),
        (".", "adapter_file_not_found"),
    ],
)  # fmt: skip
def test_d24_odd_paths_have_defined_answers(roots, monkeypatch, path, reason):
    registry, root = roots
    monkeypatch.chdir(root)
    with pytest.raises(UserError) as caught:
        registry.load(LoRARequest("a", 1, path))
    assert caught.value.reason == reason
    assert len(caught.value.message) < 1000
    caught.value.message.encode()  # can be sent


def test_folders_whose_names_no_answer_could_tell(registry, peft_folder, tmp_path, outcome):
    """Bytes that are not UTF-8 are a fine name on disk; a list of models with it could not be sent to anybody."""
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    shutil.copytree(peft_folder(), odd)
    (tmp_path / "link").symlink_to(odd)
    assert outcome(registry.load, LoRARequest("a", 1, str(odd))) == "bad_lora_path"
    assert outcome(registry.load, LoRARequest("a", 1, str(tmp_path / "link"))) == "bad_lora_path"
    assert outcome(registry.register, LoRARequest("a", 1, str(tmp_path / "link"))) == "bad_lora_path"
    assert outcome(registry.examine, str(odd)) == "bad_lora_path"
    (odd_link := Path(f"{odd}-link")).symlink_to(peft_folder("good"))
    assert outcome(registry.load, LoRARequest("a", 1, str(odd_link))) == "bad_lora_path"
    assert registry.list() == []


def test_d13_nothing_stays_after_removal(registry, host, peft_folder):
    path, kept = str(peft_folder()), []
    for i in range(20):
        adapter = registry.load(LoRARequest(f"a{i}", 1, path))
        assert (len(host), host.bytes > 0) == (1, True)
        kept.append(weakref.ref(adapter))
        registry.remove(f"a{i}")
        assert (len(host), host.bytes) == (0, 0)  # though `adapter` is still here
    del adapter
    gc.collect()
    assert [ref() for ref in kept] == [None] * 20
    assert registry._name_locks == {}
    assert registry.list() == []


def test_start_up_loads_are_checked_at_once(registry, configs: Path, outcome):
    for i, folder in enumerate(sorted((configs / "adapters").iterdir())):
        assert outcome(registry.load, LoRARequest(folder.name, i + 1, str(folder))) == "unbound_tensors"
