"""The mock model: its text follows from the tokens alone, and shows every damage to the cache."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.config.settings import Settings
from baton.engine.plan import Sampled, SampleSpec, Slice, StepPlan, StepResult
from baton.kvcache.pool import KvPool
from baton.protocol.liveness import Geometry
from baton.protocol.sampling import SamplingParams
from baton.runner.base import Runner
from baton.runner.mock import VOCAB, MockRunner, expected_tokens

BLOCK = 16
PROMPT = [(7 * at * at + 3) % 256 for at in range(100)]


def runner_with_pages(blocks: int = 32, *, step_us: int = 0, token_us: int = 0) -> tuple[MockRunner, KvPool]:
    config = Settings()
    config.mock.step_us, config.mock.token_us, config.mock.block_bytes = step_us, token_us, 1_024
    runner = MockRunner(config)
    pages = KvPool.create_private(runner.geometry, blocks)
    runner.attach(pages)
    return runner, pages


def token_of(result: StepResult) -> int:
    (sampled,) = result.samples
    assert isinstance(sampled, Sampled)
    return sampled.token


def one(tokens: list[int], start: int, table: list[int], sample: SampleSpec | None) -> StepPlan:
    return StepPlan(1, [Slice(("r", 1, 0), tokens, start, table, sample)])


def generate(
    runner: MockRunner, table: list[int], params: SamplingParams, chunk: int, count: int
) -> list[int]:
    """Read PROMPT in chunks and decode `count` tokens."""
    tokens = list(PROMPT)
    done = 0
    while len(tokens) < len(PROMPT) + count:
        part = tokens[done : done + chunk]
        last = done + len(part) == len(tokens)
        spec = SampleSpec(params, 0, len(tokens) - len(PROMPT), tokens, len(PROMPT)) if last else None
        result = runner.execute(one(part, done, table, spec))
        done += len(part)
        if last:
            tokens.append(token_of(result))
    return tokens[len(PROMPT) :]


def test_it_is_a_runner() -> None:
    runner: Runner = runner_with_pages()[0]
    runner.warm_up()
    assert runner.model.name == "mock" and runner.model.max_context == 32_768
    assert runner.num_blocks == 512 * 2**20 // 1_024
    assert runner.geometry == Geometry(block_size=BLOCK, block_bytes=1_024, dtype="mock")


@given(
    st.integers(1, 120),
    st.permutations(range(16)),
    st.sampled_from(
        [
            SamplingParams(),
            SamplingParams(temperature=1.0, seed=4),
            SamplingParams(temperature=1.5, seed=5, top_k=8, repetition_penalty=1.2, presence_penalty=0.4),
        ]
    ),
)
@settings(max_examples=40, deadline=None)
def test_chunks_and_slots_change_nothing(chunk: int, table: list[int], params: SamplingParams) -> None:
    runner, _ = runner_with_pages()
    assert generate(runner, table, params, chunk, 20) == expected_tokens(PROMPT, params, 20)


def test_the_rules_shape_the_text() -> None:
    plain = expected_tokens(PROMPT, SamplingParams(max_tokens=200))
    assert set(plain) <= {32, *range(97, 123)} and len(plain) == 200
    assert 10 < plain.count(32) < 80, "it looks like words"
    warm = [expected_tokens(PROMPT, SamplingParams(temperature=1.0, seed=seed), 40) for seed in (1, 1, 2)]
    assert warm[0] == warm[1] != warm[2]
    assert expected_tokens(PROMPT, SamplingParams(temperature=1.0, seed=1), 40, choice=1) != warm[0]
    assert expected_tokens(PROMPT, SamplingParams(logit_bias={300: 100.0}), 3) == [300, 300, 300]
    stop = SamplingParams(max_tokens=200, stop_token_ids=[plain[5]], min_tokens=3)
    ended = expected_tokens(PROMPT, stop)
    assert ended[-1] == plain[5] and plain[5] not in ended[3:-1]
    few = expected_tokens(PROMPT, SamplingParams(frequency_penalty=2.0), 120)
    assert max(few.count(token) for token in few) < max(plain[:120].count(token) for token in plain)


def test_no_special_id_comes_by_itself() -> None:
    hot = SamplingParams(temperature=2.0, seed=3)
    assert max(expected_tokens(PROMPT, hot, 500)) < 128


def test_one_other_token_anywhere_changes_what_follows() -> None:
    want = expected_tokens(PROMPT, SamplingParams(), 12)
    for at in (0, 15, 16, 50, 99):
        other = list(PROMPT)
        other[at] ^= 1
        assert expected_tokens(other, SamplingParams(), 12) != want


@pytest.mark.parametrize("block", range(7))
@pytest.mark.parametrize("damage", ["zeroed", "swapped", "stale", "one bit"])
def test_every_damaged_block_changes_the_text(block: int, damage: str) -> None:
    runner, pages = runner_with_pages()
    table = list(range(10, 20))
    params = SamplingParams()
    first = generate(runner, table, params, 64, 1)
    used = pages.data[table[block]]
    if damage == "zeroed":
        used[:] = 0
    elif damage == "swapped":
        table[block], table[(block + 1) % 7] = table[(block + 1) % 7], table[block]
    elif damage == "stale":
        runner.execute(one([1] * BLOCK, 0, [table[block]], None))
    else:
        used[3 * 16] ^= 1  # in the fourth record, which every block here has
    tokens = PROMPT + first
    while len(tokens) < len(PROMPT) + 12:
        at = len(tokens)
        spec = SampleSpec(params, 0, at - len(PROMPT), tokens, len(PROMPT))
        tokens.append(token_of(runner.execute(one(tokens[-1:], at - 1, table, spec))))
    assert tokens[len(PROMPT) :] != expected_tokens(PROMPT, params, 12)


def test_logprobs_work() -> None:
    runner, _ = runner_with_pages()
    spec = SampleSpec(SamplingParams(logprobs=2), 0, 0, PROMPT, len(PROMPT))
    (sampled,) = runner.execute(one(PROMPT, 0, list(range(7)), spec)).samples
    assert sampled is not None and sampled.logprobs is not None
    assert sampled.logprobs.top_ids[0] == sampled.token and len(sampled.logprobs.top) == 2
    assert sampled.logprobs.chosen == pytest.approx(sampled.logprobs.top[0])


def test_a_step_costs_what_the_model_says() -> None:
    runner, _ = runner_with_pages(step_us=20_000, token_us=500)
    start = time.perf_counter()
    runner.execute(one(PROMPT, 0, list(range(7)), None))
    assert time.perf_counter() - start >= 0.07


def test_settings_that_cannot_be() -> None:
    config = Settings()
    config.mock.block_bytes = 255
    with pytest.raises(ValueError, match="mock-block-bytes"):
        MockRunner(config)
    config.mock.block_bytes = 2**21
    config.worker.kv_memory_mb = 1
    with pytest.raises(ValueError, match="kv-memory-mb"):
        MockRunner(config)
    runner, _ = runner_with_pages()
    with pytest.raises(ValueError, match="cannot serve"):
        runner.attach(KvPool.create_private(Geometry(block_size=8, block_bytes=512), 4))


def test_fingerprint_and_context_follow_the_settings() -> None:
    one_way, other = Settings(), Settings()
    other.model.block_size = 32
    assert MockRunner(one_way).fingerprint == MockRunner(Settings()).fingerprint
    assert MockRunner(one_way).fingerprint != MockRunner(other).fingerprint
    other.model.max_context = 1_000
    assert MockRunner(other).model.max_context == 1_000


def test_closing_lets_go_of_the_pages() -> None:
    runner, pages = runner_with_pages()
    runner.execute(one([1], 0, [0], None))
    runner.close()
    runner.close()
    pages.close()
    with pytest.raises(IndexError):
        runner.execute(one([1], 0, [0], None))


def test_the_vocabulary_is_announced() -> None:
    runner, _ = runner_with_pages()
    spec = SampleSpec(SamplingParams(logit_bias={VOCAB - 1: 100.0}), 0, 0, [1], 1)
    assert token_of(runner.execute(one([1], 0, [0], spec))) == runner.model.vocab_size - 1
