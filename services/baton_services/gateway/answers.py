"""Counting and collecting what a request's sequences answer."""

from __future__ import annotations

from baton.protocol.request import CallDelta, TextDelta, Timing, TokenText, Usage
from baton_services.gateway.build import Plan
from baton_services.gateway.shapes import Whole


class Tally:
    """What all sequences of a request used together, known once each has sent its last delta."""

    def __init__(self, plan: Plan) -> None:
        self._sizes = [len(choices) for choices in plan.prompts]
        self._usage: dict[int, Usage] = {}
        self.timing: Timing | None = None  # of the sequence that ended last

    @property
    def complete(self) -> bool:
        return len(self._usage) == sum(self._sizes)

    def take(self, index: int, delta: TextDelta) -> None:
        if delta.finish:
            self._usage[index] = delta.usage or Usage(prompt_tokens=0, completion_tokens=0)
            self.timing = delta.timing or self.timing

    def usage(self) -> Usage:
        """A prompt counts once, however many answers it got; of those, all tokens count."""
        total = Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=0)
        first = 0
        for size in self._sizes:
            each = [self._usage[index] for index in range(first, first + size)]
            total.prompt_tokens += each[0].prompt_tokens
            total.completion_tokens += sum(usage.completion_tokens for usage in each)
            total.reasoning_tokens += sum(usage.reasoning_tokens for usage in each)
            # Later choices find the prompt where the first one left it; that is no hit of the client's.
            total.cached_tokens += min(usage.cached_tokens for usage in each)
            first += size
        return total


class Answers(Tally):
    """The texts of a request that is not streamed."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._shown = plan.shown
        self._scored = plan.scored
        self._texts: dict[int, list[str]] = {}
        self._tokens: dict[int, list[TokenText]] = {}
        self._finish: dict[int, str] = {}
        self._reasoning: dict[int, list[str]] = {}
        self._stops: dict[int, str] = {}
        self._calls: dict[int, dict[int, CallDelta]] = {}

    def take(self, index: int, delta: TextDelta) -> None:
        super().take(index, delta)
        self._texts.setdefault(index, []).append(delta.text)
        self._tokens.setdefault(index, []).extend(delta.tokens)
        self._reasoning.setdefault(index, []).append(delta.reasoning)
        for call in delta.calls:
            begun = self._calls.setdefault(index, {}).setdefault(call.index, call)
            if begun is not call:
                begun.arguments += call.arguments
        if delta.finish:
            self._finish[index], self._stops[index] = delta.finish, delta.stop

    def chosen(self) -> list[Whole]:
        """The answers to show, prompt by prompt: all, or of each prompt's those with the likeliest tokens."""
        shown: list[int] = []
        first = 0
        for size in self._sizes:
            drawn = list(range(first, first + size))
            if size > self._shown:
                drawn = sorted(drawn, key=self._likelihood, reverse=True)[: self._shown]
            shown += drawn
            first += size
        return [
            Whole(
                "".join(self._texts[i]),
                self._tokens[i],
                self._finish[i],
                "".join(self._reasoning[i]),
                list(self._calls.get(i, {}).values()),
                self._stops[i],
            )
            for i in shown
        ]

    def _likelihood(self, index: int) -> float:
        """Mean log-probability a token, as OpenAI's `best_of` ranks."""
        before = self._usage[index].prompt_tokens if self._scored else 0
        values = [token.logprob for token in self._tokens[index][before:] if token.logprob is not None]
        return sum(values) / len(values) if values else 0.0
