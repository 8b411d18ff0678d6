"""Unknown names that are found: in a folder, on the hub; off by default, and only where the configuration says."""

from __future__ import annotations

import asyncio
import shutil
import sys
import types
from typing import Any

import pytest

from multilora_jax.config import EngineConfig
from multilora_jax.errors import ConfigError
from multilora_jax.server import resolvers

pytestmark = pytest.mark.anyio

COMPLETIONS = "/v1/completions"


@pytest.fixture
def folder(tmp_path, adapter_paths):
    """Adapters a, b and "c d"; a link out of it, a file, an empty folder."""
    root = tmp_path / "found"
    for name in ("a", "b", "c d"):
        shutil.copytree(adapter_paths["adapter-a"], root / name)
    (root / "out").symlink_to(adapter_paths["adapter-a"])
    (root / "inside").symlink_to(root / "a")
    (root / "file").write_text("x")
    (root / "empty").mkdir()
    return root


async def ask(server, model, **fields):
    response = await server.post(COMPLETIONS, {"model": model, "prompt": "hi", "max_tokens": 12, **fields})
    return response.status_code, response.json()


async def test_off_by_default(server, folder):
    assert (await ask(server, "a"))[0] == 404


async def test_a_folder_s_adapters_are_found_by_their_names(make_server, folder):
    server = make_server(lora_resolver_folder=str(folder))
    for name in ("a", "base:b", "c d", "inside"):
        status, answer = await ask(server, name)
        assert (status, answer["choices"][0]["text"][:2]) == (200, f"{name.removeprefix('base:')}:"[:2])
    assert {"a", "b", "c d", "inside"} < {adapter.name for adapter in server.engine.list_loras()}
    mix = [{"name": "adapter-a"}, {"name": "b", "scale": 0.5}]
    assert (await ask(make_server(lora_resolver_folder=str(folder)), "base", lora=mix))[0] == 200
    response = await server.post("/tokenize", {"model": "a", "prompt": "hi"})
    assert response.status_code == 200


@pytest.mark.parametrize(
    "name",
    ["..", ".", "../found/a", "a/../b", "%2e%2e", "out", "file", "empty", "x" * 4000, "a\0", "a\\b", "/etc", "A"],
)
async def test_d24_nothing_else_is_found(make_server, folder, name):
    server = make_server(lora_resolver_folder=str(folder))
    status, answer = await ask(server, name)
    assert (status, answer["error"]["reason"]) == (404, "unknown_adapter")
    assert str(folder) not in answer["error"]["message"]
    assert len(server.engine.list_loras()) == 2


async def test_many_that_name_it_at_once_find_one(make_server, folder):
    server = make_server(lora_resolver_folder=str(folder), max_num_seqs=8)
    answers = await asyncio.gather(*(ask(server, "a") for _ in range(20)))
    assert {status for status, _ in answers} == {200}
    assert [adapter.name for adapter in server.engine.list_loras()].count("a") == 1
    assert server.engine.builder.reads.count(str(folder / "a")) == 1


async def test_a_bad_adapter_is_refused_as_a_load_refuses_it(make_server, folder):
    (folder / "a" / "adapter_model.safetensors").write_bytes(b"no tensors")
    server = make_server(lora_resolver_folder=str(folder))
    status, answer = await ask(server, "a")
    assert status == 400
    assert answer["error"]["reason"] != "unknown_adapter"
    assert (await ask(server, "b"))[0] == 200


def config(**keys):
    return EngineConfig(model="m", **keys)


def test_the_configuration_is_checked(tmp_path, monkeypatch):
    inside, outside = tmp_path / "root" / "in", tmp_path / "out"
    for made in (inside, outside):
        made.mkdir(parents=True)
    roots = (str(tmp_path / "root"),)
    config(lora_resolver_folder=str(inside), adapter_roots=roots)
    for keys, param in (
        ({"lora_resolver_folder": str(outside), "adapter_roots": roots}, "lora_resolver_folder"),
        ({"lora_resolver_folder": str(tmp_path / "no")}, "lora_resolver_folder"),
        ({"lora_resolver_folder": str(inside), "enable_lora": False}, "lora_resolver_folder"),
        ({"lora_resolver_hub": ("*",)}, "lora_resolver_hub"),
        ({"lora_resolver_hub": ("org/*/x",)}, "lora_resolver_hub"),
    ):
        with pytest.raises(ConfigError) as caught:
            config(**keys)
        assert caught.value.param == param
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="huggingface_hub, which is not installed"):
        config(lora_resolver_hub=("org/name",))


@pytest.fixture
def hub(monkeypatch, adapter_paths):
    """A huggingface_hub that has org/a, is broken for org/broken, and counts what it is asked for."""
    asked = []

    class RepositoryNotFoundError(Exception):
        pass

    def snapshot_download(hub_id, allow_patterns):
        asked.append(hub_id)
        assert not any(pattern.endswith(".bin") for pattern in allow_patterns)
        if hub_id == "org/broken":
            raise OSError("no network")
        if hub_id != "org/a":
            raise RepositoryNotFoundError
        return adapter_paths["adapter-a"]

    errors: Any = types.ModuleType("huggingface_hub.errors")
    errors.RepositoryNotFoundError = RepositoryNotFoundError
    errors.HFValidationError = ValueError
    module: Any = types.ModuleType("huggingface_hub")
    module.snapshot_download, module.errors = snapshot_download, errors
    module.__spec__ = types.SimpleNamespace(name="huggingface_hub")
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    return asked


async def test_hub_ids_that_are_listed_are_fetched(make_server, hub):
    server = make_server(lora_resolver_hub=("org/*",))
    status, answer = await ask(server, "org/a")
    assert (status, answer["model"]) == (200, "org/a")
    assert (await ask(server, "org/a"))[0] == 200
    assert hub == ["org/a"]
    for _ in range(2):
        assert (await ask(server, "org/none"))[0] == 404
    assert hub == ["org/a", "org/none"]
    status, answer = await ask(server, "org/broken")
    assert (status, answer["error"]["reason"]) == (503, "hub_unreachable")
    for name in ("other/a", "org/a/b", "org/..", "../a", "org/", "adapter-x"):
        assert (await ask(server, name))[0] == 404
    assert hub == ["org/a", "org/none", "org/broken"]


async def test_only_what_is_listed(make_server, hub):
    server = make_server(lora_resolver_hub=("org/b",))
    assert (await ask(server, "org/a"))[0] == 404
    assert hub == []


async def test_a_hub_cache_outside_the_roots_is_not_read(make_server, hub, tmp_path):
    server = make_server(lora_resolver_hub=("org/a",), adapter_roots=(str(tmp_path),))
    assert (await ask(server, "org/a"))[0] == 404


async def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(resolvers.UserError, match="pip install 'multilora_jax\\[hub\\]'"):
        resolvers.download("org/a")
