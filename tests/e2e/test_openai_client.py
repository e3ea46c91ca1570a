"""The official client against a running Baton: streamed or not, sync and async, chat and completions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from running import Running

from baton.protocol.sampling import SamplingParams
from baton.runner.mock import expected_tokens
from baton.text.mock import mock_tokenizer
from baton.text.templates import ChatTemplate, encode_chat

FLAGS = (
    "--engine", "mock", "--kv-memory-mb", "16", "--router-local-prefill-tokens", "0",
    "--mock-step-us", "500", "--mock-token-us", "5",
)  # fmt: skip

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Où est Paris ? 😀"}]


@pytest.fixture(scope="module")
def baton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("openai"), *FLAGS) as running:
        yield running


@pytest.fixture
def client(baton: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{baton.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def expected(prompt: list[int], count: int, *, choice: int = 0, **params: Any) -> str:
    made = SamplingParams(max_tokens=count, **params)
    return bytes(expected_tokens(prompt, made, choice=choice)).decode()


def chat_prompt(messages: list[dict[str, str]]) -> list[int]:
    from baton.text.mock import TEMPLATE

    return encode_chat(mock_tokenizer(), ChatTemplate(TEMPLATE, {}), messages)


def test_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="mock", messages=MESSAGES, max_tokens=12, temperature=0)
    prompt = chat_prompt(MESSAGES)
    assert answer.choices[0].message.content == expected(prompt, 12)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 12)
    assert answer.id.startswith("chatcmpl-")
    assert answer._request_id


def test_chat_streamed_is_the_same(client: OpenAI) -> None:
    fields: Any = {
        "model": "mock", "messages": MESSAGES, "max_completion_tokens": 40, "temperature": 0.8, "seed": 7,
        "logprobs": True, "top_logprobs": 3,
    }  # fmt: skip
    whole = client.chat.completions.create(**fields)
    stream = client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    *chunks, last = stream
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert last.usage and last.usage.completion_tokens == 40 and not last.choices
    assert [chunk.choices[0].finish_reason for chunk in chunks].count("length") == 1
    told = [
        token
        for chunk in chunks
        if (logprobs := chunk.choices[0].logprobs)
        for token in logprobs.content or []
    ]
    assert whole.choices[0].logprobs
    assert told == whole.choices[0].logprobs.content
    assert "".join(token.token for token in told) == text
    assert all(len(token.top_logprobs) == 3 for token in told)


def test_the_clients_accumulator_takes_our_stream(client: OpenAI) -> None:
    text = expected(chat_prompt(MESSAGES), 40)
    fields: Any = {"model": "mock", "messages": MESSAGES, "max_tokens": 40, "temperature": 0, "n": 2}
    fields["stop"] = text[30:34]
    with client.chat.completions.stream(**fields) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    whole = client.chat.completions.create(**fields)
    assert "content.delta" in events
    assert whole.choices[0].message.content == text[: text.find(text[30:34])]
    assert [choice.message.content for choice in final.choices] == [
        choice.message.content for choice in whole.choices
    ]
    assert {choice.message.role for choice in final.choices} == {"assistant"}


async def test_many_at_once(baton: Running) -> None:
    async with AsyncOpenAI(base_url=baton.url, api_key="none", max_retries=0) as client:  # without the /v1

        async def ask(number: int) -> str:
            prompt = f"{number} bottles of beer"
            stream = await client.completions.create(
                model="mock", prompt=prompt, max_tokens=20, temperature=0, stream=True
            )
            text = "".join([chunk.choices[0].text async for chunk in stream])
            assert text == expected(list(prompt.encode()), 20)
            return text

        assert len(set(await asyncio.gather(*map(ask, range(24))))) == 24


def test_stop_strings_cut_and_count(client: OpenAI) -> None:
    text = expected(list(b"stop here"), 60)
    stop = [text[20:23], text[30:34], "\x00"]
    for stream in (False, True):
        answer: Any = client.completions.create(
            model="mock", prompt="stop here", max_tokens=60, temperature=0, stop=stop, stream=stream,
            **({"stream_options": {"include_usage": True}} if stream else {}),
        )  # fmt: skip
        cut = text[: min(text.find(one) for one in stop[:2])]
        parts = list(answer) if stream else [answer]
        assert "".join(part.choices[0].text for part in parts if part.choices) == cut
        finish = [part.choices[0].finish_reason for part in parts if part.choices]
        assert finish[-1] == "stop" and finish[:-1] == [None] * (len(finish) - 1)
        assert parts[-1].usage.completion_tokens == min(text.find(one) + len(one) for one in stop[:2])


def test_choices_are_told_apart_by_their_number_alone(client: OpenAI) -> None:
    fields: Any = {"model": "mock", "prompt": "many " * 20, "max_tokens": 10, "temperature": 1.0, "seed": 3}
    answer = client.completions.create(**fields, n=4)
    prompt = list(("many " * 20).encode())
    assert [choice.text for choice in answer.choices] == [
        expected(prompt, 10, choice=choice, temperature=1.0, seed=3) for choice in range(4)
    ]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (100, 40)
    pieces = ["", "", "", ""]
    finishes = []
    for chunk in client.completions.create(**fields, n=4, stream=True):
        pieces[chunk.choices[0].index] += chunk.choices[0].text
        finishes += [chunk.choices[0].index] if chunk.choices[0].finish_reason else []
    assert pieces == [choice.text for choice in answer.choices]
    assert sorted(finishes) == [0, 1, 2, 3]


def test_best_of_shows_the_likeliest(client: OpenAI) -> None:
    fields: Any = {"model": "mock", "prompt": "best", "max_tokens": 6, "temperature": 1.0, "seed": 5}
    drawn = client.completions.create(**fields, n=5, logprobs=0)

    def likelihood(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    ranked = sorted(drawn.choices, key=likelihood, reverse=True)
    best = client.completions.create(**fields, n=2, best_of=5)
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert best.usage and best.usage.completion_tokens == 30


def test_several_prompts(client: OpenAI) -> None:
    prompts = ["one", "and two", "three of them"]
    answer = client.completions.create(model="mock", prompt=prompts, max_tokens=8, temperature=0, n=2)
    want = [expected(list(prompt.encode()), 8) for prompt in prompts for _ in range(2)]
    assert [choice.text for choice in answer.choices] == want
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.usage and answer.usage.prompt_tokens == sum(map(len, prompts))
    tokens = client.completions.create(
        model="mock", prompt=[list(prompt.encode()) for prompt in prompts], max_tokens=8, temperature=0
    )
    assert [choice.text for choice in tokens.choices] == want[::2]


@pytest.mark.parametrize("prompt", ["écho 😀", list("écho 😀".encode())])
def test_echo(client: OpenAI, prompt: Any) -> None:
    text = expected(list("écho 😀".encode()), 5)
    answer = client.completions.create(model="mock", prompt=prompt, max_tokens=5, temperature=0, echo=True)
    assert answer.choices[0].text == "écho 😀" + text
    stream = client.completions.create(
        model="mock", prompt=prompt, max_tokens=5, temperature=0, echo=True, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == "écho 😀" + text


def test_an_answer_begun_is_continued(client: OpenAI) -> None:
    begun: Any = [*MESSAGES, {"role": "assistant", "content": "In Fra"}]
    answer = client.chat.completions.create(
        model="mock", messages=begun, max_tokens=5, temperature=0,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )  # fmt: skip
    prompt = chat_prompt(MESSAGES) + list(b"In Fra")
    assert answer.choices[0].message.content == expected(prompt, 5)


def test_min_tokens_and_a_bias(client: OpenAI) -> None:
    answer = client.completions.create(
        model="mock", prompt="bias", max_tokens=6, temperature=0, logit_bias={str(ord("z")): 100}
    )
    assert answer.choices[0].text == "zzzzzz"
    delayed = client.completions.create(
        model="mock", prompt="bias", max_tokens=9, temperature=0, logit_bias={str(ord("z")): 100}, stop="zz",
        extra_body={"min_tokens": 5},
    )  # fmt: skip
    assert delayed.choices[0].text == "zzz" and delayed.choices[0].finish_reason == "stop"
    assert delayed.usage and delayed.usage.completion_tokens == 5


def test_tool_turns_are_rendered(baton: Running, client: OpenAI) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    messages: Any = [
        {"role": "user", "content": "use it"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
    ]
    answer = client.chat.completions.create(model="mock", messages=messages, max_tokens=4, temperature=0)
    _, told = baton.post("/tokenize", {"model": "mock", "messages": messages})
    assert answer.choices[0].message.content == expected(told["tokens"], 4)
    _, text = baton.post("/detokenize", {"model": "mock", "tokens": told["tokens"]})
    assert '"a"' in text["prompt"] and "42" in text["prompt"]


def test_errors_are_the_clients_own(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="mock", prompt="x" * 40_000)
    assert long.value.code == "context_length_exceeded" and long.value.param == "prompt"
    with pytest.raises(openai.BadRequestError) as hot:
        client.chat.completions.create(model="mock", messages=MESSAGES, temperature=9)
    assert hot.value.param == "temperature" and hot.value.type == "invalid_request_error"
    assert hot.value.request_id


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("mock", "model", "baton")
    assert client.models.retrieve("mock") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("org/other")


def test_text_to_tokens_and_back(baton: Running) -> None:
    text = "Où est Paris ? 😀"
    status, answer = baton.post("/tokenize", {"model": "mock", "prompt": text})
    tokens = list(text.encode())
    assert (status, answer) == (200, {"count": len(tokens), "max_model_len": 32_768, "tokens": tokens})
    assert baton.post("/v1/detokenize", {"model": "mock", "tokens": tokens}) == (200, {"prompt": text})
    _, answer = baton.post("/v1/tokenize", {"model": "mock", "messages": MESSAGES})
    assert answer["tokens"] == chat_prompt(MESSAGES)
    _, answer = baton.post("/detokenize", {"model": "mock", "tokens": answer["tokens"]})
    assert answer["prompt"].startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {"model": "mock"}, 400, "prompt"),
        ("/tokenize", {"model": "mock", "prompt": "a", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"model": "mock", "messages": []}, 400, "messages"),
        ("/tokenize", {"model": "mock", "prompt": "x" * 5_000_000}, 400, "prompt"),
        (
            "/tokenize",
            {"model": "mock", "prompt": "a", "add_special_tokens": False},
            400,
            "add_special_tokens",
        ),
        ("/tokenize", {"model": "other", "prompt": "a"}, 404, "model"),
        ("/detokenize", {"model": "mock", "tokens": [99_999]}, 400, "tokens"),
        ("/detokenize", {"model": "mock", "tokens": ["a"]}, 400, "tokens[0]"),
    ],
)
def test_what_cannot_be_converted(
    baton: Running, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    answered, answer = baton.post(path, body)
    assert (answered, answer["error"]["param"]) == (status, param)


def test_ids_are_echoed_and_ours_inside(client: OpenAI) -> None:
    raw = client.with_raw_response.completions.create(
        model="mock", prompt="id", max_tokens=1, extra_headers={"x-request-id": "mine-1"}
    )
    assert raw.headers["x-request-id"] == "mine-1"
    assert "mine" not in raw.parse().id
