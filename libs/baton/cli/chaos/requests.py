"""The requests of a chaos run, and their right answers."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

SHORTEST = 50  # tokens of the shortest prompt

Body = dict[str, Any]


@dataclass(slots=True)
class Request:
    """One request, and what became of it. Times in seconds."""

    index: int
    body: Body
    expected: str = ""
    text: str = ""
    error: str = ""
    slowest_s: float = 0.0  # the longest time between two pieces of its answer, or before the first
    began: float = 0.0  # monotonic
    first_s: float = 0.0  # until the first piece of its answer
    seconds: float = 0.0
    left: bool = False  # its client went away on purpose
    ended: bool = False  # its last piece has come

    @property
    def lost(self) -> bool:
        return bool(self.error) and not self.left

    @property
    def wrong(self) -> bool:
        return self.ended and self.text != self.expected


def make(count: int, *, model: str, seed: int, tokens: int, longest: int) -> list[Request]:
    """Prompts of 50 to `longest` tokens, most of them short; half greedy, half sampled with a seed.

    Half of the sampled ones have penalties as well.
    """
    made = []
    rng = random.Random(seed)
    for index in range(count):
        length = round(SHORTEST * (longest / SHORTEST) ** rng.random())
        body: Body = {"model": model, "stream": True, "max_tokens": tokens, "temperature": 0}
        if model == "mock":
            body["prompt"] = [rng.randrange(97, 123) for _ in range(length)]
        else:  # each of these words is one token of most vocabularies
            body["prompt"] = " ".join(rng.choice(_WORDS) for _ in range(length))
            body["ignore_eos"] = True
        if index % 2:
            body |= {"temperature": 0.8, "top_p": 0.95, "seed": index}
        if index % 4 == 3:
            body |= {"presence_penalty": 0.4, "frequency_penalty": 0.2}
        made.append(Request(index, body))
    return made


_WORDS = ("the", "of", "water", "light", "river", "stone", "small", "early", "winter", "road", "house")


def expect_mock(requests: list[Request]) -> None:
    """Fills in the undisturbed texts, which the mock's rules give."""
    from baton.protocol.sampling import SamplingParams
    from baton.runner.mock import expected_tokens

    known = SamplingParams.__struct_fields__
    for request in requests:
        params = SamplingParams(**{key: value for key, value in request.body.items() if key in known})
        tokens = expected_tokens(request.body["prompt"], params)
        request.expected = bytes(tokens).decode()


@dataclass(slots=True)
class Undisturbed:
    """What requests answered when nothing was done to anybody, and how many a second were answered then.

    With a `path` it lasts from one command to the next, which then spares the undisturbed run. Texts are
    kept by the workers' `fingerprint`: another build may answer otherwise.
    """

    path: Path | None = None
    fingerprint: str = ""
    capacity: float = 0.0  # requests a second; 0: not measured yet
    texts: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path | None) -> Undisturbed:
        """Raises: ValueError: the file was not written by `keep`."""
        if path is None or not path.exists():
            return cls(path)
        try:
            stored = json.loads(path.read_text())
            return cls(path, "", float(stored["capacity"]), dict(stored["texts"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} holds no texts of an undisturbed run; remove it") from error

    def fill(self, requests: list[Request]) -> bool:
        """Fills in the right texts; False if some are not known."""
        known = [self.texts.get(self._key(request)) for request in requests]
        for request, text in zip(requests, known, strict=True):
            request.expected = text or ""
        return None not in known and self.capacity > 0

    def keep(self, requests: list[Request], seconds: float) -> None:
        """Takes over what an undisturbed run of `requests` gave, and makes the requests new again."""
        for request in requests:
            self.texts[self._key(request)] = request.expected = request.text
            request.text, request.slowest_s, request.first_s, request.ended = "", 0.0, 0.0, False
        self.capacity = len(requests) / seconds
        if self.path is not None:
            self.path.write_text(json.dumps({"capacity": self.capacity, "texts": self.texts}))

    def _key(self, request: Request) -> str:
        asked = json.dumps([self.fingerprint, request.body], sort_keys=True)
        return sha256(asked.encode()).hexdigest()[:32]
