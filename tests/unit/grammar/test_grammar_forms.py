"""Regex, choice and grammars; reasoning before them; what is refused."""

from __future__ import annotations

import pytest

from baton.protocol.request import Structure
from baton.text.grammar.compose import Reasoning, compose
from baton.text.grammar.open import open_compiler
from baton.text.grammar.schema import GrammarError
from baton.text.grammar.state import GrammarState
from baton.text.mock import EOS, mock_tokenizer

COMPILER = open_compiler(mock_tokenizer())
THINK = Reasoning("<think>", "</think>")


def state_of(structure: Structure, reasoning: Reasoning | None = None) -> GrammarState:
    constraint = compose(structure, None, reasoning)
    assert constraint is not None
    return GrammarState(constraint, COMPILER)


def may_end(state: GrammarState) -> bool:
    return bool(state.words()[EOS // 32] >> (EOS % 32) & 1)


def takes(state: GrammarState, text: str) -> bool:
    try:
        state.advance(list(text.encode()))
    except RuntimeError:
        return False
    return may_end(state)


@pytest.mark.parametrize(
    ("structure", "good", "bad"),
    [
        (Structure(kind="regex", text="[a-z]+-[0-9]{2}"), "ab-12", "ab-1"),
        (Structure(kind="regex", text="^a/b$"), "a/b", "^a/b$"),
        (Structure(kind="choice", choices=["yes", 'n"o\\', "maybe\nnot", "größer"]), 'n"o\\', "no"),
        (Structure(kind="choice", choices=["a", "ab", "a"]), "ab", "b"),
        (Structure(kind="grammar", text='start: "a" NUM\nNUM: /[0-9]{3}/'), "a123", "a12"),
        (Structure(kind="grammar", text='root ::= "x" item+\nitem ::= [0-9] | "-"'), "x1-2", "x"),
        (Structure(kind="json_object"), '{"a": [1, null]}', "[1]"),
    ],
)
def test_a_form_is_kept(structure: Structure, good: str, bad: str) -> None:
    assert takes(state_of(structure), good)
    assert not takes(state_of(structure), bad)


@pytest.mark.parametrize(
    ("structure", "words"),
    [
        (Structure(kind="regex", text="(a)\\1"), "backreferences are not supported"),
        (Structure(kind="regex", text="(?=a)b"), "look-around"),
        (Structure(kind="regex", text="(a"), "regex"),
        (Structure(kind="choice", choices=[]), "choices"),
        (Structure(kind="choice", choices=["a", ""]), "choices"),
        (Structure(kind="grammar", text="start: nowhere"), "nowhere"),
        (Structure(kind="grammar", text="no grammar at all"), "neither Lark nor GBNF"),
        (Structure(kind="json_schema", text="{"), "not JSON"),
        (Structure(kind="grammar", text="start: " + '"a" ' * 100_000), "characters"),
        (Structure(kind="sonnet"), "sonnet"),
    ],
)
def test_what_is_no_form_is_refused(structure: Structure, words: str) -> None:
    with pytest.raises(GrammarError, match=words):
        state_of(structure)


def test_what_explodes_is_refused_or_ends() -> None:
    """Each step's work is bounded: a grammar that is too much for it fails, it does not hang."""
    try:
        state = state_of(Structure(kind="regex", text="(a|b)*a(a|b){200}(c|d)*e(.*x){30}"))
        state.advance(list(b"ab" * 200))
        state.words()
    except (GrammarError, RuntimeError) as error:
        assert str(error)


def test_a_grammar_that_cannot_go_on_is_complete() -> None:
    state = state_of(Structure(kind="choice", choices=["yes", "yesterday"]))
    state.advance(list(b"yes"))
    assert not state.complete
    assert may_end(state)
    state.advance(list(b"terday"))
    assert state.complete


def test_the_end_completes_it() -> None:
    state = state_of(Structure(kind="regex", text="a+"))
    state.advance([97])
    assert not state.complete
    state.advance([EOS])
    assert state.complete


@pytest.mark.parametrize("thoughts", ['hm "x" </thi {{', "", "a\n\nb</ think>"])
def test_reasoning_comes_first(thoughts: str) -> None:
    form = Structure(kind="json_object")
    assert takes(state_of(form, THINK), f'<think>{thoughts}</think>\n\n{{"a": 1}}')
    assert takes(state_of(form, THINK), '{"a": 1}')
    assert not takes(state_of(form, THINK), "so I say")
    begun = Reasoning("<think>", "</think>", begun=True)
    assert takes(state_of(form, begun), f'{thoughts}</think>{{"a": 1}}')
    state = state_of(form, begun)
    assert not takes(state, '{"a": 1}')  # still a thought: it may not end with it


def test_runs_are_bounded_outside_of_strings_only() -> None:
    state = state_of(Structure(kind="json_object"))
    state.advance(list(b'{"a": "' + b"1" * 40 + b" " * 40 + b'", "b": ' + b"1" * 15))
    nine = state.words()[ord("9") // 32] >> (ord("9") % 32) & 1
    assert not nine
    state.advance(list(b".5e12"))
    assert not state.words()[ord("9") // 32] >> (ord("9") % 32) & 1
    state.advance(list(b"," + b" " * 32))
    assert not state.words()[1] & 1  # the space is id 32
    state.advance(list(b'"c":{'))
    assert state.words()[1] & 1
    state.advance(list(b" \n "))
    assert not state.words()[0] >> ord("\n") & 1


def test_runs_are_counted_after_the_reasoning() -> None:
    state = state_of(Structure(kind="json_object"), THINK)
    state.advance(list(b"<think>" + b"1" * 100))
    assert state.words()[ord("9") // 32] >> (ord("9") % 32) & 1
    state.advance(list(b'</think>{"a": ' + b"1" * 15))
    assert not state.words()[ord("9") // 32] >> (ord("9") % 32) & 1


def test_a_bound_does_not_lead_into_a_dead_end() -> None:
    state = state_of(Structure(kind="json_schema", text='{"type": "integer", "minimum": 100000000000000000}'))
    state.advance(list(b"1" * 18))
    assert state.words().any()
    assert may_end(state)
