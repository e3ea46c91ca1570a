"""What a key may do now: the models it may ask, its requests and tokens a minute, its requests at once.

`admit` before anything is generated, `spent` when the usage is known, `broke_off` when it never will be; the
middleware settles the difference. Until a request has ended, its tokens are counted by estimate.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from baton.protocol.limits import Taken
from baton.protocol.liveness import Heartbeat
from baton.protocol.request import Usage
from baton_services.gateway.body import SIZE
from baton_services.gateway.build import Plan
from baton_services.gateway.counts import Counts
from baton_services.gateway.errors import HttpError, refused
from baton_services.gateway.keys import Key, caller

GRANT = "grant"
ASSUMED = 256  # tokens of an answer whose length the request leaves open
FIRST_RATE = 0.4  # tokens a byte of a request's body, until some have been seen
LEARN = 0.2  # weight of the newest request in that rate
CHARACTERS = 3  # of an answer that breaks off, counted as a token

_WORDS = {
    "requests": "requests a minute",
    "tokens": "tokens a minute",
    "concurrent": "requests at once",
}


@dataclass(slots=True)
class Grant:
    """A request that counts against its key's limits."""

    key: Key
    model: str
    answer: Taken
    tokens: int  # taken
    prompt: int  # tokens of the prompt, by estimate
    at: float  # monotonic seconds
    used: int | None = None


class Limits:
    """The limits of all keys. `models`: name and aliases of each model there is -> one who serves it."""

    def __init__(self, counts: Counts, models: Callable[[], dict[str, Heartbeat]]) -> None:
        self._counts = counts
        self._models = models
        self._rates: dict[str, float] = {}

    def may_ask(self, http: web.Request, model: str) -> bool:
        """Whether the caller may ask this model, under any of its names."""
        key = caller(http)
        if key.models is None:
            return True
        beat = self._models().get(model)
        info = None if beat is None else beat.model_info
        return key.allows({model} if info is None else {model, info.name, *info.aliases})

    def check_model(self, http: web.Request, model: str) -> None:
        """Raises HttpError (403) unless the caller may ask this model."""
        if not self.may_ask(http, model):
            raise refused(
                "model_not_allowed", f"this key may not ask the model {model[:100]!r}", param="model"
            )

    async def admit(self, http: web.Request, model: str, plan: Plan | None = None) -> None:
        """Counts this request; without a `plan` it generates nothing.

        Raises:
            HttpError: 403, not this model; 429, a limit is reached, with when to try again.
        """
        self.check_model(http, model)
        key = caller(http)
        if not key.limited:
            return
        prompt = 0 if plan is None else math.ceil(http.get(SIZE, 0) * self._rates.get(model, FIRST_RATE))
        answer, bounded = (0, True) if plan is None else _answer(plan)
        limit = key.tokens_per_minute
        if limit and bounded and answer > limit:
            words = f"the answer may take {answer} tokens, and this key has {limit} a minute: ask for fewer"
            raise refused("rate_limit_exceeded", words, headers={"x-should-retry": "false"})
        tokens = min(limit, prompt + answer) if limit else prompt + answer
        taken = await self._counts.take(key, tokens)
        if taken.refused:
            raise _refusal(key, taken)
        http[GRANT] = Grant(key, model, taken, tokens, prompt, time.monotonic())

    def spent(self, http: web.Request, usage: Usage) -> None:
        """The request took so much."""
        grant: Grant | None = http.get(GRANT)
        if grant is None:
            return
        grant.used = usage.prompt_tokens + usage.completion_tokens
        size = http.get(SIZE, 0)
        if size:
            rate = self._rates.get(grant.model, FIRST_RATE)
            self._rates[grant.model] = rate + LEARN * (usage.prompt_tokens / size - rate)

    def broke_off(self, http: web.Request, characters: int) -> None:
        """The request ends early, after so many characters of its answer; what it took is estimated."""
        grant: Grant | None = http.get(GRANT)
        if grant is not None:
            grant.used = grant.prompt + characters // CHARACTERS

    def middleware(self) -> Middleware:
        """Settles what was taken, however the request ends. What nothing was said of took nothing."""

        @web.middleware
        async def settle(request: web.Request, handler: Handler) -> web.StreamResponse:
            try:
                return await handler(request)
            finally:
                grant: Grant | None = request.get(GRANT)
                if grant is not None:
                    age_s = time.monotonic() - grant.at
                    self._counts.settle(grant.key, tokens=(grant.used or 0) - grant.tokens, age_s=age_s)

        return settle


LIMITS = web.AppKey("limits", Limits)


def check_model(http: web.Request, model: str) -> None:
    """As `Limits.check_model`, for handlers that generate nothing.

    Raises:
        HttpError: 403.
    """
    http.app[LIMITS].check_model(http, model)


def headers(http: web.Request) -> dict[str, str]:
    """`x-ratelimit-*` as OpenAI sends them, for an answer to a key that has limits."""
    grant: Grant | None = http.get(GRANT)
    return {} if grant is None else _headers(grant.key, grant.answer)


def _headers(key: Key, taken: Taken) -> dict[str, str]:
    out = {}
    for name, limit, left, reset_ms in (
        ("requests", key.requests_per_minute, taken.requests_left, taken.requests_reset_ms),
        ("tokens", key.tokens_per_minute, taken.tokens_left, taken.tokens_reset_ms),
    ):
        if limit:
            out[f"x-ratelimit-limit-{name}"] = str(limit)
            out[f"x-ratelimit-remaining-{name}"] = str(left)
            out[f"x-ratelimit-reset-{name}"] = duration(reset_ms)
    return out


def duration(milliseconds: int) -> str:
    """A span of time as OpenAI writes it: `120ms`, `8.64s`, `6m0s`."""
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    seconds = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"


def _answer(plan: Plan) -> tuple[int, bool]:
    """The most tokens that all answers may have, and whether the request itself bounds them."""
    each = [generate.sampling.max_tokens for choices in plan.prompts for generate in choices]
    return sum(tokens or ASSUMED for tokens in each), all(each)


def _refusal(key: Key, taken: Taken) -> HttpError:
    limit = {
        "requests": key.requests_per_minute,
        "tokens": key.tokens_per_minute,
        "concurrent": key.concurrent,
    }[taken.refused]
    words = (
        f"the key {key.name} has reached its limit of {limit} {_WORDS[taken.refused]};"
        f" try again in {duration(taken.wait_ms)}"
    )
    again = {"Retry-After": str(math.ceil(taken.wait_ms / 1000)), "retry-after-ms": str(taken.wait_ms)}
    return refused("rate_limit_exceeded", words, headers={**_headers(key, taken), **again})
