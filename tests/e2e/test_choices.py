"""`n` and `best_of`: one prefill, one transfer, the same answers as ever, whatever dies on the way."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import Running
from sse import check_stream, read_chunks

from baton.protocol.sampling import SamplingParams
from baton.runner.mock import expected_scores, expected_tokens

FLAGS = (
    "--engine", "mock", "--kv-memory-mb", "32", "--router-local-prefill-tokens", "0", "--decode", "2",
    "--mock-step-us", "2000", "--mock-token-us", "5", "--mock-max-context", "16384",
)  # fmt: skip
PROMPT = [97 + at * at % 26 for at in range(1_000)]


@pytest.fixture(scope="module")
def baton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("choices"), *FLAGS) as running:
        yield running


def body(salt: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": "mock", "prompt": PROMPT, "temperature": 1, "seed": 11, "max_tokens": 40, "cache_salt": salt,
        **fields,
    }  # fmt: skip


def ask(baton: Running, salt: str, **fields: Any) -> dict[str, Any]:
    status, answer = baton.post("/v1/completions", body(salt, **fields))
    assert status == 200, answer
    return answer


def expected(choice: int, count: int = 40, **params: Any) -> str:
    made = SamplingParams(temperature=1.0, seed=11, max_tokens=count, **params)
    return bytes(expected_tokens(PROMPT, made, choice=choice)).decode()


def test_eight_choices_read_the_prompt_and_move_its_blocks_once(baton: Running) -> None:
    figures = ("baton_computed_tokens_total", "baton_handoff_blocks_total", "baton_handoffs_total",
               "baton_prompt_tokens_total")  # fmt: skip
    baton.settled(figures[0])
    before = {name: baton.total(name) for name in figures}
    answer = ask(baton, "figures", n=8)
    assert [choice["text"] for choice in answer["choices"]] == [expected(choice) for choice in range(8)]
    assert answer["usage"]["prompt_tokens"] == 1_000 and answer["usage"]["completion_tokens"] == 320
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    baton.settled(figures[0])
    spent = {name: baton.total(name) - before[name] for name in figures}
    assert spent["baton_computed_tokens_total"] == 1_000 + 8 * 40 - 1
    assert spent["baton_handoff_blocks_total"] == 63
    assert spent["baton_handoffs_total"] == 1
    assert spent["baton_prompt_tokens_total"] == 1_000


def test_a_stop_string_cuts_one_choice(baton: Running) -> None:
    texts = [expected(choice) for choice in range(4)]
    stop = texts[2][10:13]
    answer = ask(baton, "stop", n=4, stop=[stop])
    for choice, text in zip(answer["choices"], texts, strict=True):
        assert choice["text"] == text.split(stop)[0]
        assert choice["finish_reason"] == ("stop" if stop in text else "length")
    counts = [min(40, text.index(stop) + 3 if stop in text else 40) for text in texts]
    assert answer["usage"]["completion_tokens"] == sum(counts)


def test_one_token_each_and_best_of(baton: Running) -> None:
    answer = ask(baton, "one", n=6, max_tokens=1)
    assert [choice["text"] for choice in answer["choices"]] == [expected(choice, 1) for choice in range(6)]
    drawn = ask(baton, "drawn", n=5, logprobs=0)["choices"]
    mean = [sum(choice["logprobs"]["token_logprobs"]) / 40 for choice in drawn]
    best = ask(baton, "best", n=2, best_of=5)
    order = sorted(range(5), key=mean.__getitem__, reverse=True)
    assert [choice["text"] for choice in best["choices"]] == [drawn[at]["text"] for at in order[:2]]
    assert best["usage"]["completion_tokens"] == 200


def test_lists_of_prompts_with_choices(baton: Running) -> None:
    answer = ask(baton, "lists", prompt=["ab", "cd"], n=3, max_tokens=6)
    wanted = [
        bytes(
            expected_tokens(
                list(text.encode()), SamplingParams(temperature=1.0, seed=11, max_tokens=6), choice=choice
            )
        )
        for text in ("ab", "cd")
        for choice in range(3)
    ]
    assert [choice["text"].encode() for choice in answer["choices"]] == wanted


def test_a_long_prompt_is_scored(baton: Running) -> None:
    prompt = [97 + at * at % 26 for at in range(8_192)]
    answer = ask(baton, "long", prompt=prompt, echo=True, logprobs=5, max_tokens=0)
    told, wanted = answer["choices"][0]["logprobs"], expected_scores(prompt, 5)
    assert told["token_logprobs"] == [None, *wanted.chosen.tolist()]
    assert [len(top) for top in told["top_logprobs"][1:]] == [
        5 + (token not in ids) for token, ids in zip(prompt[1:], wanted.top_ids.tolist(), strict=True)
    ]


LETTERS = st.text("abcdefghijklmnopqrstuvwxyz ", min_size=1, max_size=2)


@given(
    st.fixed_dictionaries(
        {
            "n": st.integers(1, 3),
            "max_tokens": st.integers(1, 30),
            "min_tokens": st.integers(0, 30),
            "stop": st.lists(LETTERS, max_size=3, unique=True),
            "logprobs": st.sampled_from([None, 0, 2]),
            "echo": st.booleans(),
            "seed": st.integers(0, 1_000),
            "prompt": st.text("aé😀 ", min_size=1, max_size=8),
        }
    )
)
@settings(max_examples=25, deadline=None)
def test_a_stream_adds_up_to_the_whole_answer(baton: Running, fields: dict[str, Any]) -> None:
    fields["min_tokens"] = min(fields["min_tokens"], fields["max_tokens"])
    prompt, count = list(fields["prompt"].encode()), fields["max_tokens"]
    asked = body("streams", **fields)
    whole = ask(baton, "streams", **fields)
    streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    chunks = read_chunks(post(baton, streamed).read())
    added = check_stream(chunks, chat=False)  # exactly one finish a choice
    total = 0
    for index, choice in enumerate(whole["choices"]):
        params = SamplingParams(temperature=1.0, seed=fields["seed"], max_tokens=count)
        output = bytes(expected_tokens(prompt, params, choice=index)).decode()
        length, text = cut(output, fields["stop"], fields["min_tokens"])
        total += length
        assert choice["text"] == added[index].text == (fields["prompt"] if fields["echo"] else "") + text
        assert choice["finish_reason"] == added[index].finish == ("length" if text == output else "stop")
    for usage in (whole["usage"], chunks[-1]["usage"]):
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), total)


def cut(output: str, stops: list[str], least: int) -> tuple[int, str]:
    """Tokens that count, and the text before the first stop string that a token from `least` on completes."""
    for length in range(max(1, least), len(output) + 1):
        found = [stop for stop in stops if output[:length].endswith(stop)]
        if found:
            return length, output[: length - max(map(len, found))]
    return len(output), output


def post(baton: Running, asked: dict[str, Any]) -> Any:
    return urllib.request.urlopen(
        urllib.request.Request(
            baton.url + "/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        ),
        timeout=60,
    )


def stream(baton: Running, begun: threading.Event, **fields: Any) -> dict[int, str]:
    """The text of each choice; `begun` is set when each has some."""
    texts: dict[int, str] = {}
    raw = b""
    with post(baton, body(stream=True, **fields)) as response:
        for line in response:
            raw += line
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:]).get("choices", []):
                    texts[choice["index"]] = ""
            if len(texts) == fields["n"]:
                begun.set()
    for chunk in read_chunks(raw):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts


def kill(baton: Running, *names: str) -> None:
    """SIGKILL to the processes of these instances."""
    for process in psutil.Process(baton.process.pid).children(recursive=True):
        if any(name in process.cmdline() for name in names):
            process.kill()


def busy(baton: Running) -> list[str]:
    """Decode workers that have a sequence, as their last heartbeats told."""
    _, cluster = baton.get("/cluster")
    return [
        each["id"] for each in cluster["services"] if each["role"] == "decode" and each["load"]["running"]
    ]


@pytest.mark.parametrize(
    "role",
    [
        "tokenizer",
        pytest.param("decode", marks=pytest.mark.slow),  # these two are in test_faults_choices as well
        pytest.param("prefill", marks=pytest.mark.slow),
    ],
)
def test_a_process_is_killed_amid_the_choices(baton: Running, role: str) -> None:
    begun, made = threading.Event(), dict[int, str]()
    long = {"n": 4, "max_tokens": 700, "salt": f"kill {role}"}
    thread = threading.Thread(target=lambda: made.update(stream(baton, begun, **long)))
    thread.start()
    if role == "prefill":
        kill(baton, "prefill-0")
    else:
        assert begun.wait(20)
        deadline = time.monotonic() + 5
        while not busy(baton):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        kill(baton, *busy(baton) if role == "decode" else ["tokenizer-0"])
    thread.join(60)
    assert made == {choice: expected(choice, 700) for choice in range(4)}


def test_nothing_is_held_at_the_end(baton: Running) -> None:
    with post(baton, body("gone", n=4, max_tokens=2_000, stream=True)) as response:
        response.read(2_000)
    deadline = time.monotonic() + 10
    while baton.total("baton_kv_blocks_used") or baton.total("baton_requests_running", role="decode"):
        assert time.monotonic() < deadline, "something is still held"
        time.sleep(0.3)
