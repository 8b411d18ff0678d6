"""Which implementation runs, and where block sizes come from."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from pallas_kernels import dispatch, tuning
from pallas_kernels.dispatch import H200, Device, assume_device, call, choose, unsupported

CPU = Device("cpu", "cpu")
T4 = Device("gpu", "Tesla T4", (7, 5))
A100 = Device("gpu", "NVIDIA A100-SXM4-80GB", (8, 0))
B200 = Device("gpu", "NVIDIA B200", (10, 0))
AMD = Device("gpu", "AMD Instinct MI300X", None)
ALL = ("mosaic_gpu", "triton", "xla")


@pytest.mark.parametrize(
    ("device", "wanted"),
    [
        (CPU, ("xla",)), (T4, ("xla",)), (A100, ("triton", "xla")), (H200, ALL), (B200, ("triton", "xla")),
        (AMD, ("xla",)),
    ],
)  # fmt: skip
def test_the_device_decides(device, wanted):
    with assume_device(device):
        assert choose("op", ALL) == wanted
        assert choose("op", ALL, interpret=True) == ALL
        for name in ALL:
            if name in wanted:
                assert choose("op", ALL, name) == (name,)
            else:
                with pytest.raises(NotImplementedError, match=f"op: {name} kernels need .*; use implementation=None"):
                    choose("op", ALL, name)


def test_reasons_name_device_and_need():
    assert unsupported("triton", T4) == "triton kernels need compute capability 8.0 or later, and Tesla T4 has 7.5"
    assert "need an NVIDIA GPU, and the device is a cpu" in str(unsupported("mosaic_gpu", CPU))


def test_this_machine_is_seen_outside_of_assume_device():
    with assume_device(H200):
        assert dispatch.current_device() is H200
    assert dispatch.current_device().platform == "cpu"


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="op has no implementation 'cuda': use None or one of triton, xla"):
        choose("op", ("triton", "xla"), "cuda")


def _refuse(x, interpret):
    raise NotImplementedError("too small")


def _complain(x, interpret):
    raise ValueError("x is 1-dimensional")


def test_falls_through_what_is_not_implemented_and_nothing_else():
    with assume_device(H200):
        assert call("op", {"triton": _refuse, "xla": lambda x: x + 1}, 1) == 2
        with pytest.raises(ValueError, match="1-dimensional"):
            call("op", {"triton": _complain, "xla": lambda x: x + 1}, 1)
        with pytest.raises(NotImplementedError, match="triton: too small"):
            call("op", {"triton": _refuse, "xla": lambda x: x + 1}, 1, implementation="triton")


@dataclass(frozen=True)
class Blocks:
    rows: int = 16
    columns: int = 64


def test_a_measured_configuration_replaces_the_heuristic_of_its_key_alone(tmp_path):
    entry = {"key": {"tokens": 64, "dtype": "bfloat16"}, "config": {"rows": 32}, "us": 3.5}
    path = tuning.save("op", H200.kind, "0.11.2", [entry], root=tmp_path)
    assert path == tmp_path / "nvidia_h200" / "op.json"
    tuning.save("op", H200.kind, "0.11.2", [{**entry, "key": {"tokens": 128, "dtype": "bfloat16"}}], root=tmp_path)
    assert len(json.loads(path.read_text())["entries"]) == 2
    with assume_device(H200):
        assert tuning.lookup("op", {"dtype": "bfloat16", "tokens": 64}, Blocks(), tmp_path) == Blocks(32, 64)
        assert tuning.lookup("op", {"dtype": "bfloat16", "tokens": 32}, Blocks(), tmp_path) == Blocks()
    with assume_device(A100):
        assert tuning.lookup("op", {"dtype": "bfloat16", "tokens": 64}, Blocks(), tmp_path) == Blocks()


def test_a_field_that_is_gone_is_named(tmp_path):
    tuning.save("op", "cpu", "0", [{"key": {"a": 1}, "config": {"lanes": 1}, "us": 1.0}], root=tmp_path)
    with assume_device(CPU), pytest.raises(ValueError, match="lanes.*run python -m pallas_kernels.tune"):
        tuning.lookup("op", {"a": 1}, Blocks(), tmp_path)


@pytest.mark.parametrize(("size", "wanted"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_sizes_share_a_bucket(size, wanted):
    assert tuning.bucket(size) == wanted
