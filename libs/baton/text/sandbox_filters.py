"""The filters and string methods a chat template may use. What is not here could build without bound."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from jinja2 import filters as builtin
from jinja2 import pass_eval_context

from baton.text.sandbox_budget import MAX_CHARS, LimitExceeded, check_chars, measured, spend

_KEPT = (
    *(
        "abs",
        "capitalize",
        "count",
        "d",
        "default",
        "dictsort",
        "e",
        "escape",
        "first",
        "float",
        "int",
        "items",
    ),
    *("last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "safe"),
    *("select", "selectattr", "sort", "string", "title", "trim", "unique", "upper"),
)
MAX_INDENT = 16

STRING_METHODS = frozenset(
    (
        *("capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isascii"),
        *("isdecimal", "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower"),
        *("lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition"),
        *("rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper"),
    )
)


def check_method(text: str, name: str, arguments: tuple[Any, ...]) -> None:
    """Before `text.name(*arguments)`: is its result small enough?

    Raises:
        LimitExceeded: no, or the budget is used up.
    """
    check_chars(len(text))
    if name == "replace" and len(arguments) >= 2:
        _check_replace(text, arguments[0], arguments[1])
    elif name == "join" and arguments:
        _check_join(text, arguments[0])


def _check_replace(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str) and len(new) > len(old):
        check_chars(len(text) + (text.count(old) if old else len(text) + 1) * (len(new) - len(old)))


def _check_join(separator: str, items: Any) -> None:
    if isinstance(items, list | tuple | dict):
        measured(items)
        check_chars(len(separator) * len(items))


def _replace(text: Any, old: Any, new: Any, count: Any = None) -> str:
    text = str(text)
    _check_replace(text, str(old), str(new))
    return text.replace(str(old), str(new), -1 if count is None else int(count))


@pass_eval_context
def _join(eval_ctx: Any, value: Any, d: Any = "", attribute: Any = None) -> str:
    items = measured(list(value))
    _check_join(str(d), items)
    return str(builtin.do_join(eval_ctx, items, d, attribute))


def _indent(text: Any, width: Any = 4, first: Any = False, blank: Any = False) -> str:
    text = str(text)
    if (len(width) if isinstance(width, str) else width) > MAX_INDENT:
        raise LimitExceeded(f"it indents by more than {MAX_INDENT}")
    check_chars(len(text) + (text.count("\n") + 1) * MAX_INDENT)
    return str(builtin.do_indent(text, width, first, blank))


def _round(value: Any, precision: Any = 0, method: Any = "common") -> Any:
    if abs(precision) > 32:
        raise LimitExceeded("it rounds to more than 32 digits")
    return builtin.do_round(value, precision, method)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: unescaped, unlike Jinja's own."""
    measured(value)
    if indent is not None:
        if (len(indent) if isinstance(indent, str) else indent) > MAX_INDENT:
            raise LimitExceeded(f"it indents by more than {MAX_INDENT}")
        plain = json.dumps(value, ensure_ascii=ensure_ascii)
        depth = plain.count("[") + plain.count("{")
        if len(plain) * min(depth, 64) * MAX_INDENT > 64 * MAX_CHARS:
            raise LimitExceeded("it indents too large a structure")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _charged(function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, paying for the sizes of what goes in and comes out."""

    @functools.wraps(function)
    def charged(*arguments: Any, **named: Any) -> Any:
        spend()
        for argument in arguments[:2]:  # some get a context first
            measured(argument)
        return measured(function(*arguments, **named))

    return charged


FILTERS: dict[str, Callable[..., Any]] = {
    **{name: _charged(builtin.FILTERS[name]) for name in _KEPT},
    "replace": _charged(_replace),
    "join": _charged(_join),
    "indent": _charged(_indent),
    "round": _charged(_round),
    "tojson": _charged(_tojson),
}
