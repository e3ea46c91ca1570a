"""Which tokenizers there are, by model, and asking one of them."""

from __future__ import annotations

import random
from typing import Any

from baton.bus.connection import Bus, BusDown, CallRejected, CallTimeout, NoResponder
from baton.bus.directory import Directory
from baton.protocol.base import Message
from baton.protocol.codec import Codec, MalformedMessage
from baton.protocol.errors import Code, Failure, RequestError
from baton.protocol.liveness import Heartbeat, Role, State

_BUSY = Failure(
    code=Code.OVERLOADED, message="every tokenizer is busy; try again later", retry_after_ms=1_000
)
BUS_LOST = Failure(code=Code.BUS_LOST, message="the message bus went away; please send the request again")
TOO_LARGE = Failure(
    code=Code.CONTEXT_LENGTH, message="the prompt is larger than a message may be, and any context"
)


class Tokenizers:
    """The tokenizers that a request sent now could go to."""

    def __init__(self, bus: Bus, directory: Directory) -> None:
        self._bus = bus
        self._directory = directory

    def ready(self) -> list[Heartbeat]:
        """All of them, whatever their model."""
        beats = self._directory.live(Role.TOKENIZER)
        return [beat for beat in beats if beat.routable and beat.state is State.READY]

    def models(self) -> dict[str, Heartbeat]:
        """Name and aliases of every model that can be asked now -> a tokenizer that serves it.

        A name goes before another model's alias; of an alias that two models have, the first by name has it.
        """
        told = [(beat.model_info, beat) for beat in self.ready() if beat.model_info is not None]
        told.sort(key=lambda pair: pair[0].name)
        found = {info.name: beat for info, beat in told}
        for info, beat in told:
            for alias in info.aliases:
                found.setdefault(alias, beat)
        return found

    def candidates(self, model: str) -> list[Heartbeat]:
        """Those that serve `model`, in random order: each is as good as the other."""
        meant = self.models().get(model)
        if meant is None:
            return []
        beats = [beat for beat in self.ready() if beat.model == meant.model]
        random.shuffle(beats)
        return beats

    def nobody(self, model: str) -> Failure:
        """Why `model` cannot be asked."""
        known = self.models()
        if model in known:
            return _BUSY
        if known:
            names = ", ".join(sorted(known))
            return Failure(
                code=Code.MODEL_NOT_FOUND,
                message=f"the model {model[:100]!r} is not served here, but {names}",
                param="model",
            )
        return Failure(
            code=Code.NO_WORKER, message="no model is ready yet; try again later", retry_after_ms=1_000
        )

    async def call(self, model: str, message: Message, codec: Codec, *, timeout_s: float) -> Any:
        """One call to any tokenizer of `model`; each is as good as the other.

        Raises:
            RequestError: no such model, nobody answers, or the answer is no.
        """
        for beat in self.candidates(model):
            try:
                return await self._bus.call(beat.subject, message, codec, timeout_s=timeout_s)
            except NoResponder:
                self._directory.exclude(beat.id, beat.epoch)
            except CallRejected as error:
                raise RequestError(error.failure) from error
            except MalformedMessage as error:
                raise RequestError(TOO_LARGE) from error
            except (BusDown, CallTimeout) as error:
                raise RequestError(BUS_LOST if isinstance(error, BusDown) else _BUSY) from error
        raise RequestError(self.nobody(model))
