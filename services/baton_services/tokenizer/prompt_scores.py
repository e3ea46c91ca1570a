"""The log-probabilities of a prompt's tokens: coming in from a worker, and as a client sees them."""

from __future__ import annotations

import numpy as np

from baton.bus.prompt_rows import count, cut, width
from baton.protocol.request import TextDelta, TokenText
from baton.protocol.sampling import PromptRows
from baton.text.detokenizer import Detokenizer
from baton.text.tokenizer import Tokenizer

MOST = 600_000  # log-probabilities of one prompt: what a worker may have to send again in one message
EACH_DELTA = 1_024  # tokens with log-probabilities in one delta


class PromptScores:
    """Rows of one prompt, each taken once, from whichever attempts made them."""

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._parts: list[PromptRows] = []
        self.next = 1  # position of the first row that is missing

    @property
    def complete(self) -> bool:
        return self.next >= len(self._tokens)

    def take(self, rows: PromptRows) -> bool:
        """Takes what is new of `rows`; False if some before them are missing.

        Raises:
            MalformedMessage: they contradict themselves, or are of a longer prompt.
        """
        end = rows.start + count(rows, len(self._tokens))
        if rows.start > self.next:
            return False
        fresh = cut(rows, self.next)
        if fresh is not None:
            self._parts.append(fresh)
            self.next = end
        return True

    def described(self, tokenizer: Tokenizer, detokenizer: Detokenizer) -> list[TokenText]:
        """Every token of the prompt. Of the first one nothing is known but its text."""
        raws: list[bytes] = []
        detokenizer.push(self._tokens, raws)
        out: list[TokenText] = []
        rows = iter(self._rows(tokenizer))
        for token, raw in zip(self._tokens, raws, strict=True):
            logprob, top = next(rows) if out else (None, [])
            hidden = detokenizer.skips(token)
            out.append(TokenText(tokenizer.token_bytes(token) if hidden else raw, logprob, top, hidden))
        return out

    def _rows(self, tokenizer: Tokenizer) -> list[tuple[float, list[tuple[bytes, float]]]]:
        found = []
        for part in self._parts:
            chosen = np.frombuffer(part.chosen, dtype="<f4").tolist()
            shape = (len(chosen), width(part))
            ids = np.frombuffer(part.top_ids, dtype="<u4").reshape(shape).tolist()
            values = np.frombuffer(part.top, dtype="<f4").reshape(shape).tolist()
            for logprob, each, likely in zip(chosen, ids, values, strict=True):
                names = [tokenizer.token_bytes(token) for token in each]
                found.append((logprob, list(zip(names, likely, strict=True))))
        return found


def parted(delta: TextDelta) -> list[TextDelta]:
    """A delta as several that each fit a message: the text goes with the first, the end with the last."""
    parts = [delta]
    while len(parts[-1].tokens) > EACH_DELTA:
        whole = parts.pop()
        first = TextDelta(whole.request, whole.start, whole.text, token_start=whole.token_start)
        first.usage = whole.usage
        first.tokens, whole.tokens = whole.tokens[:EACH_DELTA], whole.tokens[EACH_DELTA:]
        whole.start, whole.text = whole.start + len(whole.text), ""
        whole.token_start += EACH_DELTA
        parts += [first, whole]
    return parts
