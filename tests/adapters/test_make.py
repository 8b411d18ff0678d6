"""`adapters make`: folders that PEFT's layout asks for, and nothing overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest
from absl import flags as absl_flags
from safetensors.numpy import load_file

from multilora_jax import flags
from multilora_jax.adapters import make
from multilora_jax.adapters.host_base import read_model_config
from multilora_jax.errors import UserError
from multilora_jax.lora.weights import load_adapter

MODEL = str(Path(__file__).parent.parent.parent / "configs" / "tiny_model")


def run(*words: str) -> int:
    values = absl_flags.FlagValues()
    make.define_flags(values)
    values(flags.normalise_argv(["make", *words]))
    return make.main([], values)


def test_command_makes_adapters_of_ranks_in_turn(tmp_path, capsys):
    out = tmp_path / "new" / "set"
    words = ("--num", "5", "--ranks", "8,16", "--targets", "all", "--model", MODEL, "--out", str(out))
    assert run(*words, "--dtype", "bfloat16", "--seed", "3", "--delta-std", "0.1") == 0
    assert capsys.readouterr().out == f"5 adapters of rank 8, 16 in {out} (0.2 MiB)\n"
    folders = sorted(path.name for path in out.iterdir())
    assert folders == [f"adapter-000{n}" for n in range(5)]
    config = read_model_config(MODEL)
    loaded = [load_adapter(str(out / name), config, max_lora_rank=16) for name in folders]
    assert [weights.rank for weights in loaded] == [8, 16, 8, 16, 8]
    assert {len(weights.a) for weights in loaded} == {7 * config.num_layers}
    assert len({weights.digest for weights in loaded}) == 5
    delta = loaded[0].b[0, "down_proj"] @ loaded[0].a[0, "down_proj"]
    assert delta.std() == pytest.approx(0.1, rel=0.3)
    tensors = load_file(out / folders[0] / "adapter_model.safetensors")
    assert {array.dtype.name for array in tensors.values()} == {"bfloat16"}


@pytest.mark.parametrize(("targets", "modules"), [("qv", {"q_proj", "v_proj"}), ("qkvo", set(make.TARGETS["qkvo"]))])
def test_targets_and_types(tmp_path, targets, modules):
    config = read_model_config(MODEL)
    for dtype in make.FILE_DTYPES:
        [path] = make.make_adapters(config, str(tmp_path / dtype), 1, modules=make.TARGETS[targets], dtype=dtype)
        weights = load_adapter(path, config, max_lora_rank=8)
        assert {module for _, module in weights.a} == modules
        sizes = {array.dtype.itemsize for array in load_file(Path(path) / "adapter_model.safetensors").values()}
        assert sizes == {4 if dtype == "float32" else 2}


def test_seeds_repeat_and_do_not_overlap(tmp_path):
    config = read_model_config(MODEL)

    def digests(name: str, seed: int) -> list[str]:
        paths = make.make_adapters(config, str(tmp_path / name), 2, seed=seed)
        return [load_adapter(path, config, max_lora_rank=8).digest for path in paths]

    first, again, other = digests("a", 0), digests("b", 0), digests("c", 1)
    assert first == again
    assert len({*first, *other}) == 4


def test_nothing_is_overwritten(tmp_path):
    config = read_model_config(MODEL)
    (tmp_path / "adapter-0002").mkdir()
    with pytest.raises(UserError, match="adapter-0002 exists") as caught:
        make.make_adapters(config, str(tmp_path), 3)
    assert caught.value.reason == "already_exists"
    assert [path.name for path in tmp_path.iterdir()] == ["adapter-0002"]
    assert make.make_adapters(config, str(tmp_path), 2)[1] == str(tmp_path / "adapter-0001")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot make"):
        make.make_adapters(config, str(tmp_path / "file" / "x"), 1)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--num", "1", "--out", "x"], "give --model"),
        (["--model", MODEL, "--out", "x"], "give --num"),
        (["--model", MODEL, "--num", "1"], "give --out"),
        (["--model", MODEL, "--num", "1", "--out", "x", "--ranks", "8,-1"], "ranks must be integers .* got '-1'"),
        (["--model", MODEL, "--num", "1", "--out", "x", "--ranks="], "ranks must be integers .* got ''"),
        (["--model", MODEL, "--num", "1", "--out", "x", "--delta_std", "nan"], "delta_std: .* beyond float32"),
        (["--model", MODEL, "--num", "1", "--out", "x", "--delta_std", "inf"], "delta_std: .* beyond float32"),
        (["--model", MODEL, "--num", "1", "--out", "x", "--delta_std", "1e4", "--dtype", "float16"], "number is 65504"),
        (["--model", "/no/such", "--num", "1", "--out", "x"], "no such file or folder"),
    ],
)
def test_bad_flags(tmp_path, monkeypatch, words, match):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=match):
        run(*words)
    assert not any(tmp_path.iterdir())
