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
    """Rows of one prompt, each taken once, from whichever attempts made them.

    `told` are the prompt's tokens as far as they are here; of the first one nothing is known but its text.
    """

    def __init__(self, tokens: list[int], tokenizer: Tokenizer, detokenizer: Detokenizer) -> None:
        self._tokens = tokens
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self.told = [self._tell(tokens[0], None, [])]

    @property
    def next(self) -> int:
        """Position of the first row that is missing."""
        return len(self.told)

    @property
    def complete(self) -> bool:
        return self.next == len(self._tokens)

    def take(self, rows: PromptRows) -> bool:
        """Takes what is new of `rows`; False if some before them are missing.

        Raises:
            MalformedMessage: they contradict themselves, or are of a longer prompt.
        """
        count(rows, len(self._tokens))
        if rows.start > self.next:
            return False
        fresh = cut(rows, self.next)
        if fresh is not None:
            chosen = np.frombuffer(fresh.chosen, dtype="<f4").tolist()
            shape = (len(chosen), width(fresh))
            ids = np.frombuffer(fresh.top_ids, dtype="<u4").reshape(shape).tolist()
            values = np.frombuffer(fresh.top, dtype="<f4").reshape(shape).tolist()
            for logprob, each, likely in zip(chosen, ids, values, strict=True):
                names = [self._tokenizer.token_bytes(token) for token in each]
                top = list(zip(names, likely, strict=True))
                self.told.append(self._tell(self._tokens[self.next], logprob, top))
        return True

    def _tell(self, token: int, logprob: float | None, top: list[tuple[bytes, float]]) -> TokenText:
        raw: list[bytes] = []
        self._detokenizer.push([token], raw)
        if self._detokenizer.skips(token):
            return TokenText(self._tokenizer.token_bytes(token), logprob, top, hidden=True)
        return TokenText(raw[0], logprob, top)


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
