"""GGUF files: good ones read as they were written, wrong ones refused in one line."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import gguf_builder as build
import numpy as np
import pytest
from gguf_builder import Gguf, Tensor, tiny_llama
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.models.config import from_gguf, inverse_frequencies
from baton.models.dequant import dequantise
from baton.models.errors import ModelError, ModelFileError
from baton.models.gguf import GgmlType, GgufFile


def test_everything_that_the_reference_writes_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "written.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -100)
    writer.add_uint16("a.u16", 60_000)
    writer.add_int16("a.i16", -30_000)
    writer.add_uint32("a.u32", 4_000_000_000)
    writer.add_int32("a.i32", -2_000_000_000)
    writer.add_float32("a.f32", 0.5)
    writer.add_uint64("a.u64", 2**63)
    writer.add_int64("a.i64", -(2**62))
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.yes", True)
    writer.add_bool("a.no", False)
    writer.add_string("a.text", "naïve 🙂\n")
    writer.add_array("a.strings", ["", "Ġ the", "日本"])
    writer.add_array("a.ints", [1, -2, 3])
    writer.add_array("a.bools", [True, False])
    writer.add_custom_alignment(64)
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    halves = np.arange(5, dtype=np.float16)
    writer.add_tensor("matrix", matrix)
    writer.add_tensor("halves", halves)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = GgufFile.open(path)

    assert file.metadata["general.architecture"] == "llama"
    plain = {key: value for key, value in file.metadata.items() if key in ("a.u8", "a.i8", "a.u16", "a.i16")}
    assert plain == {"a.u8": 200, "a.i8": -100, "a.u16": 60_000, "a.i16": -30_000}
    assert file.metadata["a.u32"] == 4_000_000_000
    assert file.metadata["a.i32"] == -2_000_000_000
    assert file.metadata["a.f32"] == 0.5
    assert file.metadata["a.u64"] == 2**63
    assert file.metadata["a.i64"] == -(2**62)
    assert file.metadata["a.f64"] == 0.1
    assert file.metadata["a.yes"] is True
    assert file.metadata["a.no"] is False
    assert file.metadata["a.text"] == "naïve 🙂\n"
    assert file.metadata["a.strings"] == ["", "Ġ the", "日本"]
    assert file.metadata["a.ints"].tolist() == [1, -2, 3]
    assert file.metadata["a.bools"].tolist() == [True, False]
    assert list(file.tensors) == ["matrix", "halves"]
    info = file.tensors["matrix"]
    assert (info.shape, info.type, info.nbytes, info.offset % 64) == ((2, 3), GgmlType.F32, 24, 0)
    assert file.raw("matrix").tobytes() == matrix.tobytes()
    assert file.raw("halves").tobytes() == halves.tobytes()


def test_the_real_file_reads_as_the_reference_reads_it(smollm2: Path) -> None:
    file = GgufFile.open(smollm2)
    reader = gguf.GGUFReader(smollm2)

    assert [t.name for t in reader.tensors] == list(file.tensors)
    for tensor in reader.tensors:
        info = file.tensors[tensor.name]
        assert info.shape == tuple(int(extent) for extent in tensor.shape[::-1])
        assert info.type == tensor.tensor_type.value
        assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
    for key, fields in reader.fields.items():
        if key.startswith("GGUF.") or len(fields.data) > 1_000:
            continue  # the file's own counts; and the vocabulary, which takes the reference seconds
        value = file.metadata[key]
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == fields.contents()
    assert (
        len(file.metadata["tokenizer.ggml.tokens"])
        == len(file.metadata["tokenizer.ggml.token_type"])
        == 49_152
    )
    assert file.metadata["tokenizer.ggml.merges"][1] == "Ġ a"


def test_raw_bytes_cannot_be_written(tmp_path: Path) -> None:
    file = GgufFile.open(tiny_llama().write(tmp_path))
    with pytest.raises(ValueError, match="read-only"):
        file.raw("output_norm.weight")[0] = 1


def test_version_2_and_nested_arrays_are_read(tmp_path: Path) -> None:
    inner = struct.pack("<IQ2i", 5, 2, 7, 8)
    nested = build.ARRAY, struct.pack("<IQ", build.ARRAY, 2) + inner + inner
    path = Gguf([("nested", nested)], version=struct.pack("<I", 2)).write(tmp_path)
    assert [part.tolist() for part in GgufFile.open(path).metadata["nested"]] == [[7, 8], [7, 8]]


def test_a_lost_tensor_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="has no tensor 'other'"):
        GgufFile.open(tiny_llama().write(tmp_path)).raw("other")


def with_key(key: str, value: tuple[int, bytes]) -> Gguf:
    return Gguf([(key, value)])


def with_tensors(*tensors: Tensor) -> Gguf:
    return Gguf([], list(tensors))


def array_of(kind: int, count: int, body: bytes = b"") -> tuple[int, bytes]:
    return build.ARRAY, struct.pack("<IQ", kind, count) + body


def nested_array(depth: int) -> tuple[int, bytes]:
    return build.ARRAY, struct.pack("<IQ", build.ARRAY, 1) * depth + struct.pack("<IQ", build.U32, 0)


HOSTILE: dict[str, tuple[Callable[[], Gguf], str]] = {
    "not gguf": (lambda: Gguf(magic=b"PK\x03\x04"), "is not a GGUF file"),
    "big-endian": (lambda: Gguf(version=struct.pack(">I", 3)), "big-endian"),
    "version 1": (lambda: Gguf(version=struct.pack("<I", 1)), "version 1; versions 2 and 3"),
    "version 4": (lambda: Gguf(version=struct.pack("<I", 4)), "version 4"),
    "2^63 tensors": (lambda: Gguf(tensor_count=2**63), "claims 9223372036854775808 tensors"),
    "2^63 keys": (lambda: Gguf(key_count=2**63), "claims 9223372036854775808 metadata keys"),
    "more keys than there are": (
        lambda: Gguf([("k" * 4_000, build.u32(1))], key_count=200),
        "is cut off in|appears twice",
    ),
    "huge key": (lambda: Gguf([("k" * 70_000, build.u32(1))]), "a metadata key is 70000 bytes long"),
    "string beyond the file": (
        lambda: with_key("k", (build.STRING, struct.pack("<Q", 2**63 - 1))),
        "cut off in the value of 'k'",
    ),
    "string beyond all numbers": (
        lambda: with_key("k", (build.STRING, struct.pack("<Q", 2**64 - 1))),
        "cut off in the value of 'k'",
    ),
    "key twice": (lambda: Gguf([("k", build.u32(1)), ("k", build.u32(1))]), "'k' appears twice"),
    "unknown value type": (lambda: with_key("k", (13, b"")), "'k' has the unknown type 13"),
    "unknown element type": (lambda: with_key("k", array_of(77, 0)), "an array of the unknown type 77"),
    "2^63 numbers": (lambda: with_key("k", array_of(build.U64, 2**63)), "claims 9223372036854775808 items"),
    "2^63 strings": (lambda: with_key("k", array_of(build.STRING, 2**63)), "claims 9223372036854775808"),
    "2^63 arrays": (lambda: with_key("k", array_of(build.ARRAY, 2**63)), "claims 9223372036854775808"),
    "endless string in an array": (
        lambda: with_key("k", array_of(build.STRING, 2, build.string("a") + struct.pack("<Q", 2**62))),
        "cut off in string 1 of 'k'",
    ),
    "array that ends in a length": (
        lambda: with_key("k", array_of(build.STRING, 4, build.string("a" * 24) + bytes(3))),
        "cut off in string",
    ),
    "arrays in arrays in arrays": (lambda: with_key("k", nested_array(40)), "nests arrays more than 4 deep"),
    "too many inner arrays": (
        lambda: with_key("k", array_of(build.ARRAY, 70_000, struct.pack("<IQ", build.U32, 0) * 70_000)),
        "more than 65536 inner arrays",
    ),
    "not UTF-8": (lambda: with_key("k", build.text(b"\xff\xfe")), "the value of 'k' is not UTF-8"),
    "not UTF-8 in an array": (
        lambda: with_key("k", array_of(build.STRING, 1, build.string(b"\xff"))),
        "string 0 of 'k' is not UTF-8",
    ),
    "alignment 0": (lambda: with_key("general.alignment", build.u32(0)), "general.alignment is 0"),
    "alignment 48": (lambda: with_key("general.alignment", build.u32(48)), "alignment is 48, not a power"),
    "alignment as text": (lambda: with_key("general.alignment", build.text("32")), "alignment is '32'"),
    "no dimensions": (lambda: with_tensors(Tensor("t", [], b"")), "has 0 dimensions"),
    "five dimensions": (lambda: with_tensors(Tensor("t", [1] * 5, bytes(4))), "has 5 dimensions"),
    "no tensor where one should be": (lambda: Gguf(tensor_count=1, alignment=256), "has 0 dimensions"),
    "an empty dimension": (lambda: with_tensors(Tensor("t", [4, 0], b"")), "empty shape \\[0, 4\\]"),
    "2^252 values": (lambda: with_tensors(Tensor("t", [2**63] * 4, bytes(4))), "is cut off: tensor 't'"),
    "unread type": (lambda: with_tensors(Tensor("t", [256], bytes(66), type=16)), "type IQ2_XXS; read are"),
    "unknown type": (lambda: with_tensors(Tensor("t", [4], bytes(16), type=99)), "type number 99"),
    "half a block": (
        lambda: with_tensors(Tensor("t", [16], bytes(18), type=2)),
        "rows of 16 values are no whole Q4_0 blocks",
    ),
    "tensor twice": (
        lambda: with_tensors(Tensor("t", [4], bytes(16)), Tensor("t", [4], bytes(16))),
        "'t' appears twice",
    ),
    "misaligned": (lambda: with_tensors(Tensor("t", [4], bytes(64), offset=4)), "not a multiple of 32"),
    "beyond the file": (lambda: with_tensors(Tensor("t", [4], bytes(16), offset=2**40)), "is cut off"),
    "offset wraps around": (
        lambda: with_tensors(Tensor("t", [4], bytes(16), offset=2**64 - 32)),
        "is cut off",
    ),
    "overlapping": (
        lambda: with_tensors(Tensor("a", [16], bytes(64)), Tensor("b", [16], bytes(64), offset=32)),
        "tensors 'a' and 'b' overlap",
    ),
    "a name of many lines": (
        lambda: with_key("k\n" * 300, (13, b"")),
        r"metadata 'k\\nk\\n.*\.\.\.' has the unknown type",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_gets_one_clear_line(case: str, tmp_path: Path) -> None:
    make, message = HOSTILE[case]
    path = make().write(tmp_path)
    with pytest.raises(ModelFileError, match=message) as caught:
        GgufFile.open(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 0.999])
def test_a_real_file_cut_short_is_told(share: float, smollm2: Path, tmp_path: Path) -> None:
    size = int(smollm2.stat().st_size * share)
    path = tmp_path / "cut.gguf"
    with smollm2.open("rb") as source, path.open("wb") as target:
        target.write(source.read(min(size, 4_000_000)))  # past the header what counts is the size
        target.truncate(size)
    with pytest.raises(ModelFileError, match="is empty" if share == 0 else "is cut off"):
        GgufFile.open(path)


def test_what_is_no_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="No such file"):
        GgufFile.open(tmp_path / "missing.gguf")
    with pytest.raises(ModelFileError, match="not a regular file"):
        GgufFile.open(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelFileError, match="not a regular file"):
        GgufFile.open(tmp_path / "pipe")
    with pytest.raises(ModelFileError, match="cannot be read"):
        GgufFile.open("a\0b")


GOOD = tiny_llama(tied=False).bytes()
EXTREMES = [0, 1, 2, 255, 2**16, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1]
PLACES = st.integers(0, len(GOOD) - 1)
MUTATION = st.one_of(
    st.tuples(st.just("byte"), PLACES, st.integers(0, 255)),
    st.tuples(st.just("word"), PLACES, st.sampled_from(EXTREMES)),
    st.tuples(st.just("insert"), PLACES, st.integers(0, 255)),
    st.tuples(st.just("cut"), PLACES, st.just(0)),
)


def mutated(data: bytes, mutations: list[tuple[str, int, int]]) -> bytes:
    for kind, place, value in mutations:
        if kind == "byte":
            data = data[:place] + bytes([value]) + data[place + 1 :]
        elif kind == "word":
            data = data[:place] + value.to_bytes(8, "little") + data[place + 8 :]
        elif kind == "insert":
            data = data[:place] + bytes([value]) + data[place:]
        else:
            data = data[:place]
    return data


@settings(max_examples=400, deadline=5_000)
@given(mutations=st.lists(MUTATION, min_size=1, max_size=4))
def test_any_damage_is_read_or_refused(
    mutations: list[tuple[str, int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(mutated(GOOD, mutations))
    try:
        file = GgufFile.open(path)
        for name, info in file.tensors.items():
            assert dequantise(info.type, file.raw(name), info.shape).shape == info.shape
        config = from_gguf(file)
        assert len(inverse_frequencies(config.rope)[0]) == config.head_dim // 2
    except ModelError as error:
        assert "\n" not in str(error)
        assert len(str(error)) < 1_000
