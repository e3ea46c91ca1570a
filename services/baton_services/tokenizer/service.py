"""The tokenizer service: owns live requests, from text to tokens and back."""

from __future__ import annotations

import asyncio
import time

import msgspec

from baton.bus.connection import BusDown
from baton.bus.inbox import Delivery, Inbox
from baton.protocol import subjects
from baton.protocol.codec import MalformedMessage
from baton.protocol.errors import Code, Failure, RequestError
from baton.protocol.liveness import Heartbeat, Role, State
from baton.protocol.request import (
    Accepted,
    CancelRequest,
    Decode,
    Encode,
    Generate,
    Inquire,
    Rejected,
    TextDelta,
)
from baton.protocol.work import Cancel, Drain, Leaving, TokenBatch, Tokens
from baton.service.host import ServiceHost
from baton.telemetry.logs import get_logger
from baton_services.tokenizer.conversions import Conversions
from baton_services.tokenizer.dispatch import Dispatcher
from baton_services.tokenizer.figures import Figures
from baton_services.tokenizer.live import LiveRequest
from baton_services.tokenizer.outbox import Outbox
from baton_services.tokenizer.prepare import Preparer, load_text
from baton_services.tokenizer.prompt_scores import parted
from baton_services.tokenizer.replays import INTERNAL, Replays
from baton_services.tokenizer.vigil import Vigil

log = get_logger(__name__)


class TokenizerService:
    """Takes `Generate` from gateways, answers with text, and owns every retry in between."""

    def __init__(self, host: ServiceHost) -> None:
        self._host = host
        self._bus = host.bus
        self._live: dict[str, LiveRequest] = {}
        self._tokens_subject = subjects.tokens(host.model, host.id, host.epoch)
        self._outbox = Outbox(host.bus, tokenizer=host.id, epoch=host.epoch, gone=self._gateway_gone)
        self._dispatcher = Dispatcher(
            host.bus,
            host.directory,
            tokens_subject=self._tokens_subject,
            max_attempts=host.settings.tokenizer.max_attempts,
        )
        self._figures = Figures(host.registry)
        self._draining = False

    async def start(self, group: asyncio.TaskGroup) -> None:
        """Loads the tokenizer and template, then serves."""
        host = self._host
        text, info = await asyncio.to_thread(load_text, host.settings)
        self._preparer = Preparer(
            text, info, host.settings.tokenizer.threads, host.settings.tokenizer.tool_calls
        )
        self._group = group
        self._conversions = Conversions(self._preparer, group.create_task)
        requests = await self._bus.inbox(
            host.subject, Generate, CancelRequest, Inquire, Encode, Decode, Drain
        )
        tokens = await self._bus.inbox(self._tokens_subject, TokenBatch, Leaving)
        self._replays = Replays(self._dispatcher, group.create_task, self._end_with)
        vigil = self._vigil = Vigil(self._live, self._bus, host.directory, self._replays, end=self._end_with)
        group.create_task(self._serve_requests(requests))
        group.create_task(self._serve_tokens(tokens))
        group.create_task(vigil.run(self._outbox))
        host.directory.subscribe(self._peer_changed)
        self._info = host.beat.model_info = info
        host.beat.state = State.READY
        self._check_routable()
        await host.announce()

    async def drain(self, grace_s: float) -> None:
        """Takes nothing new; waits for live requests to end, at most `grace_s`."""
        self._draining = True
        until = time.monotonic() + grace_s
        while self._live and time.monotonic() < until:
            await asyncio.sleep(0.05)

    async def stop(self) -> None:
        """Ends what is left with a clear failure."""
        failure = Failure(
            code=Code.DRAINING, message="the tokenizer is stopping; please send the request again"
        )
        for live in list(self._live.values()):
            await self._end_with(live, failure)
        await self._outbox.flush()
        self._preparer.close()

    # --- requests in ---------------------------------------------------------------------------------

    async def _serve_requests(self, inbox: Inbox) -> None:
        async for delivery in inbox:
            match delivery.message:
                case Generate():
                    await self._take(delivery)
                case CancelRequest(request=request, reason=reason, finish=finish):
                    if (live := self._live.get(request)) is not None:
                        if finish:
                            await self._cut(live)
                        await self._cancel(live, reason or "the client has gone")
                case Inquire(request=request):
                    known = request in self._live
                    await delivery.respond(Accepted() if known else _reject(Code.STALE, "not owned here"))
                case Encode() | Decode():
                    await self._conversions.take(delivery)
                case Drain(grace_ms=grace_ms):
                    await delivery.respond(Accepted())
                    self._host.request_drain(grace_ms)

    async def _take(self, delivery: Delivery) -> None:
        generate: Generate = delivery.message
        if generate.request in self._live:
            await delivery.respond(Accepted())
            return
        if self._draining:
            await delivery.respond(_reject(Code.DRAINING, "this tokenizer is draining"))
            return
        if len(self._live) + len(generate.forks) >= self._host.settings.tokenizer.max_requests:
            await delivery.respond(_reject(Code.OVERLOADED, "too many live requests; try again later"))
            return
        await delivery.respond(Accepted())
        live = self._preparer.live(generate)
        self._live |= {each.id: each for each in (live, *live.riders)}
        self._group.create_task(self._begin(live))

    async def _begin(self, live: LiveRequest) -> None:
        try:
            await self._preparer.prepare(live)
            self._figures.began(live)
        except RequestError as error:
            await self._end_with(live, error.failure)
        except Exception:
            log.exception("could not prepare request %s", live.id)
            await self._end_with(live, INTERNAL)
        else:
            await self._replays.run(live)
        await self._outbox.flush()

    # --- tokens in -----------------------------------------------------------------------------------

    async def _serve_tokens(self, inbox: Inbox) -> None:
        async for delivery in inbox:
            if isinstance(delivery.message, Leaving):
                self._leaving(delivery.message)
                continue
            batch: TokenBatch = delivery.message
            self._vigil.heard(batch.worker, batch.epoch)
            try:
                for item in batch.items:
                    await self._on_item(batch, item)
                await self._outbox.flush()
            except BusDown:
                log.debug("tokens of %s arrived while the bus went away", batch.worker)

    def _leaving(self, message: Leaving) -> None:
        for request, attempt in message.requests:
            live = self._live.get(request)
            if live is not None and live.attempt == attempt:
                self._replays.leaving(live, message.worker, message.epoch)

    async def _on_item(self, batch: TokenBatch, item: Tokens) -> None:
        live = self._live.get(item.request)
        if live is None or item.attempt != live.attempt:
            beat = self._host.directory.get(batch.worker)
            if beat is not None and beat.epoch == batch.epoch:
                stale = Cancel(request=item.request, attempt=item.attempt, reason="stale")
                await self._bus.publish(beat.subject, stale)
            return
        live.heard = time.monotonic()
        if item.failure is not None:
            await self._replays.failed(live, batch.worker, item.failure)
            return
        try:
            await self._take_tokens(live, batch, item)
        except MalformedMessage as error:
            log.error("tokens of %s for %s: %s", batch.worker, live.id, error)
            await self._end_with(live, INTERNAL)

    async def _take_tokens(self, live: LiveRequest, batch: TokenBatch, item: Tokens) -> None:
        news = live.receive(item) if self._scored(live, item) else None
        if news is None:
            live.heard = 0.0  # the vigil asks its worker for what is missing
            return
        if item.prompt is not None:
            return  # rows come alone
        tokens, logprobs, finish = news
        if item.cached_tokens and not live.output:
            live.cached_tokens = item.cached_tokens
        if tokens or finish:
            live.holder, live.setbacks, live.progressed = batch.worker, 0, live.heard
        live.output += tokens
        live.logprobs += logprobs
        if live.generate.only_prompt:
            tokens, logprobs, finish = [], [], finish and "length"
        self._figures.tokens(live, len(tokens))
        delta = live.delta(tokens, logprobs, finish)
        if live.answer.finish:
            await self._finish(live, item, delta)
        elif delta.text or delta.tokens or delta.reasoning or delta.calls:
            if not live.begun:
                live.begun, delta.usage = True, live.usage()
            self._put(live, delta)

    def _scored(self, live: LiveRequest, item: Tokens) -> bool:
        """Takes rows of the prompt; False if some are missing before this item."""
        scores = live.scores
        if scores is None:
            return True
        if item.prompt is not None and not scores.take(item.prompt):
            return False
        live.progressed = live.heard
        if not scores.complete:
            return not item.tokens and item.total < 0
        if not live.described:
            live.described = True
            live.answer.echo_tokens(list(scores.told))
        return True

    def _put(self, live: LiveRequest, delta: TextDelta) -> None:
        for part in parted(delta):
            self._outbox.put(live.generate.reply_to, part)

    async def _finish(self, live: LiveRequest, item: Tokens, last: TextDelta) -> None:
        timing = item.timing or live.timing
        last.finish, last.usage, last.timing = live.finish, live.usage(), timing
        last.stop = live.answer.stop
        self._put(live, last)
        self._figures.ended(live, live.finish)
        self._forget(live)
        if item.total >= 0:
            await self._dispatcher.ended(live)
        else:  # our stop string: the worker would go on
            await self._dispatcher.withdraw(live, "stop string")

    # --- ends ----------------------------------------------------------------------------------------

    async def _end_with(self, live: LiveRequest, failure: Failure) -> None:
        """Ends a request with a failure, told to its gateway, and frees its workers. Idempotent."""
        riders, live.riders = live.riders, []
        for each in (live, *riders):
            if not each.over:
                end = TextDelta(
                    each.id, each.written, "", failure=failure, usage=each.usage(), timing=each.timing
                )
                self._outbox.put(each.generate.reply_to, end)
                self._figures.ended(each, failure.code.value)
                await self._cancel(each, failure.message)

    async def _cut(self, live: LiveRequest) -> None:
        """The last delta of a request that its client ends and still reads."""
        end = TextDelta(live.id, live.written, "", finish="cancelled", usage=live.usage(), timing=live.timing)
        self._outbox.put(live.generate.reply_to, end)
        self._figures.ended(live, end.finish)
        await self._outbox.flush()

    async def _cancel(self, live: LiveRequest, reason: str) -> None:
        if not live.over:
            self._forget(live)
        await self._dispatcher.withdraw(live, reason)

    def _forget(self, live: LiveRequest) -> None:
        live.over = True
        self._live.pop(live.id, None)

    # --- peers ---------------------------------------------------------------------------------------

    def _peer_changed(self, beat: Heartbeat, kind: str) -> None:
        if beat.role is Role.ROUTER:
            self._check_routable()
        if beat.role not in (Role.PREFILL, Role.DECODE):
            return
        if kind != "updated":
            self._fit_context()
        if kind != "left":
            self._vigil.heard(beat.id, beat.epoch)
            return
        self._vigil.left(beat.id, beat.epoch)
        for live in list(self._live.values()):
            for leg in live.legs():
                if (leg.id, leg.epoch) == (beat.id, beat.epoch):
                    self._replays.lost(live, leg)

    def _fit_context(self) -> None:
        """No longer a context than every live worker's KV pool holds; said to gateways as well."""
        beats = [beat for role in (Role.PREFILL, Role.DECODE) for beat in self._host.directory.live(role)]
        limits = [beat.model_info.max_context for beat in beats if beat.model_info is not None]
        fitting = min([self._info.max_context, *limits])
        if fitting != self._preparer.max_context:
            self._preparer.max_context = fitting
            self._host.beat.model_info = msgspec.structs.replace(self._info, max_context=fitting)
            self._host.touch()

    def _check_routable(self) -> None:
        routers = self._host.directory.live(Role.ROUTER)
        routable = bool(routers) and routers[0].routable and not self._draining
        if routable != self._host.beat.routable:
            self._host.beat.routable = routable
            self._group.create_task(self._host.announce())

    def _gateway_gone(self, subject: str) -> None:
        for live in list(self._live.values()):
            if live.generate.reply_to == subject:
                self._group.create_task(self._cancel(live, "its gateway has gone"))


def _reject(code: Code, message: str) -> Rejected:
    return Rejected(failure=Failure(code=code, message=message))
