"""The mock model: no weights, a cost model, and text that shows whether the KV cache was right.

Each position has a 16-byte record in its page: the token id, and the hash of all tokens up to it, continued
from the record before, which is read from its page. The next token is drawn, by the real sampling rules,
from logits made from the hash of every record so far, read from the pages as well. So a wrong, stale or
missing block anywhere in the table changes the text, and `expected_tokens`, which needs no pages, tells what
it should have been. The likely ids are lower-case letters and the space, for people who read along.
"""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from baton.config.settings import Settings
from baton.engine.plan import FAILED, Sampled, SampleSpec, Score, Scores, Slice, StepPlan, StepResult
from baton.engine.sampling import sample
from baton.engine.scoring import score
from baton.kvcache.fingerprint import fingerprint
from baton.kvcache.pool import KvPool
from baton.protocol.liveness import Geometry, ModelInfo
from baton.protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from baton.text.grammar.states import GrammarStates

NAME = "mock"
VOCAB = 512
RECORD_WORDS = 2  # uint64: token id, hash of all tokens up to this one
RECORD_BYTES = 8 * RECORD_WORDS

_Words = npt.NDArray[np.uint64]
_FIRST = 0x9E3779B97F4A7C15  # what the first token's hash continues
_ALPHABET = np.array([*range(97, 123), 32])
_STRIDES = [stride for stride in range(1, len(_ALPHABET)) if stride % 3]  # those that visit all 27
_SPACES = 5  # of 31 winners: a word has five letters or so
_OTHER = -50.0  # logit of every other id: never drawn, yet within reach of a logit bias
_CLOSING = np.frombuffer(b'"}]', dtype=np.uint8)  # what ends a string, an object, a list


class MockRunner:
    """A `Runner` whose step lasts `mock.step_us` and `mock.token_us` for each token."""

    def __init__(self, settings: Settings) -> None:
        """
        Raises:
            ValueError: blocks too small for their records, or no memory for one block.
        """
        size, block_bytes = settings.model.block_size, settings.mock.block_bytes
        if block_bytes < size * RECORD_BYTES or block_bytes % 8:
            raise ValueError(
                f"a mock KV block of {size} tokens takes at least {size * RECORD_BYTES} bytes, in eights: "
                f"raise --mock-block-bytes ({block_bytes})"
            )
        self.num_blocks = settings.worker.kv_memory_mb * 2**20 // block_bytes
        if not self.num_blocks:
            raise ValueError(f"--worker-kv-memory-mb holds not one mock KV block of {block_bytes} bytes")
        self.geometry = Geometry(block_size=size, block_bytes=block_bytes, dtype=NAME)
        limits = [settings.mock.max_context, settings.model.max_context or settings.mock.max_context]
        self.model = ModelInfo(name=NAME, max_context=min(limits), vocab_size=VOCAB)
        self.fingerprint = fingerprint(
            weights=NAME,
            dtype=NAME,
            kv_dtype=NAME,
            block_size=size,
            contract=1,
            tuning=f"block_bytes={block_bytes}",
        )
        self._step_s = settings.mock.step_us / 1e6
        self._token_s = settings.mock.token_us / 1e6
        self._words: _Words = np.zeros((0, block_bytes // 8), dtype=np.uint64)

    def attach(self, pool: KvPool) -> None:
        """Use this pool's pages.

        Raises:
            ValueError: the pool is of another geometry.
        """
        if pool.geometry != self.geometry:
            raise ValueError(f"a pool of {pool.geometry} cannot serve blocks of {self.geometry}")
        self._words = pool.data.view("<u8")

    def warm_up(self) -> None:
        """Make the logits table."""
        _table()

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute a step, in no less time than the cost model says."""
        end = time.perf_counter() + self._step_s + self._token_s * plan.num_tokens
        result = StepResult([self._compute(part) for part in plan.slices])
        for number, part in enumerate(plan.slices):
            if part.score is not None:
                result.scores[number] = self._score(part, part.score)
        left = end - time.perf_counter()
        if left > 0:
            time.sleep(left)
        return result

    def close(self) -> None:
        """Let go of the pages."""
        self._words = self._words[:0].copy()

    def _compute(self, part: Slice) -> Sampled | None:
        self._write(part)
        if part.sample is None:
            return None
        digest = self._digest(part.blocks, part.start + len(part.tokens))
        return sample(mock_logits(digest.intdigest(), part.sample.params), part.sample)

    def _score(self, part: Slice, wanted: Score) -> Scores:
        """As the sampling of each of these positions would have told it."""
        size, params = self.geometry.block_size, SamplingParams()
        begin = part.start + wanted.first
        digest = self._digest(part.blocks, begin)
        rows = np.empty((len(wanted.targets), VOCAB), dtype=np.float32)
        for row in range(len(rows)):
            block, offset = divmod(begin + row, size)
            record = self._words[part.blocks[block], offset * RECORD_WORDS : (offset + 1) * RECORD_WORDS]
            digest.update(record.tobytes())
            rows[row] = mock_logits(digest.intdigest(), params)
        return score(rows, wanted.targets, wanted.count)

    def _digest(self, blocks: list[int], count: int) -> xxhash.xxh3_64:
        """Of the records of the first `count` positions, as their pages have them."""
        size = self.geometry.block_size
        whole, rest = divmod(count, size)
        digest = xxhash.xxh3_64()
        digest.update(self._words[blocks[:whole], : size * RECORD_WORDS].tobytes())
        if rest:
            digest.update(self._words[blocks[whole], : rest * RECORD_WORDS].tobytes())
        return digest

    def _write(self, part: Slice) -> None:
        """Write the records of a slice's tokens, continuing from the record before them."""
        size = self.geometry.block_size
        before = _FIRST
        if part.start:
            block, offset = divmod(part.start - 1, size)
            before = int(self._words[part.blocks[block], offset * RECORD_WORDS + 1])
        records = _records(before, part.tokens)
        done, position = 0, part.start
        while done < len(records):
            block, offset = divmod(position, size)
            count = min(size - offset, len(records) - done)
            row = self._words[part.blocks[block]]
            row[offset * RECORD_WORDS : (offset + count) * RECORD_WORDS] = records[
                done : done + count
            ].ravel()
            done, position = done + count, position + count


def expected_tokens(
    prompt: list[int],
    params: SamplingParams,
    count: int | None = None,
    *,
    choice: int = 0,
    states: GrammarStates | None = None,
) -> list[int]:
    """The undisturbed output: what any way through the system must give for this prompt.

    Args:
        prompt: token ids, at least one.
        count: how many tokens; by default `max_tokens`. A stop id ends it sooner.
        states: where the masks of a constrained output come from.
    """
    wanted = params.max_tokens if count is None else count
    tokens = list(prompt)
    records = np.empty((len(prompt) + wanted, RECORD_WORDS), dtype="<u8")
    records[: len(prompt)] = _records(_FIRST, prompt)
    key = ("expected", 0, choice)
    for index in range(wanted):
        known = len(tokens)
        spec = SampleSpec(params, choice, index, tokens, len(prompt))
        if states is not None:
            spec.allowed = states.begin(key, spec)
        token = sample(mock_logits(xxhash.xxh3_64_intdigest(records[:known].tobytes()), params), spec).token
        if token == FAILED:
            break
        records[known] = _records(int(records[known - 1, 1]), [token])
        tokens.append(token)
        if states is not None and states.complete(key, token):
            break
        if token in params.stop_token_ids and index >= params.min_tokens:
            break
    return tokens[len(prompt) :]


def expected_scores(prompt: list[int], count: int) -> Scores:
    """What the log-probabilities of a prompt must be, from its second token on."""
    params, records = SamplingParams(), _records(_FIRST, prompt)
    digests = [xxhash.xxh3_64_intdigest(records[:known].tobytes()) for known in range(1, len(prompt))]
    rows = np.array([mock_logits(digest, params) for digest in digests], dtype=np.float32)
    return score(rows.reshape(len(digests), VOCAB), prompt[1:], count)


def mock_logits(digest: int, params: SamplingParams) -> npt.NDArray[np.float32]:
    """float32 [VOCAB], read-only: one clear maximum, the letters below in an order of their own.

    Under a grammar the letters may all be forbidden: then every id has a chance, and what closes a string,
    an object or a list a good one, so that even this model comes to an end.
    """
    if params.constraint is not None:
        logits = np.random.Generator(np.random.PCG64(digest)).random(VOCAB, dtype=np.float32)
        logits[_CLOSING] += np.float32(0.95)
        logits.flags.writeable = False
        return logits
    winner = min(digest % (len(_ALPHABET) - 1 + _SPACES), len(_ALPHABET) - 1)
    return _table()[winner, (digest >> 32) % len(_STRIDES)]


@cache
def _table() -> npt.NDArray[np.float32]:
    """Logits for each winner and stride, float32 [27, strides, VOCAB]."""
    letters = len(_ALPHABET)
    table = np.full((letters, len(_STRIDES), VOCAB), _OTHER, dtype=np.float32)
    steps = np.arange(letters)
    falling = np.concatenate([[6.0], 4.0 - 0.25 * np.arange(letters - 1)])
    for winner in range(letters):
        for row, stride in enumerate(_STRIDES):
            table[winner, row, _ALPHABET[(winner + steps * stride) % letters]] = falling
    table.flags.writeable = False
    return table


def _records(before: int, tokens: list[int]) -> _Words:
    """The records [n, 2] of tokens that follow a position whose hash is `before`."""
    hashes = []
    for token in tokens:
        before = xxhash.xxh3_64_intdigest(before.to_bytes(8, "little") + token.to_bytes(4, "little"))
        hashes.append(before)
    return np.array([tokens, hashes], dtype="<u8").T
