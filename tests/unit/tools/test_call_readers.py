"""Tool calls and reasoning read out of text: the same however it is cut, nothing lost, nothing leaked."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from baton.text.reader import Parts, Reader
from baton.text.reasoning import KNOWN, ReasoningReader, begun, detect
from baton.text.tools import dialects

NAMES = ["get_weather", "ping", "f"]
ARGUMENTS = [
    '{"city": "Paris"}',
    "{}",
    '{"a": [1, {"b": "}]\\"{"}], "ü": null}',
    '{"s": "<tool_call> [TOOL_CALLS]"}',
]


def calls_as(dialect: str, calls: list[tuple[str, str]]) -> str:
    """These calls as a family writes them."""
    objects = [f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls]
    match dialect:
        case "hermes":
            return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in objects)
        case "llama3_json":
            return "; ".join(text.replace('"arguments": ', '"parameters": ', 1) for text in objects)
        case "mistral":
            return "[TOOL_CALLS] [" + ", ".join(objects) + "]"
        case "mistral_named":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)
        case "pythonic":
            return "[" + ", ".join(f"{name}({_keywords(arguments)})" for name, arguments in calls) + "]"
    return objects[0] if len(objects) == 1 else "[" + ", ".join(objects) + "]"


def _keywords(arguments: str) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in json.loads(arguments).items())


def read(reader: Reader, pieces: list[str]) -> tuple[str, str, list[tuple[str, str, str]], list[Parts]]:
    """(text, reasoning, calls as (id, name, arguments), the parts they came in)."""
    parts = [reader.push(piece) for piece in pieces]
    parts.append(reader.finish())
    calls: list[list[str]] = []
    for delta in (delta for part in parts for delta in part.calls):
        if delta.index == len(calls):
            assert delta.id and delta.name
            calls.append([delta.id, delta.name, ""])
        else:
            assert not delta.id and not delta.name
        assert delta.start == len(calls[delta.index][2])
        calls[delta.index][2] += delta.arguments
    text = "".join(part.text for part in parts)
    reasoning = "".join(part.reasoning for part in parts)
    return text, reasoning, [(call[0], call[1], call[2]) for call in calls], parts


def cut(text: str, rng: random.Random) -> list[str]:
    out = []
    while text:
        size = rng.randint(1, 7)
        out.append(text[:size])
        text = text[size:]
    return out


def reader_of(dialect: str, **options: Any) -> Reader:
    return Reader("r" * 32, calls=dialects.dialect(dialect).reader(NAMES), **options)


@pytest.mark.parametrize("dialect", dialects.NAMES)
@settings(max_examples=60, deadline=None)
@given(
    calls=st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(ARGUMENTS)), min_size=1, max_size=3),
    seed=st.integers(0, 10_000),
)
def test_calls_come_out_as_they_were_written(dialect: str, calls: list[tuple[str, str]], seed: int) -> None:
    if dialect == "pythonic":
        calls = [(name, arguments) for name, arguments in calls if "ü" not in arguments] or [("ping", "{}")]
    pieces = cut(calls_as(dialect, calls), random.Random(seed))
    text, _, found, _ = read(reader_of(dialect), pieces)
    assert text == ""
    assert [name for _, name, _ in found] == [name for name, _ in calls]
    for (_, _, arguments), (_, wanted) in zip(found, calls, strict=True):
        assert json.loads(arguments) == json.loads(wanted)
        if dialect != "pythonic":
            assert arguments == wanted  # as the model wrote it
    assert len({call[0] for call in found}) == len(found)


@pytest.mark.parametrize("dialect", ["hermes", "mistral"])
@pytest.mark.parametrize("before", ["Let me look.", "1 < 2 and [a]", "<tool", ""])
def test_text_before_a_call(dialect: str, before: str) -> None:
    written = before + "\n\n" + calls_as(dialect, [("ping", "{}")])
    for seed in range(20):
        text, _, found, _ = read(reader_of(dialect), cut(written, random.Random(seed)))
        assert text == before
        assert [(name, arguments) for _, name, arguments in found] == [("ping", "{}")]


@pytest.mark.parametrize("dialect", dialects.NAMES)
@pytest.mark.parametrize(
    "text",
    [
        "Just text, with {braces} and [lists] in it.",
        '{"answer": 42, "name": "nobody"}',
        "[1, 2, 3]",
        '["a", {"b": 1}] and more',
        "{ not json",
        "[f",
        "",
    ],
)
def test_what_is_no_call_is_text(dialect: str, text: str) -> None:
    for seed in range(10):
        found_text, _, found, _ = read(reader_of(dialect), cut(text, random.Random(seed)))
        assert found_text == text
        assert found == []


@pytest.mark.parametrize("dialect", ["llama3_json", "json"])
def test_a_bare_object_must_call_a_function_that_there_is(dialect: str) -> None:
    text = '{"name": "launch", "arguments": {}}'
    found_text, _, found, _ = read(reader_of(dialect), list(text))
    assert (found_text, found) == (text, [])


def test_arguments_go_out_as_they_come() -> None:
    """A character of the arguments is out as soon as it has come."""
    reader = reader_of("hermes")
    got = ""
    head, arguments = '<tool_call>\n{"name": "f", "arguments": ', '{"text": "a long one", "n": 12}'
    first = reader.push(head)
    assert [(call.name, call.arguments) for call in first.calls] == [("f", "")]
    for number, char in enumerate(arguments, start=1):
        got += "".join(call.arguments for call in reader.push(char).calls)
        assert got == arguments[:number]
    assert reader.push("}\n</tool_call>") == Parts()


def test_a_call_that_is_cut_short_stays_as_it_is() -> None:
    written = calls_as("hermes", [("f", '{"a": "bcd"}')])
    for end in range(len(written)):
        text, _, found, _ = read(reader_of("hermes"), [written[:end]])
        assert text in ("", written[:end])
        assert not text.startswith("<tool_call>")
        assert len(found) <= 1
        assert all('{"a": "bcd"}'.startswith(arguments) for _, _, arguments in found)


@pytest.mark.parametrize(
    ("written", "name", "arguments"),
    [
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "f", '{"a": 1}'),
        ('<tool_call>{"name": "f"}</tool_call>', "f", "{}"),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "f", '{"a": 1}'),
        ('<tool_call>{"name": "f", "arguments": null}', "f", "{}"),
        ('<tool_call>{"id": 3, "name": "f", "arguments": {"a": 1}, "more": [{}]}', "f", '{"a": 1}'),
        ('<tool_call>[{"name": "f", "arguments": {}}]</tool_call>', "f", "{}"),
    ],
)
def test_variants_that_models_write(written: str, name: str, arguments: str) -> None:
    text, _, found, _ = read(reader_of("hermes"), list(written))
    assert text == ""
    assert [call[1:] for call in found] == [(name, arguments)]


def test_one_call_where_one_is_asked_for() -> None:
    written = "ok " + calls_as("hermes", [("f", "{}"), ("ping", '{"a": 1}')]) + " and more"
    text, _, found, _ = read(reader_of("hermes", parallel=False), list(written))
    assert text == "ok"
    assert [call[1:] for call in found] == [("f", "{}")]


def test_ids_follow_from_the_request() -> None:
    written = calls_as("mistral", [("f", "{}"), ("f", "{}")])
    once = read(reader_of("mistral", id_chars=9), [written])[2]
    again = read(reader_of("mistral", id_chars=9), list(written))[2]
    assert once == again
    assert all(len(call[0]) == 9 and call[0].isalnum() for call in once)
    assert once[0][0] != once[1][0]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% for tool in tools %}<tool_call>{% endfor %}", "hermes"),
        ("{{ tools }}[TOOL_CALLS]", "mistral"),
        ("{{ tools }}[TOOL_CALLS]x[ARGS]", "mistral_named"),
        ("{{ tools }} ipython <|python_tag|>", "llama3_json"),
        ("{{ tools }} [func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ tools | tojson }}", "json"),
        ("{{ messages }}", "hermes"),
        (None, "hermes"),
    ],
)
def test_the_family_is_read_off_the_template(template: str | None, name: str) -> None:
    assert dialects.detect(template).name == name


@pytest.mark.parametrize("tags", KNOWN)
@settings(max_examples=40, deadline=None)
@given(
    thoughts=st.text(alphabet="ab <>/[]\nthinkTHINK", max_size=30),
    answer=st.text(alphabet="xy {}<\n", max_size=20),
    opened=st.booleans(),
    seed=st.integers(0, 1_000),
)
def test_reasoning_is_apart(tags: Any, thoughts: str, answer: str, opened: bool, seed: int) -> None:
    assume(tags.end not in thoughts)
    written = ("" if opened else tags.begin) + thoughts + tags.end + answer
    reader = Reader("r", reasoning=ReasoningReader(tags, begun=opened))
    text, reasoning, _, _ = read(reader, cut(written, random.Random(seed)))
    assert reasoning == thoughts.strip(" \t\r\n")
    assert text == answer.lstrip(" \t\r\n")
    assert (reader.written, reader.reasoned) == (len(text), len(reasoning))


def test_an_answer_without_reasoning_is_text() -> None:
    for written in ("plain", " <b> is no tag", "<thin", "later <think>no</think>"):
        text, reasoning, _, _ = read(
            Reader("r", reasoning=ReasoningReader(KNOWN[0], begun=False)), list(written)
        )
        assert (text, reasoning) == (written, "")


def test_reasoning_that_is_cut_short() -> None:
    text, reasoning, _, _ = read(
        Reader("r", reasoning=ReasoningReader(KNOWN[0], begun=True)), list("so </thi")
    )
    assert (text, reasoning) == ("", "so </thi")


def test_calls_after_reasoning() -> None:
    written = "<think>I <tool_call> nothing</think>\n\nOk.\n" + calls_as("hermes", [("f", '{"a": 1}')])
    reader = Reader(
        "r",
        reasoning=ReasoningReader(KNOWN[0], begun=False),
        calls=dialects.dialect("hermes").reader(NAMES),
    )
    text, reasoning, found, _ = read(reader, list(written))
    assert (text, reasoning) == ("Ok.", "I <tool_call> nothing")
    assert [call[1:] for call in found] == [("f", '{"a": 1}')]
    assert reader.called


def test_tags_are_found_in_templates_and_prompts() -> None:
    tags = detect("{{ '<think>' }} ... {{ content.split('</think>')[-1] }}")
    assert tags == KNOWN[0]
    assert detect("{{ messages }}") is None
    assert begun(KNOWN[0], "<|assistant|><think>\n")
    assert not begun(KNOWN[0], "<think>\n\n</think>\n\n")
