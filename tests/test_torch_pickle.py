"""No pickle in a torch file can run code, or take memory or time at will."""

from __future__ import annotations

import contextlib
import os
import pickle
import pickletools
import time
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multilora_jax.safetensors_file import FileError
from multilora_jax.torch_file import MAX_PICKLE_BYTES, TorchFile
from multilora_jax.torch_pickle import UnsafePickleError, read_description
from tests.torch_files import described, read, refused, storage, tensor, text, write, write_arrays


def test_parameters_and_the_state_dict_of_a_model(tmp_path):
    """OrderedDict with its metadata, and tensors wrapped as parameters."""
    parameter = (
        b"ctorch._utils\n_rebuild_parameter\n(" + tensor("0", 2, (2,), (1,)) + b"\x88ccollections\nOrderedDict\n)RtR"
    )
    metadata = (
        b"}" + text("_metadata") + b"ccollections\nOrderedDict\n)R" + text("") + b"}" + text("version") + b"K\x01sss"
    )
    description = b"\x80\x02ccollections\nOrderedDict\n)R(" + text("a") + parameter + b"u" + metadata + b"b."
    arrays, _ = read(write(tmp_path / "x.bin", description, {"0": np.array([1, 2], np.float32).tobytes()}))
    np.testing.assert_array_equal(arrays["a"], [1, 2])


class Call:
    """Pickles as a call of `function`."""

    def __init__(self, function: Any, *arguments: Any):
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


class Stateful:
    """Pickles as an object that gets a state."""

    def __init__(self, marker: str):
        self.marker = marker

    def __getstate__(self) -> Any:
        return {"path": self.marker}

    def __setstate__(self, state: Any) -> None:
        os.mkdir(state["path"])


def attacks(marker: str) -> dict[str, bytes]:
    call = f"os.mkdir({marker!r})"
    mkdir = f"{marker}"
    result = {
        f"mkdir, protocol {protocol}": pickle.dumps({"a": Call(os.mkdir, marker)}, protocol) for protocol in range(6)
    }
    result |= {
        "eval": pickle.dumps(Call(eval, f"__import__('os').mkdir({marker!r})")),
        "exec": pickle.dumps(Call(exec, f"import os; {call}")),
        "system": pickle.dumps(Call(os.system, f"mkdir {marker}")),
        "getattr": pickle.dumps(Call(getattr(os, "mkdir"), marker), 2),  # noqa: B009
        "getattr chain": b"\x80\x02cbuiltins\ngetattr\n(cos\npath\n" + text("join") + b"tR.",
        "import": b"\x80\x02cbuiltins\n__import__\n(" + text("os") + b"tR.",
        "set state": pickle.dumps({"a": Stateful(marker)}),
        "state of a tensor": described(a=tensor("0", 1) + b"}" + text("path") + text(mkdir) + b"sb"),
        "inst": b"(" + text(marker) + b"ios\nmkdir\n.",
        "obj": b"\x80\x02(cos\nmkdir\n" + text(marker) + b"o.",
        "newobj": b"\x80\x02cos\nmkdir\n(" + text(marker) + b"t\x81.",
        "extension": b"\x80\x02\x82\x01(" + text(marker) + b"tR.",
        "stack global": b"\x80\x04" + text("os") + text("mkdir") + b"\x93(" + text(marker) + b"tR.",
        "dotted name": b"\x80\x04" + text("torch._utils") + text("_rebuild_tensor_v2.__globals__") + b"\x93.",
        "module of torch": b"\x80\x02ctorch.serialization\nload\n(" + text(marker) + b"tR.",
        "another rebuild": b"\x80\x02ctorch._utils\n_rebuild_device_tensor_from_numpy\n(tR.",
        "copyreg": b"\x80\x02ccopyreg\n_reconstructor\n(ctorch\nFloatStorage\ncbuiltins\nobject\nNtR.",
        "called storage": b"\x80\x02ctorch\nFloatStorage\n(" + text(marker) + b"tR.",
        "called tensor": described(a=tensor("0", 1) + b")R"),
        "called text": b"\x80\x02" + text("os.mkdir") + b"(" + text(marker) + b"tR.",
        "filled OrderedDict": b"\x80\x02ccollections\nOrderedDict\n(](" + text("a") + text("b") + b"eetR.",
        "persistent text": b"Pos.mkdir\n.",
        "tensor of a call": b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(cos\nmkdir\n" + b"N" * 5 + b"tR.",
        "key that is hashed for ever": b"\x80\x02})" + b"q\x00h\x00\x86" * 60 + b"Ns.",
        "set": b"\x80\x04\x8f(" + text("a") + b"\x90.",
        "dup": b"\x80\x02}2.",
    }
    return result


def test_d25_no_file_runs_code(tmp_path):
    marker = tmp_path / "marker"
    for name, description in attacks(str(marker)).items():
        path = write(tmp_path / "x.bin", description, {"0": bytes(4)})
        with pytest.raises(UnsafePickleError) as caught:
            TorchFile(path)
        assert len(caught.value.message) < 400, name
        assert not marker.exists(), name
    pickle.loads(attacks(str(marker))["mkdir, protocol 2"])
    assert marker.exists()  # the files would have been harmful


@pytest.mark.parametrize("name", ["os.mkdir", "posix.mkdir", "nt.mkdir"])
def test_d25_the_message_names_what_was_asked_for(tmp_path, name):
    module, function = name.split(".")
    path = write(tmp_path / "x.bin", f"\x80\x02c{module}\n{function}\n)R.".encode("latin1"), {})
    with pytest.raises(UnsafePickleError, match=f"asks for {name}"):
        TorchFile(path)


def test_d25_nothing_of_the_usual_unpickler_is_used(tmp_path, monkeypatch):
    def fail(*_: Any) -> None:
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, fail)
    path = write_arrays(tmp_path / "x.bin", {"a": np.ones(3, np.float32)})
    assert read(path)[0]["a"].tolist() == [1, 1, 1]


def test_d25_old_files_are_pickles_throughout(tmp_path):
    marker = tmp_path / "marker"
    (tmp_path / "x.bin").write_bytes(pickle.dumps(Call(os.mkdir, str(marker)), 2))
    with pytest.raises(UnsafePickleError, match="before version 1.6"):
        TorchFile(tmp_path / "x.bin")
    assert not marker.exists()


@pytest.mark.parametrize(
    "view",
    [
        tensor("0", 4, (5,), (1,)), tensor("0", 4, (2, 2), (3, 1)), tensor("0", 4, (2,), (1,), offset=3),
        tensor("0", 4, (1000000, 1000000), (0, 0)), tensor("0", 4, (5,), (0,)), tensor("0", 4, (2,), (-1,), offset=3),
        tensor("0", 4, (-2,), (1,)), tensor("0", 4, (2,), (1,), offset=-1), tensor("0", 4, (2,), (1, 1)),
        tensor("0", 4, (), (), offset=4), tensor("0", 4, (2**40, 2**40), (1, 1)), tensor("0", 4, (1,) * 40, (1,) * 40),
        tensor("0", 4, (2,), (2**63,)), tensor("0", 4, (2,), (1,), extra=b"}"), tensor("1", 4, (4,), (1,)),
        tensor("0", 5, (4,), (1,)), tensor("0", 2**40, (2**40,), (1,)), tensor("../../data.pkl", 4, (4,), (1,)),
        tensor("0", 4, (4,), (1,), kind="HalfStorage"), storage("0", 4), b"K\x01", text("x"), b"N", b"]", b"}",
        b"ctorch\nFloatStorage\n",
    ],
)  # fmt: skip
def test_descriptions_are_checked_before_memory_is_taken(tmp_path, view):
    path = write(tmp_path / "x.bin", described(a=view), {"0": bytes(16)})
    with pytest.raises(FileError) as caught:
        TorchFile(path)
    assert caught.value.kind == "corrupt"


@pytest.mark.parametrize("kind", ["DoubleStorage", "LongStorage", "ByteStorage", "ComplexFloatStorage"])
def test_other_types_are_named(tmp_path, kind):
    error = refused(write(tmp_path / "x.bin", described(a=tensor("0", 1, (), (), kind=kind)), {"0": bytes(8)}))
    assert error.kind == "unsupported_dtype"
    assert kind in error.message


@pytest.mark.parametrize(
    "description",
    [
        b"", b".", b"\x80\x02", b"\x80\x02}", b"\x80\x02t.", b"\x80\x02h\x05.", b"\x80\x02u.", b"\x80\x02K\x01Q.",
        b"\x80\x02].", b"\x80\x02K\x01.", b"\x80\x02(t.", b"\xff\xff", b"\x80\x02}(K\x01u.", b"\x80\x02}K\x01Ns.",
        b"\x80\x02X\xff\xff\xff\x7fabc.", b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7fabc.", b"\x80\x02\x93.",
        b"\x80\x04K\x01K\x01\x93.", b"\x80\x02a.", b"\x80\x02(e.",
    ],
)  # fmt: skip
def test_damaged_descriptions(description):
    with pytest.raises(FileError):
        read_description(description)


@pytest.mark.filterwarnings("ignore:invalid escape:DeprecationWarning")  # from pickletools, for odd names
@settings(max_examples=300)
@given(st.data())
def test_any_change_of_a_description_is_read_or_refused(data):
    whole = bytearray(described(a=tensor("0", 4, (2, 2), (2, 1)), b=tensor("1", 3, (3,), (1,))))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(FileError):
        read_description(bytes(whole))


def test_memory_and_time_are_bounded(tmp_path):
    started = time.monotonic()
    huge_memo = b"\x80\x02}r\xff\xff\xff\x7f."
    assert read_description(huge_memo) == {}
    long = write(tmp_path / "long.bin", b"\x80\x02" + b"}" * MAX_PICKLE_BYTES, {})
    assert "larger than" in refused(long).message
    deep = b"\x80\x02}" + text("a") + b")" + b"\x85" * 100_000 + b"s."
    with pytest.raises(FileError):
        read_description(deep)
    assert time.monotonic() - started < 5


def test_the_tests_write_what_pickletools_reads():
    ours = described(a=tensor("0", 4, (2, 2), (2, 1)))
    assert [opcode.name for opcode, _, _ in pickletools.genops(ours)][-1] == "STOP"
    assert pickle.loads(b"\x80\x02ccollections\nOrderedDict\n)R.") == OrderedDict()
