"""Choices by the devices at hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from multilora_jax.config import EngineConfig
from multilora_jax.engine import devices
from multilora_jax.engine.describe import describe
from multilora_jax.errors import ConfigError
from multilora_jax.memory.geometry import MODULES
from multilora_jax.models.config import ModelConfig, RopeConfig
from pallas_kernels.dispatch import H200, Device, assume_device

MODEL = ModelConfig(
    name="tiny", vocab_size=64, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=96,
    rms_norm_eps=1e-5, rope=RopeConfig(), max_position_embeddings=256,
)  # fmt: skip
PAGE = 2 * 16 * 2 * 32 * 4
"""Bytes of a page: two layers, 16 tokens, K and V, two heads of 16, float32."""


def pages(stats=None, dtype="float32", **options) -> int:
    config = EngineConfig.from_dict({"model": "x", **options})
    device = SimpleNamespace(memory_stats=lambda: stats)
    mesh = SimpleNamespace(devices=SimpleNamespace(flat=[device]))
    return devices.pool_pages(config, MODEL, dtype, 256, mesh)  # pyright: ignore[reportArgumentType]


def test_pages_as_given():
    assert pages(pool_pages=77) == 77


def test_pages_of_a_size_in_memory():
    assert pages(pool_memory_gib=100 * PAGE / 2**30) == 100
    assert pages(pool_memory_gib=100.9 * PAGE / 2**30) == 100
    assert pages(pool_memory_gib=100 * PAGE / 2**30, dtype="bfloat16") == 200


def test_a_size_too_small_for_two_pages_is_refused():
    with pytest.raises(ConfigError, match=f"would have {PAGE} bytes but one page takes {PAGE}") as error:
        pages(pool_memory_gib=PAGE / 2**30)
    assert (error.value.reason, error.value.param) == ("pool_too_small", "pool_memory_gib")


def test_without_a_size_a_cpu_gets_room_for_all_sequences():
    assert pages(max_num_seqs=3) == 3 * 16 + 1
    assert pages(max_num_seqs=3, page_tokens=8) == 3 * 32 + 1
    assert pages(max_num_seqs=100_000) == devices.DEFAULT_CPU_POOL_BYTES // PAGE


def test_on_an_accelerator_the_pool_takes_what_is_left():
    rank_row = 2 * 4 * sum(sum(MODEL.module_dims(module)) for module in MODULES)
    weights, reserve = MODEL.num_parameters * 4 + (512 + 256) * rank_row, 1 << 30
    stats = {"bytes_limit": 4 << 30}
    assert pages(stats, gpu_memory_utilization=0.5) == ((2 << 30) - weights - reserve) // PAGE
    base_alone = ((2 << 30) - MODEL.num_parameters * 4 - reserve) // PAGE
    assert pages(stats, gpu_memory_utilization=0.5, enable_lora=False) == base_alone
    assert pages(stats) == (int((4 << 30) * 0.9) - weights - reserve) // PAGE
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        pages(stats, gpu_memory_utilization=0.25)


def test_more_shards_than_devices_are_refused():
    assert devices.make_mesh(1).shape == {"data": 1, "model": 1}
    count = len(jax.devices())
    more = count + 1
    with pytest.raises(ConfigError, match=f"with data_parallel_size {more} needs {more} devices, jax sees") as error:
        devices.make_mesh(1, 0, more)
    assert error.value.param == "data_parallel_size"
    assert error.value.message.endswith(f"XLA_FLAGS=--xla_force_host_platform_device_count={more}")
    with pytest.raises(ConfigError, match=f"needs as many devices, jax sees {count} ") as error:
        devices.make_mesh(count + 1)
    assert (error.value.reason, error.value.param) == ("too_few_devices", "tensor_parallel_size")


@pytest.mark.parametrize(
    ("seconds", "chosen"), [((1.0, 2.0), "bfloat16"), ((2.0, 1.0), "float32"), ((1.0, 1.05), "float32")]
)
def test_auto_takes_the_faster_type(monkeypatch, seconds, chosen):
    """Seconds of bfloat16 and of float32; a gain under a tenth is not worth the precision."""
    by_dtype = dict(zip(("bfloat16", "float32"), seconds, strict=True))
    monkeypatch.setattr(devices, "_probe", lambda dtype, features_first: by_dtype[dtype])
    assert devices.choose_dtype("auto") == chosen
    assert devices.choose_dtype("float16") == "float16"


def test_the_probe_measures():
    assert 0 < devices._probe("float32", True) < 10
    assert 0 < devices._probe("bfloat16", False) < 10


def test_layout_follows_the_type():
    assert devices.features_first("float32")
    assert not devices.features_first("bfloat16")


def test_attention_goes_by_the_device_and_the_configuration():
    assert devices.attention_backend("auto", MODEL, "bfloat16") == "xla"
    assert devices.lora_backend("auto", 16, "bfloat16") == "xla"
    # By name it is interpreted, for tests.
    assert devices.attention_backend("triton", MODEL, "bfloat16") == devices.lora_backend("triton", 16, "float32")
    assert [devices.interprets(name) for name in ("auto", "xla", "triton")] == [False, False, True]
    with assume_device(Device("gpu", "Tesla T4", (7, 5))):
        assert devices.lora_backend("auto", 16, "float16") == "xla"
        assert not devices.interprets("triton")
        with pytest.raises(ConfigError, match="kernel_backend triton .* need compute capability 8.0 or later"):
            devices.lora_backend("triton", 16, "float16")
    with assume_device(H200):
        assert devices.lora_backend("auto", 16, "bfloat16") == "triton"
        assert devices.lora_backend("auto", 24, "bfloat16") == "xla"
        with pytest.raises(
            ConfigError, match="kernel_backend triton .* units of 24 elements are no whole number of 16"
        ):
            devices.lora_backend("triton", 24, "bfloat16")
        assert devices.attention_backend("auto", MODEL, "bfloat16") == "triton"
        assert devices.attention_backend("xla", MODEL, "bfloat16") == "xla"
        odd = dataclasses.replace(MODEL, head_dim=24)
        assert devices.attention_backend("auto", odd, "bfloat16") == "xla"
        with pytest.raises(ConfigError, match="kernel_backend triton .* power of two from 16 on, not 24"):
            devices.attention_backend("triton", odd, "bfloat16")
        assert devices.attention_backend("mosaic_gpu", MODEL, "bfloat16") == "triton"
        wide = dataclasses.replace(MODEL, head_dim=128)
        assert devices.attention_backend("mosaic_gpu", wide, "bfloat16") == "mosaic_gpu"
        assert devices.attention_backend("auto", wide, "bfloat16") == "triton"
        assert devices.attention_backend("mosaic_gpu", wide, "float32") == "triton"
        assert devices.attention_backend("mosaic_gpu", wide, "bfloat16", page_tokens=4) == "triton"
        assert devices.lora_backend("mosaic_gpu", 128, "bfloat16") == "mosaic_gpu"
        with pytest.raises(ConfigError, match="kernel_backend mosaic_gpu .* of 16 elements are no whole number of 128"):
            devices.lora_backend("mosaic_gpu", 16, "bfloat16")


@pytest.fixture
def cache_settings():
    """The process's own compilation cache, put back afterwards."""
    names = (
        "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )  # fmt: skip
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_compilation_cache_folder(cache_settings, monkeypatch, tmp_path):
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("MULTILORA_CACHE", str(tmp_path / "own"))
    assert devices.set_compilation_cache(None) == tmp_path / "own" / "xla"
    assert (tmp_path / "own" / "xla").is_dir()
    assert Path(getattr(jax.config, "jax_compilation_cache_dir", "")) == tmp_path / "own" / "xla"
    # Set once, the process's cache stays unless another is asked for.
    monkeypatch.setenv("MULTILORA_CACHE", str(tmp_path / "later"))
    assert devices.set_compilation_cache(None) == tmp_path / "own" / "xla"
    assert devices.set_compilation_cache(str(tmp_path / "asked")) == tmp_path / "asked"
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.delenv("MULTILORA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert devices.set_compilation_cache(None) == tmp_path / "xdg" / "multilora_jax" / "xla"


def test_the_banner_gives_the_pool_in_pages_tokens_and_adapters():
    banner = describe("m", MODEL, MODEL.geometry(129, 16), 64, [])
    assert "pool      128 pages of 8 KiB (1 MiB): 2048 tokens" in banner.splitlines()
