"""From output tokens to the text of one answer: detokenising, stop strings, logprobs, the final cut."""

from __future__ import annotations

from collections import deque

from baton.protocol.request import TokenText
from baton.protocol.sampling import TokenLogprobs
from baton.text.detokenizer import Detokenizer
from baton.text.stops import StopFilter
from baton.text.tokenizer import Tokenizer


class Answer:
    """The text of one answer as it grows. The cut made here is final: finish reason and usage follow it.

    Text is held back while it could still be part of a stop string or of an unfinished character. A token's
    logprobs go out with the text that completes it, so that the tokens joined equal the text.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: list[str], *, skip_special: bool, continues: bool
    ) -> None:
        """Args: continues: the answer goes on with the prompt's text (a completion), it starts none."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special, continues=continues)
        self._stops = StopFilter(stops) if stops else None
        self._held: deque[tuple[int, TokenText]] = deque()  # (characters up to and with the token, token)
        self._seen = 0  # characters detokenised
        self.sent = 0  # characters out
        self.described = 0  # tokens with logprobs out
        self.completion_tokens = 0  # up to the token that completes a stop string
        self.finish = ""

    def push(
        self, tokens: list[int], logprobs: list[TokenLogprobs], finish: str
    ) -> tuple[str, list[TokenText]]:
        """Takes new tokens, in order; returns the text and the logprobs that may go out now.

        Sets `finish` when a stop string is complete, or to the worker's `finish` after the last token.
        Once it is set, later tokens are dropped and not counted.
        """
        text = ""
        for index, token in enumerate(tokens):
            if self.finish:
                break
            self.completion_tokens += 1
            raw: list[bytes] = []
            piece = self._detokenizer.push([token], raw)
            self._seen += len(piece)
            if logprobs and not (self._skip_special and self._tokenizer.is_special(token)):
                self._held.append((self._seen, self._describe(raw[0], logprobs[index])))
            text += self._filter(piece)
        if finish and not self.finish:
            text += self._flush()
            self.finish = finish
        self.sent += len(text)
        return text, self._release()

    def _filter(self, piece: str) -> str:
        if self._stops is None:
            return piece
        text, hit = self._stops.push(piece)
        if hit:
            self.finish = "stop"
        return text

    def _flush(self) -> str:
        tail = self._detokenizer.flush()
        self._seen += len(tail)
        text = self._filter(tail)
        if self._stops is not None and not self.finish:
            text += self._stops.flush()
        return text

    def _release(self) -> list[TokenText]:
        out = []
        while self._held and self._held[0][0] <= self.sent:
            out.append(self._held.popleft()[1])
        self.described += len(out)
        return out

    def _describe(self, raw: bytes, logprobs: TokenLogprobs) -> TokenText:
        pairs = zip(logprobs.top_ids, logprobs.top, strict=True)
        others = [(self._tokenizer.token_bytes(token), value) for token, value in pairs]
        return TokenText(raw, logprobs.chosen, others)
