"""Cores shared by the workers of a machine: own ones always, idle neighbours' while they are idle."""

from __future__ import annotations

import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import native_llama
import pytest
import tiny_llama
from native_llama import equal_bits, library, piece, prefill

from baton.engine.plan import StepPlan
from baton.kvcache.pool import KvPool
from baton.runner import core_ledger
from baton.runner.core_ledger import CoreLedger
from baton.runner.native_runner import NativeRunner
from baton_kernels.cpu import library as c
from baton_kernels.cpu.build import best_variant
from baton_kernels.cpu.library import COp, CShape, Executor

HOLD = (
    "import sys, time\n"
    "from pathlib import Path\n"
    "from baton.runner.core_ledger import CoreLedger\n"
    "ledger = CoreLedger(Path(sys.argv[1]), 3)\n"
    "print(ledger.seat, flush=True)\n"
    "time.sleep(60)\n"
)


def seated(ledger: CoreLedger, most: int = 8) -> Executor:
    shape, ops = CShape(8, 1, 1, 8, 8, 1, 16, 8, 1e-6), [COp(c.EMBED, parts=1)]
    made = library(best_variant()).executor(shape, ops, most)
    made.join(ledger.address, ledger.seat)
    return made


def busy(ledger: CoreLedger, seconds: float) -> None:
    """Marks a seat as a step would."""
    struct.pack_into("<q", ledger._map, 64 * (ledger.seat + 1), time.monotonic_ns() + int(seconds * 1e9))


def test_idle_cores_are_borrowed_and_given_back(tmp_path: Path) -> None:
    first, second, third = (CoreLedger(tmp_path, cores) for cores in (2, 2, 3))
    one, two = seated(first), seated(second)
    assert (one.allowed(), two.allowed()) == (7, 7)
    busy(second, 60)
    assert one.allowed() == 2 + 2, "of the third one's three cores two go to the lower seat"
    busy(first, 60)
    assert two.allowed() == 2 + 1
    busy(third, 60)
    assert (one.allowed(), two.allowed()) == (2, 2)
    busy(third, -1)
    third.leave()
    assert (one.allowed(), two.allowed()) == (2, 2)
    busy(second, 0.05)
    time.sleep(0.06)
    assert one.allowed() == 4, "a mark that has passed is that of an idle worker"


def test_no_more_threads_than_there_are(tmp_path: Path) -> None:
    mine, neighbour = CoreLedger(tmp_path, 1), CoreLedger(tmp_path, 30)
    assert seated(mine, 2).allowed() == 2
    assert seated(neighbour, 16).allowed() == 16


def test_the_seat_of_a_killed_worker_is_taken_again(tmp_path: Path) -> None:
    mine = CoreLedger(tmp_path, 1)
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    seat = int(other.stdout.readline())
    assert seat != mine.seat
    assert seated(mine).allowed() == 4
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert CoreLedger(tmp_path, 1).seat == seat
    assert seated(mine).allowed() == 2


def test_a_full_ledger_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_ledger, "SEATS", 2)
    kept = [CoreLedger(tmp_path, 1) for _ in range(2)]
    with pytest.raises(OSError, match="taken"):
        CoreLedger(tmp_path, 1)
    kept[0].leave()
    kept[0].leave()
    assert CoreLedger(tmp_path, 1).seat == kept[0].seat


def test_answers_are_the_same_with_any_cores(tmp_path: Path) -> None:
    """A neighbour that comes and goes between the operations of a step changes the threads, not the bits."""
    folder = tiny_llama.save(tmp_path / "model")
    tokens, blocks = list(range(3, 203)), list(range(20))
    expected = prefill(native_llama.runner(folder), tokens, blocks)
    neighbour = CoreLedger(tmp_path, 1)
    made = NativeRunner(native_llama.settings(folder, threads=1), ledger=tmp_path)
    made.attach(KvPool.create_private(made.geometry, 64))
    for number in range(30):
        busy(neighbour, 0.002 if number % 2 else -1)
        logits = made.logits(StepPlan(1, [piece(tokens, 0, len(tokens), blocks)]))
        assert equal_bits(logits[0], expected)
    made.close()
    assert CoreLedger(tmp_path, 1).seat == neighbour.seat + 1, "the runner has left its seat"


def test_the_last_to_leave_removes_the_file(tmp_path: Path) -> None:
    first, second = CoreLedger(tmp_path, 1), CoreLedger(tmp_path, 1)
    first.leave()
    assert list(tmp_path.iterdir())
    second.leave()
    assert not list(tmp_path.iterdir())
    assert CoreLedger(tmp_path, 1).seat == 0
