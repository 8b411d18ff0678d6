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

from multilora_jax.safetensors_file import FileError, SafetensorsFile

LFS_POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 12345\n"


def read(path) -> tuple[dict[str, np.ndarray], str]:
    digest = hashlib.sha256()
    return {info.name: array for info, array in SafetensorsFile(path).read_all(digest)}, digest.hexdigest()


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
    path = tmp_path_factory.mktemp("files") / "x.safetensors"
    rng = np.random.default_rng(0)
    save_file({f"t{i}": rng.standard_normal(shape).astype(dtype) for i, shape in enumerate(shapes)}, path)
    arrays, digest = read(path)
    wanted = load_file(path)
    assert arrays.keys() == wanted.keys()
    for name, array in wanted.items():
        assert arrays[name].dtype == np.float32
        np.testing.assert_array_equal(arrays[name], array.astype(np.float32))
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    file = SafetensorsFile(path)
    for name in sorted(wanted, reverse=True):
        assert file.tensors[name].shape == file.read(name).shape == wanted[name].shape
        assert file.tensors[name].dtype == file.read(name).dtype == dtype
        assert file.read(name).tobytes() == wanted[name].tobytes()


def test_tensors_are_in_memory_of_their_own(tmp_path):
    save_file({"a": np.zeros(4, np.float32)}, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    file.read("a")[:] = 1
    np.testing.assert_array_equal(file.read("a"), np.zeros(4))


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"not json", b""),
        (b"[" * 50_000, b""),
        (b"{nonsense", b""),
        (b"\xff\xfe\xff\xff", b""),
        (b"[]      ", b""),
        ({"a": []}, b""),
        ({"a": 3}, b""),
        ({"a": {"dtype": "F32"}}, b""),
        ({"a": entry(shape=(-2,))}, bytes(8)),
        ({"a": entry(shape=(True, 2))}, bytes(8)),
        ({"a": entry(shape=(2.0,))}, bytes(8)),
        ({"a": entry(shape=(2**70,))}, bytes(8)),
        ({"a": entry(shape=(1,) * 40, span=(0, 4))}, bytes(4)),
        ({"a": entry(span=(0, 8, 8))}, bytes(8)),
        ({"a": entry(span=(4, 12))}, bytes(12)),
        ({"a": entry(), "b": entry()}, bytes(8)),
        ({"a": entry(), "b": entry(span=(12, 20))}, bytes(20)),
    ],
)
def test_malformed_headers_are_refused(tmp_path, header, data):
    with pytest.raises(FileError, match="^the safetensors header is corrupt: ") as caught:
        SafetensorsFile(raw_file(tmp_path / "x.safetensors", header, data))
    assert caught.value.kind == "corrupt"


@pytest.mark.parametrize(
    ("header", "data_bytes", "message"),
    [
        ({"a": entry(shape=(3,))}, 8, r"tensor a has 8 bytes, .* F32\[3\]"),
        ({"a": entry(shape=(1,))}, 8, r"tensor a has 8 bytes, .* F32\[1\]"),
        ({"a": entry(span=(8, 0))}, 8, "tensor a has -8 bytes"),
        ({"a": entry()}, 4, "cut off: 4 bytes .* of 8"),
        ({"a": entry()}, 9, "1 bytes at the end"),
        ({"a\n\x1b" + "b" * 300: entry(shape=(3,))}, 8, r"tensor a\\n\\x1bb{197} has"),
    ],
)
def test_shapes_and_bytes_must_agree(tmp_path, header, data_bytes, message):
    with pytest.raises(FileError, match=message) as caught:
        SafetensorsFile(raw_file(tmp_path / "x.safetensors", header, bytes(data_bytes)))
    assert caught.value.kind == "corrupt"


@pytest.mark.parametrize("length", [0, 1, 7, 8, 30, 100, 127])
def test_files_that_are_cut_off(tmp_path, length):
    path = tmp_path / "x.safetensors"
    save_file({"a": np.ones(16, np.float32)}, path)
    whole = path.read_bytes()
    assert len(whole) == 128
    for content in (whole[:length], b"\xff" * length):
        path.write_bytes(content)
        with pytest.raises(FileError, match="cut off") as caught:
            read(path)
        assert caught.value.kind == "corrupt"


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_no_damage_goes_unnoticed_as_another_error(tmp_path_factory, position, value):
    data = bytearray(save({"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float16)}))
    data[position % len(data)] = value
    path = tmp_path_factory.mktemp("files") / "x.safetensors"
    path.write_bytes(data)
    try:
        arrays, _ = read(path)
    except FileError:
        return
    assert sum(array.size for array in arrays.values()) <= 10


def test_truncation_while_reading_is_an_error_and_not_a_crash(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({f"t{i}": np.ones(100_000, np.float32) for i in range(4)}, path)
    tensors = SafetensorsFile(path).read_all(hashlib.sha256())
    next(tensors)
    os.truncate(path, 1000)
    with pytest.raises(FileError, match="shrank") as caught:
        list(tensors)
    assert caught.value.kind == "corrupt"


def test_another_file_in_its_place_is_refused(tmp_path):
    path, other = tmp_path / "x.safetensors", tmp_path / "other.safetensors"
    save_file({"a": np.ones(4, np.float32)}, path)
    file = SafetensorsFile(path)
    save_file({"a": np.zeros(4, np.float32)}, other)
    os.utime(other, ns=(0, 0))
    other.replace(path)
    for use in (lambda: file.read("a"), lambda: list(file.read_all(hashlib.sha256()))):
        with pytest.raises(FileError, match="changed since it was opened") as caught:
            use()
        assert caught.value.kind == "corrupt"
    path.unlink()
    with pytest.raises(FileError) as caught:
        file.read("a")
    assert caught.value.kind == "not_found"


@pytest.mark.parametrize("dtype", ["F64", "I8", "F8_E4M3", "nonsense"])
def test_other_dtypes_are_named(tmp_path, dtype):
    with pytest.raises(FileError, match=f"tensor a is stored as {dtype}; only F32, F16, BF16") as caught:
        SafetensorsFile(raw_file(tmp_path / "x.safetensors", {"a": entry(dtype=dtype)}, bytes(8)))
    assert caught.value.kind == "unsupported_dtype"


def test_d06_git_lfs_pointer_is_named(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_text(LFS_POINTER)
    with pytest.raises(FileError, match="Git LFS pointer") as caught:
        SafetensorsFile(path)
    assert caught.value.kind == "lfs_pointer"


def test_folders_pipes_and_missing_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(FileError, match="not a regular file") as caught:
            SafetensorsFile(path)
        assert caught.value.kind == "not_regular"
    for path, message in ((tmp_path / "none", "No such file"), ("nul\0", "not a path")):
        with pytest.raises(FileError, match=message) as caught:
            SafetensorsFile(path)
        assert caught.value.kind == "not_found"


def test_files_are_closed_even_on_errors(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    good = tmp_path / "good.safetensors"
    save_file({"a": np.ones(4, np.float32)}, good)
    read(good)
    file = SafetensorsFile(good)
    file.read("a")
    os.utime(good, ns=(0, 0))
    for _ in range(5):
        with pytest.raises(FileError):
            SafetensorsFile(raw_file(tmp_path / "x.safetensors", b"not json"))
        with pytest.raises(FileError):
            SafetensorsFile(tmp_path)
        with pytest.raises(FileError):
            file.read("a")
    assert len(os.listdir("/proc/self/fd")) == before
