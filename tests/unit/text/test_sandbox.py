"""Hostile templates end in an error, soon and small, and reach nothing of Python."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from baton.protocol.errors import RequestError
from baton.text import sandbox_budget
from baton.text.templates import ChatTemplate

SECONDS, MEGABYTES = 3.0, 200

ENDLESS = {
    "nested loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "nested loops over texts": "{% set s = 'x' * 9999 %}"
    "{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}",
    "loop in a condition": "{% for a in range(99999) if range(99999) | list | length < 0 %}{% endfor %}",
    "recursive macro": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "bounded recursion": "{% macro f(n) %}{% if n < 60 %}{{ f(n + 1) }}{{ f(n + 1) }}{% endif %}"
    "{% endmacro %}{{ f(0) }}",
    "doubling macros": "{% macro a() %}xxxxxxxx{% endmacro %}"
    + "".join(f"{{% macro {new}() %}}{{{{ {old}() }}}}{{{{ {old}() }}}}{{% endmacro %}}"
              for old, new in zip("abcdefghijklmnopqrstuvwxy", "bcdefghijklmnopqrstuvwxyz", strict=True))
    + "{{ z() }}",
    "recursive loop": "{% for x in [[1]] recursive %}{{ loop([[1]]) }}{{ loop([[1]]) }}{% endfor %}",
    "huge range": "{% for a in range(1000000000000) %}{% endfor %}",
    "text doubled by ~": "{% set n = namespace(s='x') %}"
    "{% for a in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "text doubled by +": "{% set n = namespace(s='x') %}"
    "{% for a in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "text doubled by a block": "{% set s = 'xxxxxxxx' %}" + "{% set s %}{{ s }}{{ s }}{% endset %}" * 60,
    "text repeated": "{{ 'x' * 1000000000000 }}",
    "list repeated": "{{ [1] * 1000000000000 }}",
    "list doubled": "{% set x = [1] %}" + "{% set x = [x, x] %}" * 60 + "{{ x }}",
    "list doubled, compared": "{% set x = [1] %}{% set y = [1] %}"
    + "{% set x = [x, x] %}{% set y = [y, y] %}" * 60 + "{{ x == y }}",
    "list doubled by +": "{% set n = namespace(s=[1]) %}"
    "{% for a in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "mapping doubled": "{% set x = {} %}" + "{% set x = dict(a=x, b=x) %}" * 60 + "{{ x | tojson }}",
    "namespace doubled": "{% set n = namespace(x=[1]) %}"
    + "{% set n.x = [n.x, n.x] %}" * 60 + "{{ n }}",
    "replace": "{% set n = namespace(s='xxxx') %}{% for a in range(60) %}"
    "{% set n.s = n.s | replace('x', 'xxxx') %}{% endfor %}",
    "replace method": "{% set n = namespace(s='xxxx') %}{% for a in range(60) %}"
    "{% set n.s = n.s.replace('', 'xxxx') %}{% endfor %}",
    "join": "{% set s = 'x' * 1000000 %}{{ ([s] * 100000) | join(s) }}",
    "join method": "{% set s = 'x' * 1000000 %}{{ s.join([s] * 1000) }}",
    "indent": "{{ ('\\n' * 1000000) | indent(100000) }}",
    "tojson indent": "{{ [[[[[1]]]]] | tojson(indent=1000000000) }}",
    "number": "{{ 9 ** (9 ** 9) }}",
    "numbers squared": "{% set n = namespace(i=9) %}"
    "{% for a in range(60) %}{% set n.i = n.i * n.i %}{% endfor %}",
    "format width": "{{ '%999999999d' % 1 }}",
    "format method": "{{ '{:>999999999}'.format(1) }}",
    "just": "{{ 'x'.ljust(999999999) }}",
    "bytes": "{{ (1).to_bytes(999999999, 'big') }}",
    "round": "{{ 1.5 | round(999999999, 'floor') }}",
    "output": "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "many searches": "{% set s = 'x' * 15000000 %}" + "{% if 'y' in s %}{% endif %}" * 1_500,
    "many slices": "{% set s = 'x' * 15000000 %}" + "{% set t = s[1:] %}" * 1_500,
    "many filters": "{% set s = 'x' * 15000000 %}" + "{% set t = s | title %}" * 1_500,
    "many methods": "{% set s = 'x ' * 7000000 %}" + "{% set t = s.split(' ') %}" * 500,
    "many tests": "{% set s = 'x' * 15000000 %}" + "{% set t = s is in(s) %}" * 1_500,
    "date format": "{{ strftime_now('%Y' * 100000) }}",
}  # fmt: skip


@pytest.mark.parametrize("name", ENDLESS)
def test_it_ends_soon_and_small(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_budget, "MAX_CPU_S", 0.25)
    template = ChatTemplate(ENDLESS[name], {})
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    start = time.process_time()
    with pytest.raises(RequestError, match=r"stopped|cannot render"):
        template.render([{"role": "user", "content": "x"}])
    assert time.process_time() - start < SECONDS
    peak = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
    assert int(peak) / 1024 - before / 2**20 < MEGABYTES


def test_processor_time_is_bounded_by_default() -> None:
    start = time.process_time()
    with pytest.raises(RequestError, match="more than 2 s"):
        ChatTemplate(ENDLESS["bounded recursion"], {}).render([{"role": "user", "content": "x"}])
    assert time.process_time() - start < 2 * SECONDS


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__init__ }}",
        "{{ self.__init__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ dict.__class__ }}",
        "{{ cycler }}{{ cycler('a').next }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(a=1) }}",
        "{% include 'x' %}",
        "{% import 'os' as os %}",
        "{{ 'x'.encode() }}",
    ],
)
def test_nothing_of_python_is_reached(source: str) -> None:
    messages = [{"role": "user", "content": "x"}]
    try:
        text = ChatTemplate(source, {}).render(messages)
    except RequestError:
        text = ""
    assert text == ""  # what is out of reach is refused or undefined
    assert messages == [{"role": "user", "content": "x"}]


def test_large_honest_work_is_done() -> None:
    """A long conversation, looked through for each of its messages, and long messages."""
    source = (
        "{% for m in messages %}{% set ns = namespace(n=0) %}{% for o in messages %}"
        "{% if o.role == m.role %}{% set ns.n = ns.n + 1 %}{% endif %}{% endfor %}"
        "<|im_start|>{{ m.role + '\n' + m.content | trim }}{{ ns.n }}<|im_end|>{% endfor %}"
    )
    messages = [{"role": "user", "content": f"message {number}"} for number in range(120)]
    assert ChatTemplate(source, {}).render(messages).endswith("message 119120<|im_end|>")
    long = [{"role": "user", "content": "x" * 8_000_000}]
    assert len(ChatTemplate(source, {}).render(long)) > 8_000_000
