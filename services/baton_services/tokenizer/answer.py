"""From output tokens to the text of one answer: detokenising, stop strings, logprobs, the final cut."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from baton.protocol.request import TokenText
from baton.protocol.sampling import TokenLogprobs
from baton.text.detokenizer import Detokenizer
from baton.text.stops import StopFilter
from baton.text.tokenizer import Tokenizer


@dataclass(slots=True)
class _Held:
    """A token with logprobs that waits for the text it belongs to."""

    start: int  # characters of the answer before those that it completes
    end: int  # ... and with the last one it has a part in
    before: bytes  # of an unfinished character, by the tokens before
    text: str  # the characters that it completes
    token: TokenText


class Answer:
    """The text of one answer as it grows. The cut made here is final: finish reason and usage follow it.

    Text is held back while it could still be part of a stop string or of an unfinished character. A token's
    logprobs go out with the text that completes it, so that the bytes of the tokens, joined, are the text;
    of a token that a stop string cuts, the bytes before the cut.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: list[str],
        *,
        skip_special: bool,
        continues: bool,
        min_tokens: int = 0,
        keep: frozenset[int] = frozenset(),
    ) -> None:
        """Args:
        continues: the answer goes on with the prompt's text (a completion), it starts none.
        min_tokens: a stop string completed by a token before this many is only text.
        keep: special tokens that are part of the text all the same.
        """
        self._tokenizer = tokenizer
        self._min_tokens = min_tokens
        self._detokenizer = Detokenizer(tokenizer, skip_special=skip_special, continues=continues, keep=keep)
        self._stops = StopFilter(stops) if stops else None
        self._held: deque[_Held] = deque()
        self._echo = ""
        self._echoed: list[TokenText] = []
        self._seen = 0  # characters detokenised
        self.sent = 0  # characters out
        self.described = 0  # tokens with logprobs out
        self.completion_tokens = 0  # up to the token that completes a stop string
        self.finish = ""
        self.stop = ""  # the stop string that ended it

    def echo(self, text: str) -> None:
        """Puts the prompt's text before the answer's. It holds no stop strings."""
        self._echo = text
        self._seen = len(text)

    def echo_tokens(self, tokens: list[TokenText]) -> None:
        """Puts the prompt's tokens, with their log-probabilities, before the answer's."""
        self._echoed = tokens

    def push(
        self, tokens: list[int], logprobs: list[TokenLogprobs], finish: str
    ) -> tuple[str, list[TokenText]]:
        """Takes new tokens, in order; returns the text and the logprobs that may go out now.

        Sets `finish` when a stop string is complete, or to the worker's `finish` after the last token.
        Once it is set, later tokens are dropped and not counted.
        """
        text, self._echo = self._echo, ""
        for index, token in enumerate(tokens):
            if self.finish:
                break
            self.completion_tokens += 1
            piece = self._take(token, logprobs[index]) if logprobs else self._detokenizer.push([token])
            self._seen += len(piece)
            text += self._filter(piece)
        if finish and not self.finish:
            text += self._flush()
            self.finish = finish
        self.sent += len(text)
        return text, self._release()

    def _take(self, token: int, logprobs: TokenLogprobs) -> str:
        before = self._detokenizer.pending
        raw: list[bytes] = []
        piece = self._detokenizer.push([token], raw)
        if not self._detokenizer.skips(token):
            end = self._seen + len(piece) + bool(self._detokenizer.pending)
            self._held.append(_Held(self._seen, end, before, piece, self._describe(raw[0], logprobs)))
        return piece

    def _filter(self, piece: str) -> str:
        if self._stops is None:
            return piece
        text, hit = self._stops.push(piece, armed=self.completion_tokens >= self._min_tokens)
        if hit:
            self.finish, self.stop = "stop", self._stops.found
        return text

    def _flush(self) -> str:
        tail = self._detokenizer.flush()
        self._seen += len(tail)
        text = self._filter(tail)
        if self._stops is not None and not self.finish:
            text += self._stops.flush()
        return text

    def _release(self) -> list[TokenText]:
        out, self._echoed = self._echoed, []
        while self._held and self._held[0].end <= self.sent:
            out.append(self._held.popleft().token)
        if self.finish and self._held:
            cut = self._held.popleft()
            if cut.start < self.sent:
                cut.token.raw = _cut(cut, self.sent - cut.start)
                out.append(cut.token)
            self._held.clear()
        self.described += len(out)
        return out

    def _describe(self, raw: bytes, logprobs: TokenLogprobs) -> TokenText:
        pairs = zip(logprobs.top_ids, logprobs.top, strict=True)
        others = [(self._tokenizer.token_bytes(token), value) for token, value in pairs]
        return TokenText(raw, logprobs.chosen, others)


def _cut(held: _Held, characters: int) -> bytes:
    """The bytes of a token up to and with the first `characters` that it completes."""
    raw, wanted = held.token.raw, held.text[:characters]
    lengths = range(len(raw) + 1)
    fits = (
        raw[:length] for length in lengths if (held.before + raw[:length]).decode(errors="replace") == wanted
    )
    return next(fits, raw)
