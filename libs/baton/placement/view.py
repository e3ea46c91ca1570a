"""What the router believes of each worker: its last heartbeat, plus what was assigned since."""

from __future__ import annotations

from dataclasses import dataclass, field

from baton.placement.index import Worker
from baton.protocol.liveness import Heartbeat, Load, Role, State

# An assignment that no heartbeat has acknowledged by then never arrived.
UNACKNOWLEDGED_S = 5.0

Key = tuple[str, int]  # request, attempt


@dataclass(slots=True)
class Assignment:
    """A placement's weight on one worker, until its heartbeat shows it."""

    compute_tokens: int  # tokens to prefill there
    blocks: int  # KV blocks it will hold
    at: float


@dataclass(slots=True)
class WorkerView:
    """One live worker. Its load is its last heartbeat's plus the assignments that one did not know yet."""

    beat: Heartbeat
    assigned: dict[Key, Assignment] = field(default_factory=dict)

    @property
    def key(self) -> Worker:
        return (self.beat.id, self.beat.epoch)

    @property
    def load(self) -> Load:
        return self.beat.load or Load()

    @property
    def sequences(self) -> int:
        return self.load.running + self.load.waiting + len(self.assigned)

    @property
    def queued_tokens(self) -> int:
        return self.load.waiting_tokens + sum(entry.compute_tokens for entry in self.assigned.values())

    @property
    def blocks_total(self) -> int:
        return self.beat.worker.num_blocks if self.beat.worker else 0

    @property
    def blocks_free(self) -> int:
        held = self.load.blocks_used + sum(entry.blocks for entry in self.assigned.values())
        return self.blocks_total - held

    @property
    def block_size(self) -> int:
        return self.beat.worker.geometry.block_size if self.beat.worker else 1

    @property
    def fingerprint(self) -> str:
        return self.beat.worker.fingerprint if self.beat.worker else ""


class ClusterView:
    """All workers by id. Assignments leave with the heartbeat that shows them, with `Placed`, or in time.

    So the view of an idle cluster is zero by construction.
    """

    def __init__(self) -> None:
        self.workers: dict[str, WorkerView] = {}

    def heard(self, beat: Heartbeat) -> None:
        """Takes a worker's heartbeat; a newer epoch starts empty."""
        view = self.workers.get(beat.id)
        if view is None or view.beat.epoch != beat.epoch:
            self.workers[beat.id] = WorkerView(beat)
            return
        view.beat = beat
        for request, attempt in beat.load.placements if beat.load else ():
            view.assigned.pop((request, attempt), None)

    def left(self, worker: str, epoch: int) -> None:
        view = self.workers.get(worker)
        if view is not None and view.beat.epoch == epoch:
            del self.workers[worker]

    def ready(self, role: Role) -> list[WorkerView]:
        """Workers of a role that take new work."""
        return [
            view
            for view in self.workers.values()
            if view.beat.role is role and view.beat.state is State.READY and view.beat.worker is not None
        ]

    def assign(self, view: WorkerView, key: Key, assignment: Assignment) -> None:
        view.assigned[key] = assignment

    def placed(self, key: Key) -> None:
        """A placement is over."""
        for view in self.workers.values():
            view.assigned.pop(key, None)

    def expire(self, now: float) -> None:
        for view in self.workers.values():
            late = [key for key, entry in view.assigned.items() if now - entry.at > UNACKNOWLEDGED_S]
            for key in late:
                del view.assigned[key]
