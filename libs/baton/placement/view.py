"""What the router believes of each worker: its last heartbeat, plus what was assigned since."""

from __future__ import annotations

import itertools

import msgspec

from baton.placement.index import Worker
from baton.protocol.liveness import Heartbeat, Load, Role, State

# What is run at once and that no heartbeat has acknowledged by then never arrived.
UNACKNOWLEDGED_S = 5.0
# A sequence that is handed over arrives only once its prompt is being read elsewhere.
UNOFFERED_S = 60.0

Key = tuple[str, int]  # request, attempt


class Assignment(msgspec.Struct):
    """A placement's weight on one worker, until its heartbeat shows it."""

    compute_tokens: int  # tokens to prefill there
    blocks: int  # KV blocks it will hold
    expires: float  # when it counts as never arrived
    decodes: bool = True  # it stays there until the request ends
    sequences: int = 1  # choices of one prompt
    priority: int = 0


class WorkerView:
    """One live worker. Its load is its last heartbeat's plus the assignments that one did not know yet.

    The sums are kept, not made when read: a placement reads them of every worker.
    """

    __slots__ = (
        "assigned",
        "beat",
        "block_size",
        "blocks_free",
        "blocks_total",
        "classes",
        "excluded_until",
        "fingerprint",
        "key",
        "max_batch_tokens",
        "max_sequences",
        "queued_tokens",
        "role",
        "sequences",
        "taken",
        "turn",
        "usable",
    )

    def __init__(self, beat: Heartbeat) -> None:
        self.key: Worker = (beat.id, beat.epoch)
        self.role = beat.role
        self.assigned: dict[Key, Assignment] = {}
        self.taken: dict[Key, Assignment] = {}  # acknowledged and not over, as far as known
        self.excluded_until = -1  # the heartbeat that lets it back in
        self.classes: dict[int, list[int]] = {}  # priority -> how many of those two, and their blocks
        self.turn = 0  # when it was last chosen: among equals the one longest ago goes first
        self.heard(beat)

    def heard(self, beat: Heartbeat) -> None:
        """Takes a newer heartbeat of the same epoch."""
        self.beat = beat
        info, load = beat.worker, beat.load or Load()
        # Whether it takes new work.
        self.usable = beat.state is State.READY and info is not None and beat.seq >= self.excluded_until
        self.fingerprint = info.fingerprint if info else ""
        self.block_size = info.geometry.block_size if info else 1
        self.blocks_total = info.num_blocks if info else 0
        self.max_sequences = info.max_sequences if info else 0
        self.max_batch_tokens = info.max_batch_tokens if info else 0
        for request, attempt in load.placements:
            entry = self.assigned.pop((request, attempt), None)
            if entry is not None and entry.decodes:
                self.taken[request, attempt] = entry
            elif entry is not None:
                self._classify(entry, -1)
        alive = load.running + load.waiting
        while len(self.taken) > alive:  # those whose end nobody told
            self._classify(self.taken.pop(next(iter(self.taken))), -1)
        self.sequences = alive
        self.queued_tokens = load.waiting_tokens
        self.blocks_free = self.blocks_total - load.blocks_used
        for entry in self.assigned.values():
            self._weigh(entry, 1)

    def exclude(self) -> None:
        """A call to it failed: it takes no work until it sends a heartbeat after now.

        The next one may be on its way already, so it takes the one after.
        """
        self.excluded_until, self.usable = self.beat.seq + 2, False

    def assign(self, key: Key, assignment: Assignment) -> None:
        self.over(key)
        self.assigned[key] = assignment
        self._weigh(assignment, 1)
        self._classify(assignment, 1)

    def over(self, key: Key) -> None:
        """A placement has ended. What the last heartbeat still counts of it is free from now on."""
        entry = self.assigned.pop(key, None)
        if entry is not None:
            self._weigh(entry, -1)
            self._classify(entry, -1)
            return
        entry = self.taken.pop(key, None)
        if entry is not None:
            self._classify(entry, -1)
            self.sequences -= 1
            if entry.sequences > 1:
                return  # the others may go on with the same blocks: the next heartbeat tells
            self.blocks_free = min(self.blocks_total, self.blocks_free + entry.blocks)

    def expire(self, now: float) -> None:
        for key in [key for key, entry in self.assigned.items() if now >= entry.expires]:
            entry = self.assigned.pop(key)
            self._weigh(entry, -1)
            self._classify(entry, -1)

    def below(self, priority: int) -> tuple[int, int]:
        """Sequences of lower classes, and their blocks: what the worker takes from them for a higher one."""
        sequences = blocks = 0
        for its, (count, held) in self.classes.items():
            if its < priority:
                sequences += count
                blocks += held
        return sequences, blocks

    def _classify(self, entry: Assignment, sign: int) -> None:
        known = self.classes.setdefault(entry.priority, [0, 0])
        known[0] += sign * entry.sequences
        known[1] += sign * entry.blocks
        if not known[0]:
            del self.classes[entry.priority]

    def _weigh(self, entry: Assignment, sign: int) -> None:
        self.sequences += sign * entry.sequences
        self.queued_tokens += sign * entry.compute_tokens
        self.blocks_free -= sign * entry.blocks


class ClusterView:
    """All workers by id. Assignments leave with the heartbeat that shows them, with `Placed`, or in time.

    So the view of an idle cluster is zero by construction.
    """

    def __init__(self) -> None:
        self.workers: dict[str, WorkerView] = {}
        self._turns = itertools.count(1)

    def heard(self, beat: Heartbeat) -> None:
        """Takes a worker's heartbeat; a newer epoch starts empty."""
        view = self.workers.get(beat.id)
        if view is None or view.beat.epoch != beat.epoch:
            self.workers[beat.id] = WorkerView(beat)
        else:
            view.heard(beat)

    def left(self, worker: str, epoch: int) -> None:
        view = self.workers.get(worker)
        if view is not None and view.beat.epoch == epoch:
            del self.workers[worker]

    def exclude(self, worker: str, epoch: int) -> None:
        """A call to it failed: see `WorkerView.exclude`."""
        view = self.workers.get(worker)
        if view is not None and view.beat.epoch == epoch:
            view.exclude()

    def ready(self, role: Role) -> list[WorkerView]:
        """Workers of a role that take new work."""
        return [view for view in self.workers.values() if view.usable and view.role is role]

    @property
    def expected(self) -> bool:
        """Whether a worker is there, or will be soon."""
        return any(view.beat.state is not State.UNHEALTHY for view in self.workers.values())

    @property
    def outstanding(self) -> bool:
        """Whether assignments wait for an acknowledgement."""
        return any(view.assigned for view in self.workers.values())

    def assign(self, view: WorkerView, key: Key, assignment: Assignment) -> None:
        view.assign(key, assignment)
        view.turn = next(self._turns)

    def placed(self, key: Key) -> None:
        """A placement is over."""
        for view in self.workers.values():
            if key in view.assigned or key in view.taken:
                view.over(key)

    def expire(self, now: float) -> None:
        for view in self.workers.values():
            if view.assigned:
                view.expire(now)
