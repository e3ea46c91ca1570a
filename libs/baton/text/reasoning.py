"""Reasoning apart from the answer: think tags in a model's text."""

from __future__ import annotations

from dataclasses import dataclass

_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ThinkTags:
    """What a family puts around its reasoning."""

    begin: str
    end: str


KNOWN = (
    ThinkTags("<think>", "</think>"),
    ThinkTags("<thinking>", "</thinking>"),
    ThinkTags("[THINK]", "[/THINK]"),
)


def detect(template: str | None) -> ThinkTags | None:
    """The tags that a chat template knows; None: the model does not reason."""
    source = template or ""
    return next((tags for tags in KNOWN if tags.end in source), None)


def begun(tags: ThinkTags, prompt_end: str) -> bool:
    """Whether a prompt that ends like this has opened the reasoning already."""
    return prompt_end.rstrip(_SPACE).endswith(tags.begin)


class ReasoningReader:
    """Divides one answer into (reasoning, text), piece by piece.

    Only an answer that begins with the tag, or whose prompt ended with it, reasons: a tag later on is text.
    White space around the tags goes with them.
    """

    def __init__(self, tags: ThinkTags, *, begun: bool) -> None:
        self._tags = tags
        self._where = "opened" if begun else "start"
        self._held = ""

    @property
    def under_way(self) -> bool:
        """Whether what comes next is reasoning still, as far as one can tell."""
        return self._where in ("opened", "reasoning")

    def push(self, text: str) -> tuple[str, str]:
        """(reasoning, text) that is certain now."""
        if self._where == "text":
            return "", text
        self._held += text
        if self._where == "start":
            self._begin()
        if self._where == "opened" and self._held.lstrip(_SPACE):
            self._held, self._where = self._held.lstrip(_SPACE), "reasoning"
        if self._where == "reasoning":
            return self._reason()
        if self._where == "closed" and self._held.lstrip(_SPACE):
            self._held, self._where = self._held.lstrip(_SPACE), "text"
        if self._where == "text":
            text, self._held = self._held, ""
            return "", text
        return "", ""

    def finish(self) -> tuple[str, str]:
        """At the end: what was held back."""
        held, self._held = self._held, ""
        if self._where == "reasoning":
            return held.rstrip(_SPACE), ""
        return ("", held) if self._where == "start" else ("", "")

    def _begin(self) -> None:
        rest = self._held.lstrip(_SPACE)
        if rest.startswith(self._tags.begin):
            self._held, self._where = rest[len(self._tags.begin) :], "opened"
        elif not self._tags.begin.startswith(rest):
            self._where = "text"

    def _reason(self) -> tuple[str, str]:
        end = self._tags.end
        at = self._held.find(end)
        if at >= 0:
            reasoning, rest = self._held[:at].rstrip(_SPACE), self._held[at + len(end) :]
            self._held, self._where = "", "closed"
            return reasoning, self.push(rest)[1]
        longest = min(len(end) - 1, len(self._held))
        overlap = next((n for n in range(longest, 0, -1) if self._held.endswith(end[:n])), 0)
        safe = self._held[: len(self._held) - overlap].rstrip(_SPACE)
        self._held = self._held[len(safe) :]
        return safe, ""
