"""Any part of a stored array, in any type, is what numpy would take of the whole; damage is an error, not numbers."""

from __future__ import annotations

import json
import math

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilora_jax import zarr_array
from multilora_jax.safetensors_file import FileError
from multilora_jax.zarr_array import ABOUT_FILE, ZarrArray

FLOAT32 = np.dtype(np.float32)
SIZES = st.tuples(st.integers(1, 3), st.integers(1, 4))


def write(folder, whole, chunks, about=()):
    """Writes an array as Orbax does."""
    folder.mkdir(exist_ok=True)
    described = {
        "zarr_format": 2, "order": "C", "compressor": None, "filters": None, "fill_value": None,
        "dtype": "<f4", "shape": list(whole.shape), "chunks": list(chunks), "dimension_separator": ".",
    } | dict(about)  # fmt: skip
    (folder / ABOUT_FILE).write_text(json.dumps(described))
    for place in np.ndindex(*(n // c for n, c in zip(whole.shape, chunks, strict=True))):
        part = whole[tuple(slice(i * c, (i + 1) * c) for i, c in zip(place, chunks, strict=True))]
        (folder / (".".join(map(str, place)) or "0")).write_bytes(np.ascontiguousarray(part).tobytes())
    return folder


@given(data=st.data(), axes=st.lists(SIZES, max_size=3), buffer=st.sampled_from([1, 40, 1 << 20]))
def test_every_part_is_numpys(tmp_path_factory, data, axes, buffer):
    chunks, shape = tuple(c for _, c in axes), tuple(n * c for n, c in axes)
    whole = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    folder = write(tmp_path_factory.mktemp("zarr"), whole, chunks)
    array = ZarrArray(str(folder))
    assert (array.shape, array.chunks, array.dtype) == (shape, chunks, "<f4")
    assert sorted(array.files()) == sorted(path.name for path in folder.iterdir() if path.name != ABOUT_FILE)
    index = tuple(
        slice(*sorted(data.draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True)))) for n in shape
    )[: data.draw(st.integers(0, len(shape)))]
    expected = whole[index]
    kept, zarr_array._BUFFER_BYTES = zarr_array._BUFFER_BYTES, buffer
    try:
        for dtype in (FLOAT32, np.dtype(ml_dtypes.bfloat16)):
            surrounding = np.full((*expected.shape[:-1], expected.shape[-1] + 1) if shape else (), 7, dtype)
            out = surrounding[..., :-1] if shape else surrounding  # no row of it touches the next
            array.read_into(index, out, FLOAT32)
            np.testing.assert_array_equal(out, expected.astype(dtype))
            assert not shape or (surrounding[..., -1] == 7).all()
    finally:
        zarr_array._BUFFER_BYTES = kept


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8"])
def test_what_orbax_writes_in_parts_is_read_as_it_was(tmp_path, dtype):
    whole = np.arange(6144).reshape(64, 96).astype(dtype)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=False, use_compression=False)
    with ocp.Checkpointer(handler) as checkpointer:
        save_args = {"w": ocp.SaveArgs(chunk_byte_size=1024)}
        checkpointer.save(tmp_path / "tree", args=ocp.args.PyTreeSave({"w": whole}, save_args=save_args))
    array = ZarrArray(str(tmp_path / "tree" / "w"))
    assert len(list(array.files())) > 4
    out = np.empty((30, 41), dtype)
    array.read_into((slice(7, 37), slice(50, 91)), out, whole.dtype)
    np.testing.assert_array_equal(out, whole[7:37, 50:91])


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"compressor": {"id": "zstd"}}, "it is compressed"),
        ({"filters": [{"id": "delta"}]}, "it is compressed"),
        ({"order": "F"}, "laid out in a way"),
        ({"zarr_format": 3}, "laid out in a way"),
        ({"dimension_separator": "/"}, "laid out in a way"),
        ({"chunks": [4, 5]}, "do not divide"),
        ({"chunks": [8]}, "do not divide"),
        ({"chunks": [0, 6]}, "is damaged"),
        ({"chunks": ["4", 6]}, "is damaged"),
        ({"shape": None}, "is damaged"),
    ],
)
def test_other_layouts_are_refused(tmp_path, about, words):
    write(tmp_path / "a", np.zeros((8, 6), np.float32), (4, 6), about)
    with pytest.raises(FileError, match=words) as caught:
        ZarrArray(str(tmp_path / "a"))
    assert caught.value.kind == "corrupt"


def test_damage_is_an_error(tmp_path, monkeypatch):
    folder = write(tmp_path / "a", np.ones((8, 6), np.float32), (4, 6))
    array, out = ZarrArray(str(folder)), np.empty((8, 6), np.float32)
    (folder / "1.0").write_bytes(b"1234")
    with pytest.raises(FileError, match=r"1\.0 has changed"):
        array.read_into((), out, FLOAT32)
    array.read_into((slice(0, 4),), out[:4], FLOAT32)  # which does not need it
    (folder / "1.0").unlink()
    with pytest.raises(FileError, match="No such file"):
        array.read_into((), out, FLOAT32)
    monkeypatch.setattr(zarr_array.os, "preadv", lambda *_: 0)
    with pytest.raises(FileError, match="shrank while it was read"):
        array.read_into((slice(0, 4),), out[:4], FLOAT32)

    def broken(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(zarr_array.os, "preadv", broken)
    with pytest.raises(FileError, match="Input/output error"):
        array.read_into((slice(0, 4),), out[:4], FLOAT32)
    (folder / ABOUT_FILE).write_text("{")
    with pytest.raises(FileError, match="is damaged"):
        ZarrArray(str(folder))
