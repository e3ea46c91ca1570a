"""Safetensors: what the reference writes is read back, anything else is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.models.errors import ModelFileError
from baton.models.safetensors_file import INDEX_NAME, SINGLE_NAME, SafetensorsModel


def packed(entries: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A file byte by byte."""
    header = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    size = len(header) if length is None else length
    return size.to_bytes(8, "little") + header + data


def entry(dtype: str, shape: list[Any], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_all_types_are_read_exactly(tmp_path: Path) -> None:
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    tensors = {
        "single": torch.randn(3, 5, generator=torch.Generator().manual_seed(1)),
        "half": every.view(torch.float16).reshape(256, 256),
        "brain": every.clone().view(torch.bfloat16).reshape(256, 256),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
    }
    safetensors.torch.save_file(tensors, tmp_path / SINGLE_NAME, metadata={"format": "pt"})
    model = SafetensorsModel.open(tmp_path)
    assert set(model.tensors) == set(tensors)
    for name, tensor in tensors.items():
        ours = model.read(name)
        assert ours is not None
        assert (ours.dtype, ours.shape) == (np.float32, tuple(tensor.shape))
        if name == "half":  # numpy and torch differ in the payload of a NaN
            np.testing.assert_array_equal(ours, tensor.float().numpy())
        else:
            assert ours.tobytes() == tensor.float().numpy().tobytes()
    assert model.read("other") is None


def test_a_value_read_is_the_callers_own(tmp_path: Path) -> None:
    safetensors.numpy.save_file({"a": np.ones(3, dtype=np.float32)}, tmp_path / SINGLE_NAME)
    model = SafetensorsModel.open(tmp_path / SINGLE_NAME)
    first = model.read("a")
    assert first is not None
    first[0] = 7
    second = model.read("a")
    assert second is not None
    assert second.tolist() == [1, 1, 1]


def test_shards_are_one_model(tmp_path: Path) -> None:
    a, b = np.arange(4, dtype=np.float32), np.arange(6, dtype=np.float16).reshape(2, 3)
    safetensors.numpy.save_file({"a": a}, tmp_path / "model-00001-of-00002.safetensors")
    safetensors.numpy.save_file({"b": b}, tmp_path / "model-00002-of-00002.safetensors")
    places = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 28}, "weight_map": places}))
    model = SafetensorsModel.open(tmp_path)
    assert list(model.tensors) == ["a", "b"]
    np.testing.assert_array_equal(model.read("a"), a)
    np.testing.assert_array_equal(model.read("b"), b.astype(np.float32))


EIGHT = bytes(8)
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "shorter than its length": (b"\x10\0\0", "is cut off in its header"),
    "header of 2^64 - 1 bytes": (packed({}, length=2**64 - 1), "is not a safetensors file"),
    "header beyond the file": (packed({}, length=500), "is cut off in its header"),
    "no JSON": (packed(b"not json"), "its header is damaged"),
    "not an object": (packed([1, 2]), "its header is damaged"),
    "not UTF-8": (packed(b'{"\xff": 1}'), "its header is damaged"),
    "deep JSON": (packed(b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}"), "its header is damaged"),
    "an entry that is none": (packed({"a": 5}), "its header is damaged"),
    "no dtype": (packed({"a": {"shape": [2], "data_offsets": [0, 8]}}, EIGHT), "dtype"),
    "negative shape": (packed({"a": entry("F32", [-2], 0, 8)}, EIGHT), "its header is damaged"),
    "fractional shape": (packed({"a": entry("F32", [2.5], 0, 8)}, EIGHT), "its header is damaged"),
    "three offsets": (
        packed({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}}, EIGHT),
        "its header is damaged",
    ),
    "F64": (packed({"a": entry("F64", [1], 0, 8)}, EIGHT), "type 'F64'; read are F32, F16, BF16"),
    "I64": (packed({"a": entry("I64", [1], 0, 8)}, EIGHT), "type 'I64'"),
    "I32": (packed({"a": entry("I32", [2], 0, 8)}, EIGHT), "type 'I32'"),
    "U8": (packed({"a": entry("U8", [8], 0, 8)}, EIGHT), "type 'U8'"),
    "F8": (packed({"a": entry("F8_E4M3", [8], 0, 8)}, EIGHT), "type 'F8_E4M3'"),
    "bytes do not fill the shape": (
        packed({"a": entry("F32", [3], 0, 8)}, EIGHT),
        "8 bytes of F32 for \\[3\\]",
    ),
    "shape of 2^126 values": (packed({"a": entry("F32", [2**63 - 1] * 2, 0, 8)}, EIGHT), "8 bytes of F32"),
    "shape of many dimensions": (packed({"a": entry("F32", [1] * 99, 0, 4)}, EIGHT[:4]), "damaged"),
    "backwards": (packed({"a": entry("F32", [2], 8, 0)}, EIGHT), "-8 bytes of F32"),
    "beyond the file": (packed({"a": entry("F32", [4], 0, 16)}, EIGHT), "is cut off: tensor 'a'"),
    "far beyond the file": (packed({"a": entry("F32", [2], 2**62, 2**62 + 8)}, EIGHT), "leaves a hole"),
    "overlap": (
        packed({"a": entry("F32", [2], 0, 8), "b": entry("F32", [2], 4, 12)}, bytes(12)),
        "tensor 'b' overlaps another",
    ),
    "hole": (
        packed({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 8, 12)}, bytes(12)),
        "tensor 'b' leaves a hole",
    ),
    "bytes left over": (packed({"a": entry("F32", [1], 0, 4)}, EIGHT), "4 bytes that belong to no tensor"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_gets_one_clear_line(case: str, tmp_path: Path) -> None:
    data, message = HOSTILE[case]
    path = tmp_path / SINGLE_NAME
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=message) as caught:
        SafetensorsModel.open(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "sub/shard.safetensors",
        "/etc/shard.safetensors",
        "..\\outside.safetensors",
        "a\0.safetensors",
        "shard.bin",
        "",
    ],
)
def test_an_index_cannot_point_elsewhere(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    for place in (tmp_path / "outside.safetensors", folder / "sub" / "shard.safetensors"):
        safetensors.numpy.save_file({"a": np.ones(3, dtype=np.float32)}, place)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(ModelFileError, match="which is no file of this folder"):
        SafetensorsModel.open(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"weight_map": {}}, "names 0 files"),
        ({"weight_map": {"a": 5}}, "weight_map"),
        ({"weight": {}}, "weight_map"),
        ([], "Expected `object`"),
        ({"weight_map": {"a": "missing.safetensors"}}, "missing.safetensors: cannot be read"),
        ({"weight_map": {"b": "real.safetensors"}}, "tensor 'b' is not in real.safetensors"),
    ],
)
def test_a_wrong_index_is_told(index: Any, message: str, tmp_path: Path) -> None:
    safetensors.numpy.save_file({"a": np.ones(3, dtype=np.float32)}, tmp_path / "real.safetensors")
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=message):
        SafetensorsModel.open(tmp_path)


def test_a_folder_without_weights_is_told(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelFileError, match="holds neither"):
        SafetensorsModel.open(tmp_path)


GOOD = safetensors.numpy.save(
    {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(4, dtype=np.float16)}
)
PLACES = st.integers(0, len(GOOD) - 1)


@settings(max_examples=400, deadline=5_000)
@given(
    changes=st.lists(st.tuples(PLACES, st.binary(max_size=8)), max_size=3),
    cut=st.one_of(st.just(len(GOOD) + 99), PLACES),
)
def test_any_damage_is_read_as_the_reference_does_or_refused(
    changes: list[tuple[int, bytes]], cut: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    data = GOOD
    for place, new in changes:
        data = data[:place] + new + data[place + len(new) :]
    data = data[:cut]
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(data)
    try:
        model = SafetensorsModel.open(path)
    except ModelFileError as error:
        assert "\n" not in str(error)
        return
    expected = dict(safetensors.deserialize(data))
    assert set(expected) == set(model.tensors)
    for name, info in expected.items():
        stored = model.tensors[name]
        assert (stored.dtype, list(stored.shape)) == (info["dtype"], info["shape"])
        assert stored.data.tobytes() == bytes(info["data"])
        assert model.read(name) is not None
