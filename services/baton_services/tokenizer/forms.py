"""The form that an answer must have, made into a grammar: off the event loop, cached, and checked here, so
that what cannot be kept is refused before any worker hears of it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from baton.protocol.errors import Code, RequestError
from baton.protocol.request import Generate
from baton.protocol.sampling import Constraint
from baton.text.model_files import TextModel

if TYPE_CHECKING:
    from baton.text.grammar.compiler import GrammarCompiler

MAX_CACHED = 512

_encode = msgspec.msgpack.Encoder().encode


class Forms:
    """Grammars of one model. llguidance and the vocabulary are read when the first form is asked for."""

    def __init__(self, text: TextModel) -> None:
        self._text = text
        self._compiler: GrammarCompiler | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="forms")
        self._cache: OrderedDict[bytes, Constraint | RequestError] = OrderedDict()

    async def constraint(self, generate: Generate) -> Constraint | None:
        """What a request's output must follow.

        Raises:
            RequestError: the form cannot be kept; names the keyword and the field.
        """
        if generate.structure is None:
            return None
        key = _encode(generate.structure)
        found = self._cache.get(key)
        if found is None:
            loop = asyncio.get_running_loop()
            found = self._cache[key] = await loop.run_in_executor(self._thread, self._make, generate)
            if len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        if isinstance(found, RequestError):
            raise RequestError(found.failure)
        return found

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _make(self, generate: Generate) -> Constraint | RequestError:
        from baton.text.grammar.compose import compose
        from baton.text.grammar.open import open_compiler
        from baton.text.grammar.schema import GrammarError, explain

        structure = generate.structure
        assert structure is not None
        if self._compiler is None:
            self._compiler = open_compiler(self._text.tokenizer)
        try:
            constraint = compose(structure, None, None)
            assert constraint is not None
            self._compiler.matcher(constraint.grammar)
        except GrammarError as error:
            problem = " ".join(str(error).split())[:500]
            if structure.kind == "json_schema":
                problem = explain(problem, structure.text)
            return RequestError.of(
                Code.INVALID_REQUEST, f"{structure.param}: {problem}", param=structure.param
            )
        return constraint
