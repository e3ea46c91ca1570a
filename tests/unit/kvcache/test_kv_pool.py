"""The pool file: private to its user, read-only to peers, gone with its owner, never half there."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.kvcache import pool as pools
from baton.kvcache.pool import KvPool, PoolError, checksum, remove_stale
from baton.protocol.liveness import Geometry

SHAPE = Geometry(block_size=16, block_bytes=4096, layers=2, kv_heads=1, head_dim=32, dtype="float16")


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[KvPool]:
    with_file = KvPool.create(tmp_path, "w1", SHAPE, 700, epoch=9)
    yield with_file
    with_file.close()


def test_a_peer_reads_what_the_owner_writes(pool: KvPool) -> None:
    reader = KvPool.open_readonly(pool.path, epoch=9)
    pool.data[3] = 7
    pool.generations[3] += 1
    assert reader.geometry == SHAPE
    assert (reader.num_blocks, reader.epoch) == (700, 9)
    assert bytes(reader.view(3)) == b"\x07" * 4096
    assert int(reader.generations[3]) == 1
    assert checksum(reader.view(3)) == checksum(b"\x07" * 4096)
    assert pool.data.ctypes.data % 4096 == 0


def test_a_peer_cannot_write(pool: KvPool) -> None:
    reader = KvPool.open_readonly(pool.path)
    with pytest.raises(ValueError, match="read-only"):
        reader.data[0, 0] = 1
    with pytest.raises(TypeError, match="read-only"):
        reader.view(0)[0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        reader.data.flags.writeable = True


def test_the_file_is_its_users_alone_and_named_by_worker_and_epoch(pool: KvPool) -> None:
    assert stat.S_IMODE(os.stat(pool.path).st_mode) == 0o600
    assert Path(pool.path).name == "baton-kv-w1-9.pool"


def test_pages_are_reserved_at_once(pool: KvPool) -> None:
    assert os.stat(pool.path).st_blocks * 512 >= 700 * 4096


def test_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(pools.os, "posix_fallocate", full)
    with pytest.raises(PoolError, match=r"--kv-memory-mb or choose another --shm-dir"):
        KvPool.create(tmp_path, "w", SHAPE, 8, epoch=1)
    assert list(tmp_path.iterdir()) == []


def test_more_than_the_tmpfs_holds_is_one_clear_error() -> None:
    room = os.statvfs("/dev/shm")
    blocks = room.f_blocks * room.f_frsize // (1 << 20) + 1
    huge = Geometry(block_size=16, block_bytes=1 << 20)
    with pytest.raises(PoolError, match=r"no room for a KV pool.*--kv-memory-mb"):
        KvPool.create("/dev/shm", f"test-{os.getpid()}", huge, blocks, epoch=1)
    assert not list(Path("/dev/shm").glob(f"*test-{os.getpid()}*"))


def test_a_missing_directory_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(PoolError, match="--shm-dir"):
        KvPool.create(tmp_path / "none", "w", SHAPE, 8, epoch=1)


def test_two_owners_of_one_name_and_epoch_are_refused(pool: KvPool, tmp_path: Path) -> None:
    with pytest.raises(PoolError, match="lives"):
        KvPool.create(tmp_path, "w1", SHAPE, 8, epoch=9)


@pytest.mark.parametrize("name", ["", "a/b", "..", "x" * 65])
def test_names_stay_inside_the_directory(name: str, tmp_path: Path) -> None:
    with pytest.raises(PoolError, match="named by"):
        KvPool.create(tmp_path, name, SHAPE, 8, epoch=1)


def test_closing_unlinks_and_held_views_stay_valid(tmp_path: Path) -> None:
    pool = KvPool.create(tmp_path, "w", SHAPE, 8, epoch=1)
    pool.data[1] = 5
    view = pool.view(1)
    pool.close()
    pool.close()
    assert not Path(pool.path).exists()
    assert bytes(view) == b"\x05" * 4096


def test_another_epoch_or_version_is_refused(pool: KvPool) -> None:
    with pytest.raises(PoolError, match="epoch 9, not 8"):
        KvPool.open_readonly(pool.path, epoch=8)
    with open(pool.path, "r+b") as file:
        file.seek(8)
        file.write(b"\xff")
    with pytest.raises(PoolError, match="not a KV pool"):
        KvPool.open_readonly(pool.path)


def test_a_cut_or_foreign_file_is_refused(pool: KvPool, tmp_path: Path) -> None:
    os.truncate(pool.path, 8192)
    with pytest.raises(PoolError, match="cut short"):
        KvPool.open_readonly(pool.path)
    (tmp_path / "short").write_bytes(b"x")
    (tmp_path / "other").write_bytes(b"x" * 9000)
    os.mkfifo(tmp_path / "fifo")
    for name in ("short", "other", "fifo"):
        with pytest.raises(PoolError, match="not a KV pool"):
            KvPool.open_readonly(tmp_path / name)
    (tmp_path / "link").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic"):
        KvPool.open_readonly(tmp_path / "link")
    with pytest.raises(FileNotFoundError):
        KvPool.open_readonly(tmp_path / "gone")


def test_slots_are_bounded_and_generations_decide(pool: KvPool) -> None:
    pool.generations[5] = 3
    assert pool.resolve(5, 3) is not None
    assert pool.resolve(5, 2) is None
    assert pool.resolve(-1, 0) is None
    assert pool.resolve(700, 0) is None
    for slot in (-1, 700):
        with pytest.raises(IndexError):
            pool.view(slot)


def test_a_private_pool_has_no_file() -> None:
    pool = KvPool.create_private(SHAPE, 4)
    pool.data[2] = 1
    assert pool.path == ""
    assert bytes(pool.view(2)) == b"\x01" * 4096
    pool.close()


def test_only_pools_without_an_owner_are_removed(pool: KvPool, tmp_path: Path) -> None:
    code = (
        "import sys, time; from baton.kvcache.pool import KvPool;"
        "from baton.protocol.liveness import Geometry;"
        "p = KvPool.create(sys.argv[1], 'dead', Geometry(block_size=16, block_bytes=4096), 4, epoch=1);"
        "print(p.path, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    path = owner.stdout.readline().strip()
    assert remove_stale(tmp_path) == []
    owner.send_signal(signal.SIGKILL)
    owner.wait(10)
    owner.stdout.close()
    assert remove_stale(tmp_path) == [path]
    assert Path(pool.path).exists()
