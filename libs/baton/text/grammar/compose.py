"""What an answer must look like, as one llguidance grammar: reasoning, then tool calls or the form asked for.

Each piece is a named grammar of its own; a short one in Lark joins them. Nothing of a user's is pasted into
that one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from baton.protocol.request import Structure
from baton.protocol.sampling import MAX_GRAMMAR_CHARS, Constraint
from baton.text.grammar.schema import GrammarError, prepare_schema

MAX_CHOICES = 1_024
JSON_KINDS = ("json_object", "json_schema")
_REGEX_SIGNS = re.compile(r"[][/\\.^$*+?(){}|-]")

Piece = dict[str, Any]  # one of llguidance's `grammars`, without its name


@dataclass(slots=True)
class Calls:
    """Tool calls as a grammar.

    `rule` is the body of the Lark rule `calls`; it may refer to `pieces` by "@" and their names, and to
    further `rules`. `required`: the answer is calls, and nothing else unless a structure allows it.
    """

    rule: str
    rules: list[str] = field(default_factory=list)
    pieces: dict[str, Piece] = field(default_factory=dict)
    json: bool = True
    required: bool = True


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What comes before the answer: text from `begin` to `end`; `begun`: the prompt has `begin` already."""

    begin: str
    end: str
    begun: bool = False


def structure_piece(structure: Structure) -> Piece:
    """The grammar of a form asked for.

    Raises:
        GrammarError: it is none.
    """
    match structure.kind:
        case "json_object":
            return {"json_schema": {"type": "object"}}
        case "json_schema":
            return {"json_schema": prepare_schema(_loads(structure.text))}
        case "regex":
            return dict(json.loads(LLMatcher.grammar_from_regex(structure.text))["grammars"][0])
        case "choice":
            return {"lark_grammar": choice(structure.choices)}
        case "grammar":
            return {"lark_grammar": _lark(structure.text)}
    raise GrammarError(f"{structure.kind!r} is not a form of answer that is known")


def choice(texts: Sequence[str]) -> str:
    """Lark: exactly one of these texts.

    Raises:
        GrammarError: there is none, an empty one, or too many.
    """
    if not texts or not all(texts) or len(texts) > MAX_CHOICES:
        raise GrammarError(f"give 1 to {MAX_CHOICES} choices, none of them empty")
    return "start: " + " | ".join(quote(text) for text in dict.fromkeys(texts))


def quote(text: str) -> str:
    """A text as a Lark string."""
    return json.dumps(text, ensure_ascii=False)


def compose(
    structure: Structure | None, calls: Calls | None, reasoning: Reasoning | None
) -> Constraint | None:
    """One constraint of all that applies; None if the answer is free.

    Raises:
        GrammarError: the structure is none, or too large.
    """
    if structure is None and calls is None:
        return None
    answer = None if structure is None else structure_piece(structure)
    pieces: dict[str, Piece] = {} if calls is None else dict(calls.pieces)
    ways = ["calls"] if calls is not None else []
    lines = [f"calls: {calls.rule}", *calls.rules] if calls is not None else []
    if answer is not None and not (calls is not None and calls.required):
        ways.append("@answer")
        pieces["answer"] = answer
    elif calls is not None and not calls.required:
        ways.append("FREE_TEXT")
        lines.append("FREE_TEXT: /(?s:.*)/")
    if ways == ["@answer"] and reasoning is None:
        main: list[Piece] = [pieces.pop("answer")]
    else:
        main = [{"lark_grammar": "\n".join([_start(ways, reasoning), *lines])}]
    named = [{**piece, "name": name} for name, piece in pieces.items()]
    grammar = json.dumps({"grammars": main + named}, ensure_ascii=False)
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise GrammarError(f"takes {len(grammar)} characters as a grammar, at most {MAX_GRAMMAR_CHARS}")
    is_json = calls.json if calls is not None else False
    is_json = is_json or (structure is not None and structure.kind in JSON_KINDS)
    if reasoning is None:
        return Constraint(grammar=grammar, json=is_json)
    begin = "" if reasoning.begun else reasoning.begin
    return Constraint(grammar=grammar, json=is_json, skip=reasoning.end, begin=begin)


def _start(ways: list[str], reasoning: Reasoning | None) -> str:
    answer = " | ".join(ways)
    if reasoning is None:
        return f"start: {answer}"
    end = _REGEX_SIGNS.sub(r"\\\g<0>", reasoning.end)
    thoughts = f"thoughts gap ({answer})" if reasoning.begun else f"(tagged gap)? ({answer})"
    lines = [
        f"start: {thoughts}",
        f"thoughts[lazy]: /(?s:.*){end}/",
        "gap: /\\s{0,4}/",
    ]
    if not reasoning.begun:
        lines.append(f"tagged: {quote(reasoning.begin)} thoughts")
    return "\n".join(lines)


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise GrammarError("the schema is not JSON") from error


def _lark(text: str) -> str:
    """Lark as it is; GBNF and the like (`root ::= ...`) turned into Lark."""
    try:
        return str(any_to_lark(text))
    except Exception as error:  # the converter raises whatever its parser does
        raise GrammarError(f"neither Lark nor GBNF: {' '.join(str(error).split())[:300]}") from error
