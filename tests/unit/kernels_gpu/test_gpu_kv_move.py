"""Blocks moved to a buffer and back, their checksums, and pages of another shape."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton_kernels.gpu.kv_move import checksum, gather_blocks, reshape_pages, scatter_blocks
from baton_kernels.gpu.pages import KvFormat, Pages, PageShape

SHAPE = PageShape(2, 2, 16, 80, "float16")  # 20,480 bytes: more than one program moves


def pool(shape: PageShape, blocks: int, device: str) -> Pages:
    raw = torch.randint(0, 256, (blocks, shape.block_bytes), dtype=torch.uint8, device=device)
    return Pages(raw, shape)


def ints(values: list[int], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_there_and_back(device: str) -> None:
    source, target = pool(SHAPE, 9, device), pool(SHAPE, 7, device)
    before = target.raw.clone()
    staging = torch.empty(4, SHAPE.block_bytes, dtype=torch.uint8, device=device)
    sums, again = (
        torch.zeros(3, dtype=torch.int64, device=device),
        torch.zeros(3, dtype=torch.int64, device=device),
    )
    gather_blocks(source, ints([8, 0, 3], device), staging, sums)
    assert torch.equal(staging[:3], source.raw[[8, 0, 3]])
    scatter_blocks(target, ints([1, 6, 2], device), staging, again)
    assert torch.equal(target.raw[[1, 6, 2]], source.raw[[8, 0, 3]])
    assert torch.equal(target.raw[[0, 3, 4, 5]], before[[0, 3, 4, 5]])
    assert torch.equal(sums, again)
    assert sums.cpu().tolist() == checksum(staging[:3].cpu().numpy()).tolist()


def test_a_checksum_sees_every_change() -> None:
    block = np.random.randint(0, 256, (1, 4_096)).astype(np.uint8)
    whole = checksum(block)[0]
    for at in (0, 1, 2_047, 4_095):
        changed = block.copy()
        changed[0, at] ^= 0x80
        assert checksum(changed)[0] != whole
    swapped = block.copy()
    swapped[0, :8] = block[0, [4, 5, 6, 7, 0, 1, 2, 3]]
    assert (checksum(swapped)[0] != whole) == (swapped != block).any()
    assert checksum(np.zeros((1, 4_096), dtype=np.uint8))[0] != 1


@pytest.mark.parametrize("format", ["float16", "int8"])
def test_pages_of_another_shape(format: KvFormat, device: str) -> None:
    """Blocks of 16 to blocks of 64, the second half of the heads: what the second of two ranks takes."""
    one, other = PageShape(1, 4, 16, 32, format), PageShape(1, 2, 64, 32, format)
    source, target = pool(one, 8, device), pool(other, 3, device)
    table, to = [5, 0, 7, 2, 1], [2, 0]
    tokens = 70
    reshape_pages(source, ints(table, device), target, ints(to, device), tokens, heads=2, first_source=2)
    for token in (0, 15, 16, 63, 64, 69):
        block, place = source.raw[table[token // 16]], token % 16
        got, there = target.raw[to[token // 64]], token % 64
        for begin, end, values, dtype in (
            (0, one.value_bytes, 32, source.values.dtype),
            (one.value_bytes, one.block_bytes, 1, torch.float32),
        ):
            if begin == end:
                continue
            mine = block[begin:end].view(dtype).view(1, 2, 4, 16, values)[:, :, 2:, place]
            size = other.value_bytes if begin == 0 else other.block_bytes
            first = 0 if begin == 0 else other.value_bytes
            yours = got[first:size].view(dtype).view(1, 2, 2, 64, values)[:, :, :, there]
            assert (
                torch.equal(mine.nan_to_num(7.0), yours.nan_to_num(7.0))
                if dtype.is_floating_point
                else (torch.equal(mine, yours))
            )


def test_pages_that_do_not_fit_are_refused(device: str) -> None:
    one, other = pool(SHAPE, 1, device), pool(PageShape(2, 2, 16, 80, "int8"), 1, device)
    with pytest.raises(ValueError, match="cannot become"):
        reshape_pages(one, ints([0], device), other, ints([0], device), 1, heads=1)
    with pytest.raises(ValueError, match="blocks of 100 bytes"):
        Pages(torch.zeros(1, 100, dtype=torch.uint8), SHAPE)
