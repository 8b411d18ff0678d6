"""The reader of torch's files: what it reads, and what it says of files that are damaged or others'."""

from __future__ import annotations

import contextlib
import hashlib
import os
import zipfile

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from multilora_jax.safetensors_file import FileError
from multilora_jax.torch_file import TorchFile
from multilora_jax.torch_pickle import UnsafePickleError
from tests.torch_files import described, read, refused, tensor, write, write_arrays


@settings(max_examples=30)
@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=4),
    dtype=st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]),
)
def test_reads_every_shape_and_type(tmp_path_factory, shapes, dtype):
    rng = np.random.default_rng(0)
    arrays = {f"t{i}": rng.standard_normal(shape).astype(dtype) for i, shape in enumerate(shapes)}
    got, _ = read(write_arrays(tmp_path_factory.mktemp("files") / "x.bin", arrays))
    assert list(got) == list(arrays)
    for name, array in arrays.items():
        assert got[name].dtype == np.float32
        np.testing.assert_array_equal(got[name], array.astype(np.float32))


def test_files_of_torch_itself(golden_tiny):
    """Two cases of the reference data, which tests of adapters compare with what torch computes from them."""
    for case, count in (("file_bin", 28), ("file_bin_bf16", 16)):
        arrays, _ = read(golden_tiny / "cases" / case / "adapter_model.bin")
        assert len(arrays) == count
        like = load_file(golden_tiny / "cases" / "all_linear" / "adapter_model.safetensors")
        for name, array in arrays.items():
            assert array.shape == like[name].shape
            assert 0.01 < array.std() < 1


def test_views_are_copied_out_of_their_storage(tmp_path):
    data = np.arange(12, dtype=np.float32)
    path = write(
        tmp_path / "x.bin",
        described(
            turned=tensor("0", 12, (4, 3), (1, 4)), slice=tensor("0", 12, (2, 2), (4, 1), offset=5),
            same=tensor("0", 12, (3, 4), (4, 1)), one=tensor("0", 12, (), (), offset=11),
        ),
        {"0": data.tobytes()},
    )  # fmt: skip
    arrays, _ = read(path)
    table = data.reshape(3, 4)
    for name, wanted in (("turned", table.T), ("slice", table[1:, 1:3]), ("same", table), ("one", table[2, 3])):
        np.testing.assert_array_equal(arrays[name], wanted)
        assert arrays[name].flags.c_contiguous
        assert arrays[name].flags.writeable


def test_the_digest_is_of_names_shapes_and_numbers(tmp_path):
    base = {"a": np.arange(4, dtype=np.float32), "b": np.ones(2, np.float16)}
    others = [
        base | {"a": np.arange(1, 5, dtype=np.float32)}, {"a": base["a"], "c": base["b"]},
        base | {"a": base["a"].reshape(2, 2)}, base | {"b": base["b"].astype(np.float32)},
    ]  # fmt: skip
    digests = [read(write_arrays(tmp_path / f"{i}.bin", arrays))[1] for i, arrays in enumerate([base, *others])]
    assert len(set(digests)) == 5
    again = write_arrays(tmp_path / "again.bin", base)
    assert read(again)[1] == digests[0]


def test_compressed_entries_are_refused(tmp_path):
    description = described(a=tensor("0", 2**20, (2**20,), (1,)))
    with zipfile.ZipFile(tmp_path / "x.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("adapter_model/data.pkl", description)
        archive.writestr("adapter_model/data/0", bytes(2**22))
    assert "compressed" in refused(tmp_path / "x.bin").message


def test_archives_that_torch_does_not_write(tmp_path):
    good, data = described(a=tensor("0", 1, (1,), (1,))), {"0": bytes(4)}
    big = write(tmp_path / "big.bin", good, data, byteorder=b"big")
    assert "little-endian" in refused(big).message
    assert read(write(tmp_path / "little.bin", good, data, byteorder=b"little"))[0]["a"] == 0
    script = write(tmp_path / "script.bin", good, data, **{"constants.pkl": b""})
    assert isinstance(refused(script), UnsafePickleError)
    with zipfile.ZipFile(tmp_path / "none.bin", "w") as archive:
        archive.writestr("x/y/data.pkl", good)
    assert "data.pkl" in refused(tmp_path / "none.bin").message
    with zipfile.ZipFile(tmp_path / "two.bin", "w") as archive:
        archive.writestr("x/data.pkl", good)
        archive.writestr("y/data.pkl", good)
    assert "data.pkl" in refused(tmp_path / "two.bin").message


def test_files_that_are_no_archives(tmp_path):
    pointer = tmp_path / "pointer.bin"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\n")
    assert refused(pointer).kind == "lfs_pointer"
    (tmp_path / "text.bin").write_text("hello")
    assert refused(tmp_path / "text.bin").kind == "corrupt"
    (tmp_path / "empty.bin").write_bytes(b"")
    assert refused(tmp_path / "empty.bin").kind == "corrupt"
    assert refused(tmp_path / "none.bin").kind == "not_found"
    os.mkfifo(tmp_path / "pipe.bin")
    assert refused(tmp_path / "pipe.bin").kind == "not_regular"


@pytest.mark.parametrize("keep", [10, 100, 300, 0.5, 0.9, -1])
def test_cut_files(tmp_path, golden_tiny, keep):
    whole = (golden_tiny / "cases" / "file_bin" / "adapter_model.bin").read_bytes()
    length = int(len(whole) * keep) if isinstance(keep, float) else keep
    (tmp_path / "x.bin").write_bytes(whole[:length])
    assert refused(tmp_path / "x.bin").kind == "corrupt"


@settings(max_examples=60)
@given(st.data())
def test_any_damage_of_an_archive_is_read_or_refused(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("files") / "x.bin"
    write_arrays(path, {"a": np.arange(6, dtype=np.float32).reshape(2, 3)})
    whole = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    with contextlib.suppress(FileError):
        read(path)


def test_a_file_that_changes_between_the_check_and_the_read(tmp_path):
    path = write_arrays(tmp_path / "x.bin", {"a": np.ones(3, np.float32)})
    file = TorchFile(path)
    write_arrays(path, {"a": np.ones(4, np.float32)})
    with pytest.raises(FileError, match="changed"):
        list(file.read_all(hashlib.sha256()))


def test_numbers_that_do_not_match_their_checksum(tmp_path):
    path = write_arrays(tmp_path / "x.bin", {"a": np.full(64, 3.25, np.float32)})
    whole = path.read_bytes()
    path.write_bytes(whole.replace(np.float32(3.25).tobytes(), np.float32(3.5).tobytes(), 1))
    assert "CRC" in refused(path).message
