"""The engine as a worker drives it.

    add(seq)                        a sequence to run
    plan = schedule(now)            -> runner.execute(plan), in another thread
    commit(plan, result, now)       -> what is new of each sequence in the step

and the two sides of a hand-off: at the sender a `prefill_only` sequence is held after its first token until
`release`; at the receiver `reserve` gives the slots to pull into, and `admit` runs what has arrived.

One step is out at a time. Everything else may be called while it is: blocks that the step writes are freed
at its commit only.
"""

from __future__ import annotations

from collections.abc import Iterator

from baton.engine import chains, forking
from baton.engine.block_pool import BlockPool
from baton.engine.checks import check_fits, check_new
from baton.engine.config import EngineConfig
from baton.engine.plan import FAILED, Key, Slice, StepPlan, StepResult
from baton.engine.progress import Forked, Progress
from baton.engine.reservations import Receiving, Reservation
from baton.engine.sampling import finish_reason
from baton.engine.scheduler import Scheduler
from baton.engine.sequence import Sequence, Status
from baton.kvcache.hashing import root_hash
from baton.protocol.errors import Code, Failure, RequestError
from baton.protocol.liveness import Load
from baton.protocol.sequence import SequenceState

NOT_FINITE = "the model's logits were not finite; the sequence cannot go on"


class Engine:
    """All sequences of one worker, over one block pool."""

    def __init__(self, config: EngineConfig, pool: BlockPool) -> None:
        self.config = config
        self.pool = pool
        self.scheduler = Scheduler(config, pool)
        self._receiving = Receiving(config, pool, self.scheduler)
        self._sequences: dict[Key, Sequence] = {}
        self._borrowed: list[int] = []  # slots being fetched into
        self._arrivals = 0
        self._steps = 0
        self._out: tuple[StepPlan, list[Sequence]] | None = None  # the step being executed

    @property
    def has_work(self) -> bool:
        """Whether a step may have something to do."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    @property
    def in_step(self) -> bool:
        """Whether a step is out."""
        return self._out is not None

    def add(self, seq: Sequence) -> None:
        """Queue a sequence.

        Raises:
            RequestError: CONTEXT_LENGTH, it can never fit; OVERLOADED, the queue is full; STALE, it is here
                already; INVALID_REQUEST, no tokens, ids out of range, or nothing left to generate.
        """
        check_new(seq, self.config)
        check_fits(seq.known if seq.prefill_only else seq.max_len - 1, self.pool)
        if seq.key in self._sequences:
            raise RequestError.of(Code.STALE, f"attempt {seq.attempt} of this request is here already")
        if len(self.scheduler.waiting) >= self.config.max_waiting:
            raise RequestError.of(
                Code.OVERLOADED, f"{len(self.scheduler.waiting)} sequences are queued at this worker"
            )
        seq.order = self._next_order()
        seq.root = root_hash(self.config.fingerprint, seq.salt)
        if self.config.prefix_cache:
            chains.extend(seq.hashes, seq.root, seq.tokens, self.pool.block_size)
        self._sequences[seq.key] = seq
        self.scheduler.enqueue(seq)

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None if nothing can run until something arrives or is freed.

        Raises:
            RuntimeError: the step before has not been committed.
        """
        if self._out is not None:
            raise RuntimeError(f"step {self._out[0].number} has not been committed")
        work = self.scheduler.schedule()
        if not work:
            return None
        slices = []
        for seq, count in work:
            start = seq.computed
            last = start + count == len(seq.tokens)
            tokens = seq.tokens[start : start + count]
            spec = seq.spec() if last else None
            slices.append(Slice(seq.key, tokens, start, seq.blocks, spec, seq.score(count)))
            seq.in_flight = True
            if seq.first_scheduled is None:
                seq.first_scheduled = now
        self._steps += 1
        plan = StepPlan(self._steps, slices)
        self._out = plan, [seq for seq, _ in work]
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Progress]:
        """Take in what the runner computed.

        Raises:
            RuntimeError: not the plan that is out, or a result that does not fit it.
        """
        if self._out is None or self._out[0] is not plan or len(result.samples) != len(plan.slices):
            raise RuntimeError(f"no result of step {plan.number} is awaited, or it has other slices")
        sequences = self._out[1]
        self._out = None
        news = []
        made = zip(sequences, plan.slices, result.samples, strict=True)
        for number, (seq, part, sampled) in enumerate(made):
            seq.in_flight = False
            if seq.status is Status.FINISHED:  # aborted meanwhile
                self._free(seq)
                continue
            progress = Progress(seq)
            news.append(progress)
            scored = part.score is None or progress.take_scores(part, result.scores.get(number))
            if not scored or (part.sample is not None and (sampled is None or sampled.token == FAILED)):
                problem = (sampled.problem if sampled is not None else "") or NOT_FINITE
                progress.failure = Failure(code=Code.INTERNAL, message=problem)
                self._finish(seq, now)
                continue
            seq.computed += len(part.tokens)
            self._announce(progress)
            if sampled is None:
                continue
            seq.append(sampled.token, sampled.logprobs)
            progress.new_tokens = [sampled.token]
            progress.logprobs = [sampled.logprobs] if sampled.logprobs is not None else []
            if seq.first_token is None:
                seq.first_token, progress.first = now, True
            progress.finish = "stop" if sampled.complete else finish_reason(seq)
            if progress.finish or not seq.prefill_only:
                progress.forked = self.fork(seq)
            if progress.finish:
                self._finish(seq, now)
            elif seq.prefill_only:
                self.scheduler.remove(seq)
                seq.status = Status.HELD
        return news

    def fork(self, seq: Sequence) -> list[Forked]:
        """Let a sequence's further choices begin: its prompt is computed, and it holds its blocks."""
        forks, seq.forks = seq.forks, []
        return [self._begin(forking.child(seq, fork), seq) for fork in forks]

    def _begin(self, seq: Sequence, parent: Sequence) -> Forked:
        made = forking.share(seq, parent, self.scheduler, self.pool)
        if made is None:
            try:
                self.add(seq)
            except RequestError as error:
                return Forked(seq, failure=error.failure)
            return Forked(seq)
        seq.order = self._next_order()
        self.scheduler.start(seq)
        self._sequences[seq.key] = seq
        return made

    def abort(self, request: str, attempt: int) -> bool:
        """Free all that this attempt of the request, and lower ones, hold; False if there was nothing.

        Reservations are not included: cancel them once their pull has ended.
        """
        doomed = [
            seq for seq in self._sequences.values() if seq.request == request and seq.attempt <= attempt
        ]
        for seq in doomed:
            self._finish(seq, None)
        return bool(doomed)

    def release(self, seq: Sequence) -> None:
        """Let go of a held sequence: the receiver has it, or never will. Its full blocks stay cached."""
        if seq.status is Status.HELD:
            self._finish(seq, None)

    def get(self, request: str, attempt: int, choice: int = 0) -> Sequence | None:
        """A live sequence."""
        return self._sequences.get((request, attempt, choice))

    def sequences(self) -> Iterator[Sequence]:
        """Every live sequence: waiting, running and held."""
        return iter(list(self._sequences.values()))

    def reserve(
        self, key: Key, tokens: list[int], salt: str, max_new_tokens: int, priority: int
    ) -> Reservation | None:
        """Room for a sequence that a peer hands over, for the known tokens and the one after them.

        None: there is no room beside the watermark, or others wait for it. Between two steps (`in_step` is
        false) a higher class takes it from lower ones.

        Raises:
            RequestError: CONTEXT_LENGTH, it can never fit; STALE, this key has a reservation or runs here.
        """
        if key in self._sequences:
            raise RequestError.of(Code.STALE, "this attempt of the request runs here already")
        preempt = not self.in_step
        return self._receiving.reserve(
            key, tokens, salt, max_new_tokens, priority, order=self._next_order(), preempt=preempt
        )

    def yields(self, priority: int) -> bool:
        """Whether `reserve`, asked again between two steps, could take room from a lower class."""
        return self.in_step and any(seq.priority < priority for seq in self.scheduler.running)

    def admit(self, reservation: Reservation, state: SequenceState, now: float) -> Sequence:
        """Run a sequence whose blocks have arrived and been verified; they enter the prefix index now.

        Raises:
            RequestError: STALE, the reservation was cancelled; TRANSFER_FAILED, the state does not go with
                it, and the reservation, which stands, is to be cancelled.
        """
        seq = self._receiving.admit(reservation, state, now)
        self._sequences[seq.key] = seq
        return seq

    def cancel_reservation(self, reservation: Reservation) -> None:
        """Give a reservation's room back, once nothing writes into its slots any more. Idempotent."""
        self._receiving.cancel(reservation)

    def prefix_hit(self, tokens: list[int], salt: str) -> int:
        """How many leading tokens of these are in the cache now."""
        size = self.pool.block_size
        root, hashes = root_hash(self.config.fingerprint, salt), list[int]()
        chains.extend(hashes, root, tokens, size)
        found = self.pool.find(chains.blocks(hashes, root, tokens, salt, 0, len(hashes), size))
        return len(found) * size

    def borrow(self, count: int) -> list[int] | None:
        """Slots to fetch cached blocks into, such as the KV store's, or None if sequences need them.

        Each loan ends with `seed_cached` or `give_back`.
        """
        slots = self.scheduler.lend(count) if self.config.prefix_cache else None
        self._borrowed.extend(slots or [])
        return slots

    def give_back(self, slots: list[int]) -> None:
        """End a loan without anything fetched."""
        self._borrowed = [slot for slot in self._borrowed if slot not in slots]
        self.pool.release(slots)

    def seed_cached(self, tokens: list[int], salt: str, first: int, slots: list[int]) -> None:
        """End a loan: the slots now hold full blocks `first`, `first` + 1, ... of `tokens`, verified.

        They become cached blocks, the last to be evicted. Do it before `add`, which looks for hits.
        """
        size = self.pool.block_size
        root, hashes = root_hash(self.config.fingerprint, salt), list[int]()
        chains.extend(hashes, root, tokens, size)
        content = chains.blocks(hashes, root, tokens, salt, first, first + len(slots), size)
        for slot, block in zip(slots, content, strict=True):
            self.pool.register(slot, block)
        self.give_back(slots)

    def load(self) -> Load:
        """How busy it is. `placements` and `kv_event` are the worker's to fill in."""
        waiting, running = self.scheduler.waiting, self.scheduler.running
        unread = sum(seq.missing for seq in waiting) + sum(seq.missing for seq in running if seq.missing > 1)
        return Load(
            running=len(running),
            waiting=len(waiting),
            blocks_used=self.pool.used,
            blocks_total=self.pool.num_blocks,
            waiting_tokens=unread,
        )

    def check(self) -> None:
        """Verify the pool's invariants against everyone who holds blocks.

        Raises:
            AssertionError: one does not hold.
        """
        tables = [seq.blocks for seq in self._sequences.values()]
        tables += [made.blocks for made in self._receiving.open.values()]
        tables += [seq.blocks for seq in (self._out[1] if self._out else []) if seq.status is Status.FINISHED]
        self.pool.check([*tables, self._borrowed])

    def _next_order(self) -> int:
        self._arrivals += 1
        return self._arrivals

    def _announce(self, progress: Progress) -> None:
        """Enter blocks that have become full in the prefix index, and name them."""
        seq, size = progress.seq, self.pool.block_size
        full = seq.computed // size
        if full > seq.announced:
            if self.config.prefix_cache:
                chains.extend(seq.hashes, seq.root, seq.tokens, size)
                content = chains.of(seq, seq.announced, full, size)
                for slot, block in zip(seq.blocks[seq.announced : full], content, strict=True):
                    self.pool.register(slot, block)
            progress.new_full_blocks = range(seq.announced, full)
            seq.announced = full

    def _finish(self, seq: Sequence, now: float | None) -> None:
        del self._sequences[seq.key]
        self.scheduler.remove(seq)
        seq.status = Status.FINISHED
        seq.finished = now
        if not seq.in_flight:
            self._free(seq)

    def _free(self, seq: Sequence) -> None:
        self.pool.release(seq.blocks)
        seq.blocks = []
