"""What the tokenizer makes of tools, forms and reasoning: prompt, grammar, the parts of the answer."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from baton.protocol.errors import RequestError
from baton.protocol.liveness import ModelInfo
from baton.protocol.request import ChatMessage, Generate, Structure, TextDelta, Tool
from baton.protocol.sampling import SamplingParams
from baton.runner.mock import expected_tokens
from baton.text.detokenizer import decode
from baton.text.grammar.open import open_compiler, open_states
from baton.text.grammar.state import GrammarState
from baton.text.mock import EOS, TEMPLATE, mock_tokenizer
from baton.text.model_files import TextModel
from baton.text.templates import ChatTemplate
from baton.text.tokenizer import SpecialToken, Tokenizer
from baton.text.tools import dialects
from baton_services.gateway.exchange import Exchange
from baton_services.tokenizer.live import LiveRequest
from baton_services.tokenizer.prepare import Preparer

THINKS = TEMPLATE + "{# <think> ... </think> #}"
OPENS = TEMPLATE.replace("assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif") + "{# </think> #}"
WEATHER = Tool(
    name="get_weather",
    description="Weather of a city",
    parameters=json.dumps(
        {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
            "required": ["city"],
        }
    ),
)
PING = Tool(name="ping")
STATES = open_states("mock", "")


def preparer(template: str, tool_calls: str) -> Preparer:
    text = TextModel("mock", mock_tokenizer(), ChatTemplate(template, {}), 4_096)
    return Preparer(text, ModelInfo(name="mock", max_context=4_096, vocab_size=260), 1, tool_calls)


async def prepared(template: str = TEMPLATE, *, tool_calls: str = "auto", **fields: Any) -> LiveRequest:
    made = preparer(template, tool_calls)
    fields.setdefault("messages", [ChatMessage(role="user", content="hi")])
    fields.setdefault("sampling", SamplingParams(seed=3, temperature=1.0, max_tokens=400))
    live = made.live(Generate(request="a" * 32, model="mock", reply_to="", **fields))
    try:
        await made.prepare(live)
    finally:
        made.close()
    return live


def prompt_of(live: LiveRequest) -> str:
    return decode(mock_tokenizer(), live.prompt, skip_special=False)


def answer(live: LiveRequest, written: str, finish: str = "stop") -> tuple[str, str, list[Any], str]:
    """(text, reasoning, calls as (name, arguments), finish) of an answer that comes byte by byte."""
    deltas: list[TextDelta] = []
    raw = written.encode()
    for number, byte in enumerate(raw, start=1):
        deltas.append(live.delta([byte], [], finish if number == len(raw) else ""))
    gateway = Exchange(live.generate, deadline=1e18)
    for delta in copy.deepcopy(deltas):
        gateway.put(delta)
    assert not gateway.gap
    calls: dict[int, list[str]] = {}
    for call in (call for delta in deltas for call in delta.calls):
        calls.setdefault(call.index, [call.name, ""])[1] += call.arguments
    text = "".join(delta.text for delta in deltas)
    assert all(
        delta.start == len("".join(each.text for each in deltas[:number]))
        for number, delta in enumerate(deltas)
    )
    return (
        text,
        "".join(delta.reasoning for delta in deltas),
        [tuple(call) for call in calls.values()],
        live.finish,
    )


async def test_a_template_that_knows_no_tools_is_told_of_them() -> None:
    live = await prepared(tools=[WEATHER, PING])
    shown = prompt_of(live)
    assert shown.startswith("<|im_start|>system\n# Tools")
    assert '"name": "get_weather"' in shown
    assert "Paris" in shown
    system = ChatMessage(role="system", content="Be brief.")
    live = await prepared(tools=[PING], messages=[system, ChatMessage(role="user", content="hi")])
    assert prompt_of(live).startswith("<|im_start|>system\nBe brief.\n\n# Tools")


async def test_no_tools_are_told_of_where_none_may_be_called() -> None:
    live = await prepared(tools=[WEATHER], tool_choice="none")
    assert "get_weather" not in prompt_of(live)
    assert live.reader is None
    assert live.sampling.constraint is None


async def test_a_template_that_knows_tools_gets_them() -> None:
    template = "{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}{{ messages[0].content }}"
    live = await prepared(template, tools=[WEATHER, PING])
    assert prompt_of(live) == "[get_weather][ping]hi"


async def test_calls_and_results_of_earlier_turns() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "ping", "arguments": '{"a": 1}'}}
    messages = [
        ChatMessage(role="user", content="q"),
        ChatMessage(role="assistant", content=None, tool_calls=[call]),
        ChatMessage(role="tool", content="pong", tool_call_id="c"),
        ChatMessage(role="tool", content="peng", tool_call_id="d"),
    ]
    shown = prompt_of(await prepared(messages=messages))
    assert '<tool_call>\n{"name": "ping", "arguments": {"a": 1}}\n</tool_call>' in shown
    results = "<tool_response>\npong\n</tool_response>\n<tool_response>\npeng\n</tool_response>"
    assert f"<|im_start|>user\n{results}" in shown


async def test_a_template_that_knows_calls_gets_them() -> None:
    shown = "{{ m.role }}:{{ m.tool_calls[0].function.arguments.a if m.tool_calls }};"
    template = "{% for m in messages %}" + shown + "{% endfor %}"
    call = {"id": "c", "type": "function", "function": {"name": "ping", "arguments": '{"a": 1}'}}
    messages = [
        ChatMessage(role="assistant", content=None, tool_calls=[call]),
        ChatMessage(role="tool", content="pong", tool_call_id="c"),
    ]
    assert prompt_of(await prepared(template, messages=messages)) == "assistant:1;tool:;"


async def test_calls_are_read_out_of_the_text() -> None:
    live = await prepared(tools=[WEATHER, PING])
    written = 'Sure.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    assert answer(live, written) == ("Sure.", "", [("get_weather", '{"city": "Oslo"}')], "tool_calls")


async def test_a_call_cut_short_ends_with_length() -> None:
    live = await prepared(tools=[WEATHER, PING])
    written = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Os'
    assert answer(live, written, "length") == ("", "", [("get_weather", '{"city": "Os')], "length")


async def test_without_a_call_it_is_text() -> None:
    live = await prepared(tools=[PING])
    assert answer(live, "No need.") == ("No need.", "", [], "stop")


@pytest.mark.parametrize("name", dialects.NAMES)
@pytest.mark.parametrize("choice", ["required", "name:get_weather", "name:ping"])
async def test_a_forced_call_is_one_whatever_the_model(name: str, choice: str) -> None:
    """The mock knows nothing of calls: the grammar alone makes it write one, in every family's way."""
    for seed in range(4):
        live = await prepared(
            tool_calls=name,
            tools=[WEATHER, PING],
            tool_choice=choice,
            parallel_tool_calls=seed % 2 == 0,
            sampling=SamplingParams(seed=seed, temperature=1.0, max_tokens=800, stop_token_ids=[EOS]),
        )
        out = expected_tokens(live.prompt, live.sampling, states=STATES)
        assert len(out) < 800
        live.answer.completion_tokens = 0
        written = bytes(token for token in out if token < 256).decode()
        text, _, calls, finish = answer(live, written)
        assert (text, finish) == ("", "tool_calls")
        assert calls
        assert len(calls) == 1 or (choice == "required" and seed % 2 == 0)
        for called, arguments in calls:
            assert choice in ("required", f"name:{called}")
            given = json.loads(arguments)
            assert given == {} if called == "ping" else given["city"] in ("Paris", "Rome")


async def test_strict_tools_keep_to_their_schemas_amid_free_text() -> None:
    strict = Tool(name=WEATHER.name, parameters=WEATHER.parameters, strict=True)
    live = await prepared(tools=[strict])
    constraint = live.sampling.constraint
    assert constraint is not None
    compiler = open_compiler(mock_tokenizer())

    def takes(text: str) -> bool:
        state = GrammarState(constraint, compiler)
        try:
            state.advance(list(text.encode()))
        except RuntimeError:
            return False
        return bool(state.words()[EOS // 32] >> (EOS % 32) & 1)

    head = '<tool_call>\n{"name": "get_weather", "arguments": '
    assert takes("no call at all")
    assert takes(f'so: {head}{{"city": "Rome"}}}}\n</tool_call>')
    assert not takes(f'so: {head}{{"city": "Oslo"}}}}\n</tool_call>')


async def test_tools_and_a_form_in_one_request() -> None:
    form = Structure(kind="json_schema", text='{"type": "object", "properties": {"ok": {"type": "boolean"}}}')
    live = await prepared(tools=[WEATHER], structure=form)
    constraint = live.sampling.constraint
    assert constraint is not None
    compiler = open_compiler(mock_tokenizer())
    for text in (
        '{"ok": true}',
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    ):
        state = GrammarState(constraint, compiler)
        state.advance(list(text.encode()))
        assert state.complete or state.words()[EOS // 32] >> (EOS % 32) & 1
    with pytest.raises(RuntimeError):
        GrammarState(constraint, compiler).advance(list(b"text"))


async def test_parameters_that_cannot_be_kept_are_refused_where_they_must_be() -> None:
    odd = Tool(name="odd", parameters='{"type": "object", "properties": {"a": {"not": {}}}}')
    strict = Tool(name="odd", parameters=odd.parameters, strict=True)
    for tools, choice in (([PING, odd], "required"), ([PING, odd], "name:odd"), ([PING, strict], "auto")):
        with pytest.raises(RequestError) as refused:
            await prepared(tools=tools, tool_choice=choice)
        assert refused.value.failure.param == "tools[1].function.parameters"
        assert "properties.a: 'not' is not supported" in refused.value.failure.message
    assert (await prepared(tools=[odd])).sampling.constraint is None
    assert (
        await prepared(tools=[odd], structure=Structure(kind="json_object"))
    ).sampling.constraint is not None


async def test_reasoning_is_apart_and_the_form_applies_after_it() -> None:
    live = await prepared(THINKS, structure=Structure(kind="json_object"))
    assert answer(live, '<think>\nlet me {"see}\n</think>\n\n{"a": 1}') == (
        '{"a": 1}',
        'let me {"see}',
        [],
        "stop",
    )
    assert live.usage().reasoning_tokens == len('<think>\nlet me {"see}\n</think>') - len("<think")
    constraint = live.sampling.constraint
    assert constraint is not None
    assert (constraint.begin, constraint.skip) == ("<think>", "</think>")


async def test_a_prompt_that_opens_the_reasoning() -> None:
    live = await prepared(OPENS, structure=Structure(kind="json_object"))
    assert prompt_of(live).endswith("<think>\n")
    constraint = live.sampling.constraint
    assert constraint is not None
    assert (constraint.begin, constraint.skip) == ("", "</think>")
    assert answer(live, 'hm</think>{"a": 1}') == ('{"a": 1}', "hm", [], "stop")


async def test_a_model_that_does_not_reason_has_no_tags() -> None:
    live = await prepared()
    assert live.reader is None
    assert answer(live, "<think>x</think>y") == ("<think>x</think>y", "", [], "stop")


async def test_completions_are_text() -> None:
    live = await prepared(THINKS, messages=None, prompt="p", tools=[PING])
    assert live.reader is None


class Bytes:
    def encode(self, text: str, first: bool) -> list[int]:
        return list(text.encode())


async def test_tags_that_are_special_tokens() -> None:
    """Grammars take them for their texts, and readers see them although special tokens are left out."""
    names = ["<eos>", "<think>", "</think>", "<tool_call>", "</tool_call>", "<other>"]
    specials = [SpecialToken(256 + number, name) for number, name in enumerate(names)]
    tokenizer = Tokenizer(
        Bytes(), lambda token: bytes([token]), vocab_size=262, specials=specials, eos_ids=[256]
    )
    template = ChatTemplate(
        "{{ messages[0].content }}{# tools <tool_call> <think> </think> tool_calls #}", {}
    )
    made = Preparer(TextModel("m", tokenizer, template, 4_096), ModelInfo(name="m", max_context=4_096), 1)
    live = made.live(
        Generate(
            request="b" * 32,
            model="m",
            reply_to="",
            messages=[ChatMessage(role="user", content="hi")],
            sampling=SamplingParams(max_tokens=100),
            tools=[PING],
            tool_choice="required",
        )
    )
    await made.prepare(live)
    made.close()
    constraint = live.sampling.constraint
    assert constraint is not None
    call = b'\n{"name": "ping", "arguments": {}}\n'
    output = [257, *b"so <tool_call>", 258, *b"\n\n", 259, *call, 260]
    state = GrammarState(constraint, open_compiler(tokenizer))
    assert not state.words()[261 // 32] >> (261 % 32) & 1
    for token in output:
        assert state.words()[token // 32] >> (token % 32) & 1
        state.advance([token])
    deltas = [live.delta([token], [], "") for token in output]
    deltas.append(live.delta([261, 256], [], "stop"))
    assert "".join(delta.reasoning for delta in deltas) == "so <tool_call>"
    assert "".join(delta.text for delta in deltas) == ""
    assert [piece.name for delta in deltas for piece in delta.calls if piece.name] == ["ping"]
    assert live.finish == "tool_calls"
