"""Chat templates: a conversation to the text, and the token ids, that a model was trained on."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError

from baton.models.errors import ModelFileError
from baton.protocol.errors import Code, RequestError
from baton.protocol.request import ChatMessage
from baton.text.marks import Marks, holds_marks
from baton.text.matching import LongestMatch
from baton.text.sandbox import TemplateEnvironment
from baton.text.sandbox_budget import budget
from baton.text.tokenizer import SpecialToken, Tokenizer

MAX_TEMPLATE_CHARS = 128 * 1024  # of the largest in use some 20,000
_RESERVED = frozenset(("messages", "add_generation_prompt", "raise_exception", "strftime_now"))


class ChatTemplate:
    """One model's template, compiled. Threads may share it.

    Args:
        source: Jinja, as Hugging Face's `apply_chat_template` takes it.
        tokens: what it may name: `bos_token`, `eos_token` and so on.
        where: names the template in errors.

    Raises:
        ModelFileError: too long, or not a template.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], *, where: str = "the chat template") -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelFileError(
                f"{where}: {len(source)} characters; templates of up to {MAX_TEMPLATE_CHARS} are read"
            )
        if holds_marks(source):
            raise ModelFileError(f"{where}: holds private-use characters of plane 16")
        self.source = source
        self._tokens = dict(tokens)
        # OpenAI's later name for the system role; a model that was not trained on it knows the older one.
        self._roles = {} if "developer" in source else {"developer": "system"}
        try:
            self._template = TemplateEnvironment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelFileError(f"{where}: line {error.lineno}: {error.message}") from error
        except (RecursionError, MemoryError, SyntaxError, ValueError, OverflowError) as error:
            raise ModelFileError(f"{where}: cannot be compiled: {error}") from error

    def render(
        self,
        messages: Sequence[ChatMessage | Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
        marks: Marks | None = None,
        continue_final: bool = False,
    ) -> str:
        """The text of a conversation, with what users wrote marked by `marks`.

        With `continue_final` it ends with the last message's text, which the answer then goes on with.

        Raises:
            RequestError: the template refuses the conversation or cannot take it, an argument has a reserved
                name, rendering goes past its bounds, or the last message's text is not in it as it is.
        """
        arguments = arguments or {}
        if not _RESERVED.isdisjoint(arguments):
            taken = ", ".join(sorted(_RESERVED & set(arguments)))
            name = "chat_template_kwargs"
            words = f"{name}: template arguments may not be named {taken}"
            raise RequestError.of(Code.INVALID_REQUEST, words, param=name)
        marks = marks or Marks(LongestMatch({}))
        protected = marks.protect([self._plain(message) for message in messages])
        context = {
            "tools": None,
            "documents": None,
            **self._tokens,
            **marks.protect(dict(arguments)),
            "messages": protected,
            "add_generation_prompt": add_generation_prompt,
        }
        with budget():
            text = self._render(context)
        return _cut_after(text, protected[-1]["content"]) if continue_final else text

    def _plain(self, message: ChatMessage | Mapping[str, Any]) -> dict[str, Any]:
        plain = _plain(message)
        return {**plain, "role": self._roles.get(plain["role"], plain["role"])} if "role" in plain else plain

    def _render(self, context: dict[str, Any]) -> str:
        try:
            return self._template.render(context)
        except SecurityError as error:
            problem = f"the model's chat template was stopped: {error.message or error}"
        except jinja2.UndefinedError as error:
            problem = f"the model's chat template cannot render this conversation: {error.message}"
        except jinja2.TemplateError as error:
            problem = error.message or "the model's chat template refuses this conversation"
        except RecursionError:
            problem = "the model's chat template was stopped: it calls itself too deep"
        except Exception as error:  # whatever a template's own expressions raise: types, keys, numbers
            problem = f"the model's chat template cannot render this conversation: {error}"
        raise RequestError.of(Code.INVALID_REQUEST, problem[:1_000], param="messages")


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    messages: Sequence[ChatMessage | Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    arguments: Mapping[str, Any] | None = None,
    continue_final: bool = False,
) -> list[int]:
    """Token ids of a conversation. Special tokens come from the template alone, whatever a message holds.

    A second rendering, with the outer characters of every special token marked in what users wrote, shows
    whether the template has pieced a special token together out of that; if so, the second one is taken.

    Raises:
        RequestError: there is no template, or as `ChatTemplate.render`.
    """
    if template is None:
        raise RequestError.of(
            Code.INVALID_REQUEST, "this model has no chat template: use completions", param="messages"
        )

    def pieces(edges: str) -> list[str | SpecialToken]:
        marks = Marks(tokenizer.special_texts, edges)
        text = template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            arguments=arguments,
            marks=marks,
            continue_final=continue_final,
        )
        found = tokenizer.split(text)
        return [piece if isinstance(piece, SpecialToken) else marks.restore(piece) for piece in found]

    found = pieces("")
    edges = tokenizer.special_edges
    if _mentions(edges, [*map(_plain, messages), dict(arguments or {})]):
        safe = pieces(edges)
        if _specials(safe) != _specials(found):
            found = safe
    return tokenizer.encode_pieces(found)


def _specials(pieces: Sequence[str | SpecialToken]) -> list[SpecialToken]:
    return [piece for piece in pieces if isinstance(piece, SpecialToken)]


def _mentions(characters: str, value: Any) -> bool:
    """Whether any string in `value` has one of these characters."""
    if isinstance(value, str):
        return any(character in value for character in characters)
    if isinstance(value, dict):
        return any(_mentions(characters, item) for item in value.values())
    return isinstance(value, list | tuple) and any(_mentions(characters, item) for item in value)


def _cut_after(text: str, content: str) -> str:
    """`text` up to the last place where `content` stands; templates may have trimmed it."""
    for wanted in (content, content.lstrip(), content.rstrip(), content.strip()):
        start = text.rfind(wanted) if wanted.strip() else -1
        if start >= 0:
            return text[: start + len(wanted)]
    problem = (
        "continue_final_message: the last message has no text, or the template does not show it as it is"
    )
    raise RequestError.of(Code.INVALID_REQUEST, problem, param="continue_final_message")


def _plain(message: ChatMessage | Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates take it; one without content has an empty one."""
    if isinstance(message, ChatMessage):
        fields = {
            "role": message.role,
            "content": message.content,
            "name": message.name,
            "tool_calls": [_plain_call(call) for call in message.tool_calls] or None,
            "tool_call_id": message.tool_call_id,
        }
        message = {name: value for name, value in fields.items() if value is not None}
    else:
        message = dict(message)
    if message.get("content") is None:
        message["content"] = ""
    return message


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as an object, as Hugging Face's templates want them, if they are one."""
    function = dict(call.get("function") or {})
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if isinstance(arguments, dict):
        function["arguments"] = arguments
    return {**call, "function": function}
