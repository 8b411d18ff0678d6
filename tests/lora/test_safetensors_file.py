"""The file reader against the safetensors library, and against damaged files."""

from __future__ import annotations

import hashlib
import json
import os

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save, save_file

from multilora_jax.errors import AdapterError, NotFoundError
from multilora_jax.lora.safetensors_file import SafetensorsFile


def read(path) -> tuple[dict[str, np.ndarray], str]:
    digest = hashlib.sha256()
    with SafetensorsFile(str(path)) as file:
        return {info.name: array for info, array in file.read(digest)}, digest.hexdigest()


def raw_file(path, header, data: bytes = b"") -> str:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return str(path)


def entry(shape=(2,), span=(0, 8), dtype="F32") -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(span)}


@given(
    shapes=st.lists(st.lists(st.integers(1, 5), max_size=3), min_size=1, max_size=5),
    dtype=st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]),
)
def test_reads_what_the_library_writes(tmp_path_factory, shapes, dtype):
    path = tmp_path_factory.mktemp("files") / "adapter_model.safetensors"
    rng = np.random.default_rng(0)
    save_file({f"t{i}": rng.standard_normal(shape).astype(dtype) for i, shape in enumerate(shapes)}, path)
    arrays, digest = read(path)
    wanted = load_file(path)
    assert arrays.keys() == wanted.keys()
    for name, array in wanted.items():
        assert arrays[name].dtype == np.float32
        np.testing.assert_array_equal(arrays[name], array.astype(np.float32))
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"not json", b""),
        (b"[" * 50_000, b""),
        (b"[]", b""),
        ({"a": []}, b""),
        ({"a": {"dtype": "F32"}}, b""),
        ({"a": entry(shape=(-2,))}, bytes(8)),
        ({"a": entry(shape=(True, 2))}, bytes(8)),
        ({"a": entry(shape=(2.0,))}, bytes(8)),
        ({"a": entry(shape=(2**70,))}, bytes(8)),
        ({"a": entry(shape=(1,) * 40, span=(0, 4))}, bytes(4)),
        ({"a": entry(span=(0, 8, 8))}, bytes(8)),
        ({"a": entry(shape=(3,))}, bytes(8)),
        ({"a": entry(shape=(1,))}, bytes(8)),
        ({"a": entry()}, bytes(4)),
        ({"a": entry()}, bytes(9)),
        ({"a": entry(span=(4, 12))}, bytes(12)),
        ({"a": entry(), "b": entry()}, bytes(8)),
        ({"a": entry(), "b": entry(span=(12, 20))}, bytes(20)),
    ],
)
def test_malformed_files_are_refused(tmp_path, header, data):
    with pytest.raises(AdapterError, match="damaged") as caught:
        SafetensorsFile(raw_file(tmp_path / "x.safetensors", header, data))
    assert caught.value.reason == "corrupt_weights"


@pytest.mark.parametrize("length", [0, 1, 7, 8])
def test_files_shorter_than_a_header(tmp_path, length):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"\xff" * length)
    with pytest.raises(AdapterError, match="damaged"):
        read(path)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_no_damage_goes_unnoticed_as_another_error(tmp_path_factory, position, value):
    data = bytearray(save({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float16)}))
    data[position % len(data)] = value
    path = tmp_path_factory.mktemp("files") / "x.safetensors"
    path.write_bytes(data)
    try:
        arrays, _ = read(path)
    except AdapterError:
        return
    assert sum(array.size for array in arrays.values()) <= 10


def test_truncation_while_reading_is_an_error_and_not_a_crash(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({f"t{i}": np.ones(100_000, np.float32) for i in range(4)}, path)
    with SafetensorsFile(str(path)) as file:
        tensors = file.read(hashlib.sha256())
        next(tensors)
        os.truncate(path, 1000)
        with pytest.raises(AdapterError, match="shrank"):
            list(tensors)


@pytest.mark.parametrize("dtype", ["F64", "I8", "F8_E4M3", "nonsense"])
def test_other_dtypes_are_named(tmp_path, dtype):
    with pytest.raises(AdapterError, match=dtype) as caught:
        read(raw_file(tmp_path / "x.safetensors", {"a": entry(dtype=dtype)}, bytes(8)))
    assert caught.value.reason == "unsupported_dtype"


def test_d06_git_lfs_pointer_is_named(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n")
    with pytest.raises(AdapterError, match="Git LFS pointer") as caught:
        read(path)
    assert caught.value.reason == "lfs_pointer"


def test_folders_pipes_and_missing_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(AdapterError, match="not a regular file"):
            read(path)
    for path in (tmp_path / "none", "nul\0"):
        with pytest.raises(NotFoundError) as caught:
            read(path)
        assert caught.value.reason == "adapter_file_not_found"


def test_files_are_closed_even_on_errors(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    good = tmp_path / "good.safetensors"
    save_file({"a": np.ones(4, np.float32)}, good)
    read(good)
    for _ in range(5):
        with pytest.raises(AdapterError):
            read(raw_file(tmp_path / "x.safetensors", b"not json"))
    assert len(os.listdir("/proc/self/fd")) == before
