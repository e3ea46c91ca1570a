"""Block hashes and fingerprints are the same on every machine, and differ where they must."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from baton.kvcache.fingerprint import fingerprint, weights_hash
from baton.kvcache.hashing import block_hash, chain, root_hash
from baton.protocol.base import pack_tokens

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=80)


def test_a_block_hash_is_xxh3_over_parent_and_little_endian_tokens() -> None:
    raw = (7).to_bytes(8, "little") + (1).to_bytes(4, "little") + (2**31).to_bytes(4, "little")
    assert block_hash(7, pack_tokens([1, 2**31])) == xxhash.xxh3_64_intdigest(raw)


def test_hashes_do_not_change_between_releases() -> None:
    root = root_hash("f" * 32, "salt")
    assert root == 0x9B826DDD8686ADE7
    assert chain(root, np.arange(32, dtype=np.uint32), 16).tolist() == [
        0x117FD3EB5E866FE9,
        0x199A1D63F545ED0F,
    ]


@given(TOKENS, TOKENS)
def test_chaining_goes_on_where_it_stopped(head: list[int], tail: list[int]) -> None:
    head = head[: len(head) // 8 * 8]
    tokens = np.array(head + tail, dtype=np.uint32)
    whole = chain(1, tokens, 8)
    first = chain(1, tokens[: len(head)], 8)
    rest = chain(int(first[-1]) if len(first) else 1, tokens[len(head) :], 8)
    assert whole.tolist() == first.tolist() + rest.tolist()
    assert len(whole) == len(tokens) // 8


def test_equal_blocks_after_different_parents_differ() -> None:
    tokens = np.zeros(48, dtype=np.uint32)
    assert len(set(chain(root_hash("a"), tokens, 16).tolist())) == 3


def test_roots_keep_fingerprint_and_salt_apart() -> None:
    roots = [root_hash("ab", "c"), root_hash("a", "bc"), root_hash("abc", ""), root_hash("", "abc")]
    assert len(set(roots)) == 4
    assert root_hash("a", "\ud800") != root_hash("a", "")


def test_big_endian_and_wide_arrays_hash_like_others() -> None:
    plain = np.arange(16, dtype="<u4")
    assert chain(0, plain.astype(">u4"), 16).tolist() == chain(0, plain, 16).tolist()


def test_every_part_of_a_fingerprint_counts() -> None:
    base: dict[str, Any] = {
        "weights": "w",
        "dtype": "float16",
        "kv_dtype": "float16",
        "block_size": 16,
        "contract": 1,
    }
    others: list[dict[str, Any]] = [
        {"weights": "v"},
        {"dtype": "float32"},
        {"kv_dtype": "float32"},
        {"block_size": 32},
        {"contract": 2},
        {"layout": "other"},
        {"tuning": "avx2"},
        {"tensor_parallel": 2},
    ]
    names = {fingerprint(**base)} | {fingerprint(**base | other) for other in others}
    assert len(names) == len(others) + 1
    assert all(len(name) == 32 for name in names)


def test_weights_are_hashed_once_and_again_when_they_change(tmp_path: Path) -> None:
    file, cache = tmp_path / "model.gguf", tmp_path / "cache"
    file.write_bytes(b"one")
    os.utime(file, ns=(1, 1))
    first = weights_hash(file, cache)
    assert first == xxhash.xxh3_128_hexdigest(b"one") == weights_hash(file)

    file.write_bytes(b"two")  # same size; same mtime, so the kept hash is believed
    os.utime(file, ns=(1, 1))
    assert weights_hash(file, cache) == first
    os.utime(file, ns=(2, 2))
    assert weights_hash(file, cache) == xxhash.xxh3_128_hexdigest(b"two")


def test_a_damaged_note_of_a_hash_is_not_believed(tmp_path: Path) -> None:
    file, cache = tmp_path / "model.gguf", tmp_path / "cache"
    file.write_bytes(b"one")
    expected = weights_hash(file, cache)
    [note] = (cache / "hashes").iterdir()
    note.write_bytes(b"{")
    assert weights_hash(file, cache) == expected


def test_a_folder_is_hashed_by_weights_and_config(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"ab")
    (tmp_path / "b.safetensors").write_bytes(b"c")
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "README.md").write_bytes(b"x")
    first = weights_hash(tmp_path)
    (tmp_path / "README.md").write_bytes(b"y")
    assert weights_hash(tmp_path) == first
    (tmp_path / "a.safetensors").write_bytes(b"a")
    (tmp_path / "b.safetensors").write_bytes(b"bc")  # the same bytes, cut elsewhere
    assert weights_hash(tmp_path) != first


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no weights"):
        weights_hash(tmp_path)
