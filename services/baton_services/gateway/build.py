"""From a typed request to a `Generate`: what no schema can say, and Baton's own limits."""

from __future__ import annotations

import secrets
from typing import Any

from baton.protocol.base import pack_tokens
from baton.protocol.request import MAX_STOP_CHARS, MAX_STOP_STRINGS, Generate
from baton.protocol.request import ChatMessage as Turn
from baton.protocol.sampling import SamplingParams
from baton_services.gateway.errors import invalid, unsupported
from baton_services.gateway.schema import ChatMessage, ChatRequest, Common, CompletionRequest

COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions

_REFUSED_CHAT = {
    "tools": "tool calling",
    "tool_choice": "tool calling",
    "functions": "function calling",
    "function_call": "function calling",
    "audio": "audio output",
    "prediction": "predicted output",
    "web_search_options": "web search",
}
_INERT: dict[str, tuple[Any, ...]] = {"tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],)}


def chat(request: ChatRequest, /, **envelope: Any) -> Generate:
    """A chat request as a `Generate`; `envelope` holds request id, reply subject and deadline.

    Raises:
        RequestError: a value that cannot be honoured, by name.
    """
    for name, what in _REFUSED_CHAT.items():
        value = getattr(request, name)
        if value is not None and value not in _INERT.get(name, ()):
            raise unsupported(f"{name}: {what} is not supported", name)
    if request.response_format is not None and request.response_format.type != "text":
        raise unsupported(
            f"response_format: {request.response_format.type!r} is not supported, only 'text'",
            "response_format",
        )
    if request.modalities and request.modalities != ["text"]:
        raise unsupported("modalities: only ['text'] is supported", "modalities")
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs: needs logprobs: true", "top_logprobs")
    limit = request.max_completion_tokens or request.max_tokens or 0
    logprobs = (request.top_logprobs or 0) if request.logprobs else -1
    return Generate(
        messages=[_turn(message, index) for index, message in enumerate(request.messages)],
        sampling=_sampling(request, limit, logprobs),
        add_generation_prompt=request.add_generation_prompt is not False,
        template_arguments=request.chat_template_kwargs or {},
        **_common(request),
        **envelope,
    )


def completion(request: CompletionRequest, /, **envelope: Any) -> Generate:
    """A completion request as a `Generate`.

    Raises:
        RequestError: a value that cannot be honoured, by name.
    """
    if request.suffix:
        raise unsupported("suffix: is not supported", "suffix")
    if request.echo:
        raise unsupported("echo: is not supported", "echo")
    if request.best_of not in (None, 1):
        raise unsupported("best_of: only 1 is supported", "best_of")
    text, tokens = _prompt(request.prompt)
    logprobs = request.logprobs if request.logprobs is not None else -1
    return Generate(
        prompt=text,
        prompt_tokens=tokens,
        sampling=_sampling(request, request.max_tokens or COMPLETION_TOKENS, logprobs),
        **_common(request),
        **envelope,
    )


def _common(request: Common) -> dict[str, Any]:
    if request.n not in (None, 1):
        raise unsupported("n: only 1 choice a request is supported", "n")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options: only allowed with stream: true", "stream_options")
    return {
        "model": request.model,
        "stop": _stops(request.stop),
        "skip_special_tokens": request.skip_special_tokens is not False,
        "priority": request.priority or 0,
        "cache_salt": request.cache_salt or "",
    }


def _sampling(request: Common, max_tokens: int, logprobs: int) -> SamplingParams:
    seed = request.seed if request.seed is not None else secrets.randbits(63)
    if max_tokens and (request.min_tokens or 0) > max_tokens:
        raise invalid(f"min_tokens: {request.min_tokens} is more than max_tokens", "min_tokens")
    return SamplingParams(
        seed=seed % 2**64,
        temperature=_or(request.temperature, 1.0),
        top_k=max(0, request.top_k or 0),
        top_p=_or(request.top_p, 1.0),
        min_p=request.min_p or 0.0,
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=_bias(request.logit_bias),
        max_tokens=max_tokens,
        min_tokens=request.min_tokens or 0,
        stop_token_ids=request.stop_token_ids or [],
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _bias(bias: dict[str, float] | None) -> dict[int, float]:
    out = {}
    for name, value in (bias or {}).items():
        if not (name.isascii() and name.isdecimal()) or len(name) > 9:
            raise invalid(f"logit_bias: {name[:40]!r} is not a token id", "logit_bias")
        out[int(name)] = value
    return out


def _stops(stop: str | list[str] | None) -> list[str]:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOP_STRINGS:
        raise invalid(f"stop: {len(stops)} strings, at most {MAX_STOP_STRINGS} are allowed", "stop")
    for text in stops:
        if not text:
            raise invalid("stop: an empty string would stop at once", "stop")
        if len(text) > MAX_STOP_CHARS:
            raise invalid(f"stop: a string of {len(text)} characters, at most {MAX_STOP_CHARS}", "stop")
    return stops


def _turn(message: ChatMessage, index: int) -> Turn:
    place = f"messages[{index}]"
    if message.role in ("tool", "function") or message.tool_calls or message.function_call:
        raise unsupported(f"{place}: tool calling is not supported", f"{place}.role")
    content = message.content
    if isinstance(content, list):
        for number, part in enumerate(content):
            if part.type != "text":
                where = f"{place}.content[{number}]"
                raise unsupported(f"{where}: this model takes text, not {part.type[:40]!r}", where)
            if part.text is None:
                raise invalid(f"{place}.content[{number}]: a text part needs 'text'", f"{place}.content")
        content = "".join(part.text or "" for part in content)
    if content is None:
        if message.role != "assistant":
            raise invalid(f"{place}.content: is required of role {message.role!r}", f"{place}.content")
        content = ""
    return Turn(role=message.role, content=content, name=message.name)


def _prompt(prompt: Any) -> tuple[str | None, bytes | None]:
    """The prompt as text or as packed token ids."""
    if isinstance(prompt, str):
        return prompt, None
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a list of one prompt
        if isinstance(prompt, str):
            return prompt, None
    if not isinstance(prompt, list) or not prompt:
        raise invalid("prompt: must be a string, or a list of token ids", "prompt")
    if all(isinstance(item, int) and not isinstance(item, bool) for item in prompt):
        if any(not 0 <= item < 2**31 for item in prompt):
            raise invalid("prompt: a token id is out of range", "prompt")
        return None, pack_tokens(prompt)
    raise unsupported("prompt: only one prompt a request is supported", "prompt")
