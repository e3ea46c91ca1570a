"""The grammar states of a worker's sequences: kept between steps, rebuilt from the output when they are not.

Masks are made in a thread of their own (llguidance drops the GIL) while the model computes; sampling waits
for what is not ready by then.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from baton.engine.masks import GrammarFailure, Words
from baton.engine.plan import Key, SampleSpec
from baton.models.errors import ModelError
from baton.protocol.sampling import Constraint
from baton.text.grammar.compiler import GrammarCompiler
from baton.text.grammar.schema import GrammarError
from baton.text.grammar.state import GrammarState

MAX_STATES = 1_024
IDLE_STEPS = 64  # a state not used for so long is dropped: it takes 200 KB for 1,000 tokens, and 4 ms to make


class Pending:
    """A mask in the making: an `Allowed`."""

    def __init__(self, made: Future[Words]) -> None:
        self._made = made

    def words(self) -> Words:
        return self._made.result()


class GrammarStates:
    """States by sequence, dropped when idle: a sequence without one is read again from its output.

    `step`, `begin` and `complete` are called by one thread, the one that executes steps.
    """

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.compiler = compiler
        self._states: OrderedDict[Key, GrammarState] = OrderedDict()
        self._steps = 0
        self._lock = threading.Lock()
        self._masks = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def step(self) -> None:
        """A step begins; drops what has been idle."""
        with self._lock:
            self._steps += 1
            while self._states and next(iter(self._states.values())).used < self._steps - IDLE_STEPS:
                self._states.popitem(last=False)

    def begin(self, key: Key, spec: SampleSpec) -> Pending:
        """Starts to make the mask of a sequence's next token, which has a constraint."""
        return Pending(self._masks.submit(self._make, key, spec))

    def complete(self, key: Key, token: int) -> bool:
        """Whether nothing may follow `token`, which was just chosen under a mask."""
        with self._lock:
            state = self._states.get(key)
            if state is None:
                return False
            state.advance([token])
            if state.complete:
                del self._states[key]
                return True
        return False

    def knows(self, constraint: Constraint) -> bool:
        """Whether its grammar is compiled. Any thread may ask."""
        return self.compiler.knows(constraint.grammar)

    def prepare(self, constraint: Constraint) -> None:
        """Compiles a grammar ahead of its first mask, in whatever thread."""
        try:
            self.compiler.matcher(constraint.grammar)
        except (GrammarError, ModelError):
            return  # said again to the sequence whose mask it is

    def close(self) -> None:
        """Waits for what is under way."""
        self._masks.shutdown(wait=True, cancel_futures=True)

    def _make(self, key: Key, spec: SampleSpec) -> Words:
        with self._lock:
            return self._state(key, spec).words()

    def _state(self, key: Key, spec: SampleSpec) -> GrammarState:
        """The state after all output so far.

        Raises:
            GrammarFailure: the grammar is none here, or was not followed.
        """
        constraint = spec.params.constraint
        assert constraint is not None
        state = self._states.get(key)
        if state is None or state.taken > spec.index:
            try:
                state = GrammarState(constraint, self.compiler)
            except (GrammarError, ModelError) as error:
                raise GrammarFailure(f"the answer's grammar: {error}") from error
            self._states[key] = state
            if len(self._states) > MAX_STATES:
                self._states.popitem(last=False)
        self._states.move_to_end(key)
        state.used = self._steps
        state.advance(_output_from(spec, state.taken))
        return state


def _output_from(spec: SampleSpec, index: int) -> Sequence[int]:
    return spec.tokens[spec.prompt_len + index : spec.prompt_len + spec.index]
