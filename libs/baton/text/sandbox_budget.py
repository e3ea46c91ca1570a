"""What one rendering of a template may use: steps, processor time, and the size of what it builds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2.exceptions import SecurityError

MAX_STEPS = 2_000_000
MAX_CPU_S = 2.0
MAX_CHARS = 16 * 1024 * 1024  # of any one string, and of the whole output
MAX_ITEMS = 250_000  # of any list or mapping, what is inside it included
MAX_DEPTH = 64
CHARS_A_STEP = 64  # copying this many characters counts as one step
STEPS_A_CLOCK = 256


class LimitExceeded(SecurityError):
    """A template went past its budget."""


class Budget:
    """Counts down. Every operation of a template whose cost the template chooses spends here first."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._clock_at = MAX_STEPS - STEPS_A_CLOCK
        self._deadline = time.thread_time() + MAX_CPU_S

    def spend(self, steps: int = 1) -> None:
        """
        Raises:
            LimitExceeded: the steps or the processor time are used up.
        """
        self._steps -= steps
        if self._steps > self._clock_at:
            return
        if self._steps < 0:
            raise LimitExceeded(f"it takes more than {MAX_STEPS:,} steps")
        if time.thread_time() > self._deadline:
            raise LimitExceeded(f"it takes more than {MAX_CPU_S:g} s")
        self._clock_at = self._steps - STEPS_A_CLOCK


_active: ContextVar[Budget] = ContextVar("template_budget")


@contextmanager
def budget() -> Iterator[None]:
    """A fresh budget for one rendering."""
    token = _active.set(Budget())
    try:
        yield
    finally:
        _active.reset(token)


def spend(steps: int = 1) -> None:
    """Spend from the rendering under way.

    Raises:
        LimitExceeded: its budget is used up.
    """
    _active.get().spend(steps)


def check_chars(count: int) -> None:
    """Before a string of `count` characters is built.

    Raises:
        LimitExceeded: it is too long, or the budget is used up.
    """
    if count > MAX_CHARS:
        raise LimitExceeded(f"it builds a text of more than {MAX_CHARS:,} characters")
    spend(1 + count // CHARS_A_STEP)


def measured(value: Any) -> Any:
    """`value`, if what it holds as a tree (what is shared counts each time) is small enough to be printed,
    compared or written as JSON.

    Raises:
        LimitExceeded: too many items, too deep, or the budget is used up.
    """
    if isinstance(value, str):
        check_chars(len(value))
    elif isinstance(value, list | tuple | dict):
        items = chars = 0
        level: list[Any] = [value]
        for _ in range(MAX_DEPTH):
            inner: list[Any] = []
            for container in level:
                items += len(container)
                if items > MAX_ITEMS:
                    raise LimitExceeded(f"it builds a list of more than {MAX_ITEMS:,} items")
                for item in _contents(container):
                    if isinstance(item, str):
                        chars += len(item)
                    elif isinstance(item, list | tuple | dict):
                        inner.append(item)
            if not inner:
                break
            level = inner
        else:
            raise LimitExceeded(f"it nests lists more than {MAX_DEPTH} deep")
        check_chars(chars)
        spend(items // 8)
    return value


def _contents(container: Any) -> Iterator[Any]:
    if isinstance(container, dict):
        yield from container.keys()
        yield from container.values()
    else:
        yield from container


class Bounded:
    """The items of a `for`, each of which costs a step. Has a length, so that `loop.length` needs no copy."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        for item in self._items:
            spend()
            yield item
