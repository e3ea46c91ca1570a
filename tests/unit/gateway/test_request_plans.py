"""Typed requests -> `Generate`s: what is honoured, what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.protocol.base import unpack_tokens
from baton.protocol.codec import encode
from baton.protocol.errors import Code, RequestError
from baton.protocol.request import Generate
from baton_services.gateway import build
from baton_services.gateway.parse import parse
from baton_services.gateway.schema import ChatRequest, CompletionRequest

BAD = Code.INVALID_REQUEST
ENVELOPE = build.Envelope("f" * 32, "baton.v1._.text.gw.1", 60_000)


def chat(**fields: Any) -> build.Plan:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return build.chat(parse(json.dumps(body).encode(), ChatRequest), ENVELOPE)


def completion(**fields: Any) -> build.Plan:
    body = {"model": "m", "prompt": "hi", **fields}
    return build.completion(parse(json.dumps(body).encode(), CompletionRequest), ENVELOPE)


def only(plan: build.Plan) -> Generate:
    ((generate,),) = plan.prompts
    encode(generate)
    return generate


def turn(**message: Any) -> Any:
    messages = only(chat(messages=[message])).messages
    assert messages is not None
    return messages[0]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"stop": ["a"] * 10_000}, "stop", BAD),
        ({"stop": ""}, "stop", BAD),
        ({"stop": "x" * 600}, "stop", BAD),
        ({"logit_bias": {"a": 1}}, "logit_bias", BAD),
        ({"logit_bias": {"-1": 1}}, "logit_bias", BAD),
        ({"logit_bias": {"²": 1}}, "logit_bias", BAD),
        ({"top_logprobs": 3}, "top_logprobs", BAD),
        ({"stream_options": {"include_usage": True}}, "stream_options", BAD),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", BAD),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", BAD),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", BAD),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
            Code.UNSUPPORTED,
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text",
            BAD,
        ),
        ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio", Code.UNSUPPORTED),
        ({"tools": [{"type": "function"}]}, "tools[0].function", BAD),
        ({"tool_choice": "required"}, "tool_choice", BAD),
        ({"functions": [{}]}, "functions", Code.UNSUPPORTED),
        ({"response_format": {"type": "xml"}}, "response_format", Code.UNSUPPORTED),
        ({"modalities": ["text", "audio"]}, "modalities", Code.UNSUPPORTED),
        ({"audio": {"voice": "x"}}, "audio", Code.UNSUPPORTED),
        ({"prediction": {}}, "prediction", Code.UNSUPPORTED),
        ({"guided_regex": "a+", "response_format": {"type": "json_object"}}, "guided_regex", BAD),
        ({"chat_template_kwargs": {"a": 2**64}}, "chat_template_kwargs", BAD),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            BAD,
        ),
    ],
)
def test_chat_refuses_by_name(fields: dict[str, Any], param: str, code: Code) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.failure.param == param
    assert caught.value.failure.code is code
    assert param in caught.value.failure.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [10**40]}, "prompt[0]"),
        ({"prompt": [[1], [1, 1.0]]}, "prompt[1][1]"),
        ({"prompt": [[[1]]]}, "prompt[0][0]"),
        ({"prompt": ["a"] * 513}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 6}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
    ],
)
def test_completions_refuse_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        completion(**fields)
    assert caught.value.failure.param == param
    assert param in caught.value.failure.message


def test_what_asks_for_nothing_is_taken() -> None:
    inert = {
        "tools": [], "tool_choice": "auto", "functions": [], "function_call": "none", "modalities": ["text"],
        "response_format": {"type": "text"}, "store": True, "metadata": {"a": "b"}, "user": "u",
        "service_tier": "auto", "parallel_tool_calls": True, "reasoning_effort": "low", "verbosity": "low",
    }  # fmt: skip
    plain, dressed = only(chat(seed=1)), only(chat(seed=1, **inert))
    assert dressed == plain


def test_sampling_is_passed_on() -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2,
        "presence_penalty": 0.3, "frequency_penalty": -0.3, "min_tokens": 2, "stop_token_ids": [5],
        "ignore_eos": True, "seed": 42,
    }  # fmt: skip
    sampling = only(
        chat(**fields, max_tokens=9, logit_bias={"7": -100}, logprobs=True, top_logprobs=2)
    ).sampling
    assert {name: getattr(sampling, name) for name in fields} == fields
    assert (sampling.max_tokens, sampling.logit_bias, sampling.logprobs) == (9, {7: -100.0}, 2)


def test_defaults_are_openais() -> None:
    sampling = only(chat()).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.logprobs) == (1.0, 1.0, 0, -1)
    assert sampling.max_tokens == 0  # up to the context's end
    assert only(completion()).sampling.max_tokens == 16
    assert only(chat()).sampling.seed != only(chat()).sampling.seed


def test_max_completion_tokens_wins_over_the_older_name() -> None:
    assert only(chat(max_tokens=3, max_completion_tokens=5)).sampling.max_tokens == 5


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1])
def test_any_seed_travels(seed: int) -> None:
    assert only(chat(seed=seed)).sampling.seed == seed % 2**64


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert turn(role="user", content=parts).content == "ab"


def test_calls_and_their_results_are_kept() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assistant = turn(role="assistant", content=None, tool_calls=[call])
    assert (assistant.content, assistant.tool_calls) == (None, [call])
    result = turn(role="tool", content="3", tool_call_id="c1")
    assert (result.role, result.content, result.tool_call_id) == ("tool", "3", "c1")


def test_choices_share_all_but_their_ids() -> None:
    ((first, second, third),) = chat(n=3).prompts
    assert [first.choice, second.choice, third.choice] == [0, 1, 2]
    assert first.sampling == second.sampling == third.sampling
    assert first.request == ENVELOPE.request
    assert len({first.request, second.request, third.request}) == 3


def test_several_prompts_of_several_choices() -> None:
    plan = completion(prompt=["a", "b"], n=2)
    assert [[g.prompt for g in choices] for choices in plan.prompts] == [["a", "a"], ["b", "b"]]
    plan = completion(prompt=[[1, 2], [3]])
    ids = [unpack_tokens(choices[0].prompt_tokens or b"").tolist() for choices in plan.prompts]
    assert ids == [[1, 2], [3]]


def test_best_of_draws_more_and_asks_for_logprobs() -> None:
    plan = completion(n=2, best_of=5)
    ((*drawn,),) = plan.prompts
    assert (len(drawn), plan.shown, drawn[0].sampling.logprobs) == (5, 2, 0)
