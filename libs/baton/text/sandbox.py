"""Jinja for templates that came with a model: sandboxed, and bounded in steps, time and memory.

Jinja's sandbox keeps a template from Python's internals, but lets it loop for ever and build without end.
Here the compiled template is changed: every loop, call, filter, join of texts, literal list and comparison
first spends from a budget that grows with what it handles, and operations whose cost cannot be told
beforehand are left out. So a hostile template ends in an error within seconds, in whatever thread it runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from baton.text.sandbox_budget import Bounded, LimitExceeded, check_chars, measured, spend
from baton.text.sandbox_filters import FILTERS, STRING_METHODS, check_method

MAX_RANGE = 100_000
MAX_INTEGER_BITS = 4_096
_METHODS: dict[type, frozenset[str]] = {
    str: STRING_METHODS,
    dict: frozenset(("copy", "get", "items", "keys", "values")),
    list: frozenset(("copy", "count", "index")),
    tuple: frozenset(("count", "index")),
}
_PLAIN = (int, float, complex, bytes, range, type(None))


# Filters of names that no template can write.
_ITEMS, _CONCAT, _MEASURED = "@items", "@concat", "@measured"


class _Guard(NodeTransformer):
    """Puts a check around the operations that need one: as a filter, which compiles to a plain call."""

    def _checked(self, check: str, node: nodes.Expr, *more: nodes.Expr) -> nodes.Expr:
        checked = nodes.Filter(node, check, list(more), [], None, None)
        checked.set_lineno(node.lineno)
        if node.environment is not None:
            checked.set_environment(node.environment)
        return checked

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._checked(_ITEMS, cast(nodes.Expr, node.iter))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._checked(_CONCAT, *node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = self._checked(_MEASURED, node.expr)
        for operand in node.ops:
            operand.expr = self._checked(_MEASURED, operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = self._checked(_MEASURED, node.node)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        self.generic_visit(node)
        node.node = self._checked(_MEASURED, node.node)
        node.args = [self._checked(_MEASURED, argument) for argument in node.args or ()]
        return node

    def _visit_literal(self, node: nodes.Literal) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":
            return node  # the targets of an assignment
        return self._checked(_MEASURED, node)

    visit_List = visit_Dict = visit_Tuple = _visit_literal


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here it is transparent."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """What Hugging Face's templates expect (`trim_blocks`, `lstrip_blocks`, `break`, `tojson`,
    `raise_exception`, `strftime_now`), and no more. Render inside `sandbox_budget.budget()`."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            optimized=False,  # else literals are worked out while compiling, outside of any budget
            cache_size=0,
        )
        self.filters = {
            **FILTERS,
            _ITEMS: _bounded_items,
            _CONCAT: lambda *values: self.concat(str(measured(value)) for value in values),
            _MEASURED: measured,
        }
        self.globals = {
            "range": _range,
            "namespace": Namespace,
            "dict": lambda *arguments, **named: dict(*arguments, **named),
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        return cast(nodes.Template, _Guard().visit(tree))

    def concat(self, parts: Iterable[str]) -> str:
        """Joins what a template, macro or block has written."""
        written: list[str] = []
        chars = 0
        for part in parts:
            chars += len(part)
            check_chars(chars if len(written) % 1_024 == 0 else len(part))
            written.append(part)
        check_chars(chars)
        return "".join(written)

    def wrap_str_format(self, value: Any) -> None:
        """Jinja would hand out a safe `str.format`, but its widths are not bounded: refused like the rest."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, allowed in _METHODS.items():
            if isinstance(obj, kind):
                return attr in allowed
        return not isinstance(obj, _PLAIN) and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Any, obj: Any, /, *arguments: Any, **named: Any) -> Any:
        spend()
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str) and isinstance(obj, BuiltinMethodType):
            check_method(owner, obj.__name__, arguments)
        return measured(super().call(context, obj, *arguments, **named))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        spend()
        if operator == "+":
            measured(left)
            return measured(super().call_binop(context, operator, left, measured(right)))
        if operator == "%" and isinstance(left, str):
            raise LimitExceeded("it formats text with %, which is not available")
        if operator in ("*", "**"):
            _check_product(operator, left, right)
        return super().call_binop(context, operator, left, right)


def _bounded_items(iterable: Any) -> Bounded:
    items = iterable if isinstance(iterable, list | tuple | dict | str | range) else list(iterable)
    return Bounded(cast("Sequence[Any]", items))


def _check_product(operator: str, left: Any, right: Any) -> None:
    """Numbers of a sane size, and repeated texts and lists."""
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length()
        if (bits * abs(right) if operator == "**" else bits + right.bit_length()) > MAX_INTEGER_BITS:
            raise LimitExceeded("it computes too large a number")
        return
    for repeated, times in ((left, right), (right, left)):
        if isinstance(repeated, str | list | tuple | bytes) and isinstance(times, int):
            measured(repeated)
            check_chars(len(repeated) * max(times, 0))


def _range(*arguments: int) -> range:
    items = range(*arguments)
    if len(items) > MAX_RANGE:
        raise LimitExceeded(f"it counts over more than {MAX_RANGE:,} numbers")
    return items


def _raise_exception(message: Any) -> str:
    raise jinja2.TemplateError(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > 64:
        raise LimitExceeded("its date format is longer than 64 characters")
    return datetime.now().strftime(format)
