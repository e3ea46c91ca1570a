"""From a typed request to the `Generate`s that answer it: what no schema can say, and Baton's own limits."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from baton.protocol.base import pack_tokens
from baton.protocol.request import MAX_STOP_CHARS, MAX_STOP_STRINGS, Generate
from baton.protocol.sampling import SamplingParams
from baton_services.gateway.errors import invalid, unsupported
from baton_services.gateway.keys import NOBODY
from baton_services.gateway.schema import ChatRequest, Common, CompletionRequest
from baton_services.gateway.structure import structure
from baton_services.gateway.tooling import tooling
from baton_services.gateway.turns import turns

COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
MAX_SEQUENCES = 512  # of one request: prompts times choices
MAX_ARGUMENT_DEPTH = 16

_REFUSED = {
    "functions": "the older form of tools",
    "function_call": "the older form of tool_choice",
    "audio": "audio output",
    "prediction": "predicted output",
    "web_search_options": "web search",
    "suffix": "text after the answer",
}
_INERT: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "suffix": ("",),
}


@dataclass(slots=True, frozen=True)
class Envelope:
    """What every `Generate` of a request shares. `request` is our id of the whole."""

    request: str
    reply_to: str
    deadline_ms: int
    rank: Callable[[int | None], int] = NOBODY.rank  # the priority of a request that asks for this one


@dataclass(slots=True)
class Plan:
    """The sequences that answer one request, by prompt; the client sees the best `shown` of each prompt's.

    There are more than `shown` only with `best_of`.
    """

    prompts: list[list[Generate]]
    shown: int
    scored: bool = False  # the tokens of an answer begin with its prompt's


def chat(request: ChatRequest, envelope: Envelope) -> Plan:
    """A chat request: one prompt.

    Raises:
        RequestError: a value that cannot be honoured, by name.
    """
    _refuse(request)
    if request.modalities and request.modalities != ["text"]:
        raise unsupported("modalities: only ['text'] is supported", "modalities")
    if request.top_logprobs and not request.logprobs:
        raise invalid("top_logprobs: needs logprobs: true", "top_logprobs")
    limit = request.max_completion_tokens or request.max_tokens or 0
    logprobs = (request.top_logprobs or 0) if request.logprobs else -1
    messages = turns(request.messages)
    open_end = bool(request.continue_final_message)
    if open_end and request.add_generation_prompt:
        raise invalid("continue_final_message: needs add_generation_prompt: false", "continue_final_message")
    arguments = request.chat_template_kwargs or {}
    _check_arguments(arguments)
    fields = {
        "messages": messages,
        "sampling": _sampling(request, limit, logprobs),
        "add_generation_prompt": request.add_generation_prompt is not False and not open_end,
        "continue_final_message": open_end,
        "template_arguments": arguments,
        **tooling(request),
    }
    return _plan(request, envelope, request.n or 1, request.n or 1, [fields])


def completion(request: CompletionRequest, envelope: Envelope) -> Plan:
    """A completion request: one prompt or several.

    Raises:
        RequestError: a value that cannot be honoured, by name.
    """
    _refuse(request)
    shown = request.n or 1
    drawn = request.best_of or shown
    if drawn < shown:
        raise invalid(f"best_of: {drawn} is less than n, {shown}", "best_of")
    if drawn > shown and request.stream:
        raise invalid("best_of: choosing the best needs all of them, so it cannot be streamed", "best_of")
    if request.max_tokens == 0 and not request.echo:
        raise invalid("max_tokens: 0 leaves nothing to answer without echo: true", "max_tokens")
    logprobs = request.logprobs if request.logprobs is not None else -1
    if drawn > shown:
        logprobs = max(logprobs, 0)  # the best is the likeliest
    limit = COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    sampling = _sampling(request, max(limit, 1), logprobs)
    scored = bool(request.echo) and request.logprobs is not None
    if scored:
        sampling.prompt_logprobs = logprobs
    prompts = _prompts(request.prompt)
    if len(prompts) * drawn > MAX_SEQUENCES:
        raise invalid(
            f"prompt: {len(prompts)} prompts of {drawn} choices, at most {MAX_SEQUENCES} together", "prompt"
        )
    shared = {"sampling": sampling, "echo": bool(request.echo), "only_prompt": limit == 0}
    plan = _plan(request, envelope, drawn, shown, [{**shared, **prompt} for prompt in prompts])
    plan.scored = scored
    return plan


def _refuse(request: Common) -> None:
    for name, what in _REFUSED.items():
        value = getattr(request, name, None)
        if value is not None and value not in _INERT.get(name, ()):
            raise unsupported(f"{name}: {what} is not supported", name)
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options: only allowed with stream: true", "stream_options")


def _plan(request: Common, envelope: Envelope, drawn: int, shown: int, prompts: list[dict[str, Any]]) -> Plan:
    """`drawn` sequences of each prompt, of one seed, told apart by `choice`. The first has the whole's id."""
    shared: dict[str, Any] = {
        "reply_to": envelope.reply_to,
        "deadline_ms": envelope.deadline_ms,
        "model": request.model,
        "stop": _stops(request.stop),
        "skip_special_tokens": request.skip_special_tokens is not False,
        "priority": envelope.rank(request.priority),
        "cache_salt": request.cache_salt or "",
        "structure": structure(request),
    }
    plan = Plan(
        [
            [Generate(request=uuid.uuid4().hex, choice=choice, **shared, **fields) for choice in range(drawn)]
            for fields in prompts
        ],
        shown,
    )
    plan.prompts[0][0].request = envelope.request
    return plan


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


def _check_arguments(arguments: dict[str, Any]) -> None:
    """Template arguments are free in form; what cannot travel is refused here."""
    name = "chat_template_kwargs"
    waiting: list[tuple[Any, int]] = [(arguments, 0)]
    while waiting:
        value, depth = waiting.pop()
        if depth > MAX_ARGUMENT_DEPTH:
            raise invalid(f"{name}: nests more than {MAX_ARGUMENT_DEPTH} deep", name)
        if isinstance(value, dict):
            waiting += ((item, depth + 1) for item in value.values())
        elif isinstance(value, list):
            waiting += ((item, depth + 1) for item in value)
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise invalid(f"{name}: holds an integer of more than 64 bits", name)


def _prompts(prompt: Any) -> list[dict[str, Any]]:
    """Each prompt as the fields of its `Generate`: a text, or packed token ids."""
    if isinstance(prompt, str):
        return [{"prompt": prompt}]
    if not isinstance(prompt, list) or not prompt:
        raise invalid("prompt: must be a string, a list of token ids, or a list of either", "prompt")
    if isinstance(prompt[0], int):
        return [_tokens(prompt, "prompt")]
    if len(prompt) > MAX_SEQUENCES:
        raise invalid(f"prompt: {len(prompt)} prompts, at most {MAX_SEQUENCES}", "prompt")
    found = []
    for index, item in enumerate(prompt):
        if isinstance(item, str):
            found.append({"prompt": item})
        elif isinstance(item, list):
            found.append(_tokens(item, f"prompt[{index}]"))
        else:
            where = f"prompt[{index}]"
            raise invalid(f"{where}: must be a string or a list of token ids", where)
    return found


def _tokens(ids: list[Any], where: str) -> dict[str, Any]:
    for index, item in enumerate(ids):
        if not isinstance(item, int) or isinstance(item, bool) or not 0 <= item < 2**31:
            raise invalid(f"{where}[{index}]: is not a token id", f"{where}[{index}]")
    return {"prompt_tokens": pack_tokens(ids)}
