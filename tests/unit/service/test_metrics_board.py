"""Whose figures are shown, and for how long."""

from __future__ import annotations

import pytest

from baton.protocol.liveness import Heartbeat, Role
from baton.protocol.stats import Family, Sample, Snapshot
from baton.telemetry.exposition import BadSnapshot, render
from baton_services.metrics.board import KEEP_S, Board


def _beat(epoch: int = 1) -> Heartbeat:
    return Heartbeat(role=Role.DECODE, id="decode-1", epoch=epoch)


def _figures(epoch: int = 1, done: float = 5, running: float = 2) -> Snapshot:
    return Snapshot(
        role="decode",
        id="decode-1",
        epoch=epoch,
        model="m",
        families=[
            Family("done", "counter", "", [Sample("_total", {}, done)]),
            Family("running", "gauge", "", [Sample("", {}, running)]),
        ],
    )


def _page(board: Board) -> dict[str, float]:
    """Metric name -> value; there is one process."""
    lines = render(board.snapshots(), more=board.up()).splitlines()
    return {line.split("{")[0]: float(line.split()[-1]) for line in lines if not line.startswith("#")}


def test_a_live_process_is_shown_with_its_newest_figures() -> None:
    board = Board()
    board.joined(_beat(), 0)
    assert _page(board) == {"baton_up": 1}
    board.take(_figures(done=5), 1)
    board.take(_figures(done=6), 2)
    board.joined(_beat(), 3)
    board.forget(1_000)
    assert _page(board) == {"baton_up": 1, "done_total": 6, "running": 2}


def test_a_gone_process_keeps_its_counters_a_minute_but_not_its_gauges() -> None:
    board = Board()
    board.joined(_beat(), 0)
    board.take(_figures(), 0)
    board.left(_beat(), 100)
    board.left(_beat(), 130)
    board.forget(100 + KEEP_S)
    assert _page(board) == {"baton_up": 0, "done_total": 5}
    board.forget(100 + KEEP_S + 0.1)
    assert _page(board) == {}


def test_a_process_that_comes_back_is_up_again() -> None:
    board = Board()
    board.joined(_beat(), 0)
    board.take(_figures(), 0)
    board.left(_beat(), 10)
    board.joined(_beat(), 20)
    board.forget(10 + KEEP_S + 1)
    assert _page(board) == {"baton_up": 1, "done_total": 5, "running": 2}


def test_a_new_epoch_starts_from_its_own_figures() -> None:
    board = Board()
    board.joined(_beat(1), 0)
    board.take(_figures(1, done=9), 0)
    board.joined(_beat(2), 1)
    board.left(_beat(1), 1)
    assert _page(board) == {"baton_up": 1}
    board.take(_figures(2, done=1), 2)
    board.take(_figures(1, done=10), 3)
    assert _page(board) == {"baton_up": 1, "done_total": 1, "running": 2}


def test_figures_ahead_of_their_heartbeat_wait_for_it() -> None:
    board = Board()
    board.take(_figures(), 0)
    assert _page(board) == {"baton_up": 0, "done_total": 5}
    board.joined(_beat(), 1)
    assert _page(board) == {"baton_up": 1, "done_total": 5, "running": 2}
    board.take(_figures(2, done=1), 2)
    assert _page(board) == {"baton_up": 0, "done_total": 1}
    board.joined(_beat(1), 3)
    assert _page(board)["baton_up"] == 0
    board.forget(2 + KEEP_S + 1)
    assert _page(board) == {}


def test_bad_figures_leave_the_page_as_it_was() -> None:
    board = Board()
    board.joined(_beat(), 0)
    board.take(_figures(), 0)
    bad = _figures(done=7)
    bad.families[0].name = "no good"
    with pytest.raises(BadSnapshot):
        board.take(bad, 1)
    assert _page(board)["done_total"] == 5
