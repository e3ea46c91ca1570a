"""Keys' counts over all gateways: one of them keeps each key's, and the others ask it.

The keeper follows from the key and the gateways that live (rendezvous hashing), so nobody elects it. It tells
everybody what it counts a few times a second; when it goes, or another gateway comes, the next one goes on
from there.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import xxhash

from baton.bus.connection import BusDown, CallRejected, CallTimeout, NoResponder
from baton.bus.inbox import Inbox
from baton.bus.pace import to_next
from baton.protocol import subjects
from baton.protocol.codec import Codec, MalformedMessage
from baton.protocol.limits import Settle, Spent, Take, Taken
from baton.protocol.liveness import Heartbeat, Role, State
from baton.protocol.request import Rejected
from baton.service.base import ServiceHost
from baton_services.gateway.budgets import Budgets
from baton_services.gateway.keys import Key

ASK_S = 0.4
TELL_S = 0.2  # counts that have changed
RUNNING_S = 1.0  # how many requests run
KEYS_A_MESSAGE = 500
TRIES = 3

_codec = Codec(Taken, Rejected)


class Counts:
    """Asks the keepers, and is one."""

    def __init__(self, host: ServiceHost) -> None:
        self._host = host
        self._budgets = Budgets()
        self._running: Counter[str] = Counter()
        self._settled: asyncio.Queue[Settle] = asyncio.Queue()  # bounded by the requests that run
        self._stir = asyncio.Event()  # there is something to tell, or to forget
        self._ready: set[tuple[str, int]] = set()  # other gateways: id, epoch
        self._handed: set[str] = set()  # keys that another gateway keeps from now on

    async def start(self, group: asyncio.TaskGroup) -> None:
        host = self._host
        asked = await host.bus.inbox(subjects.limits(host.id, host.epoch), Take, Settle)
        told = await host.bus.inbox(subjects.spent(), Spent)
        host.directory.subscribe(self._peer_changed)
        for work in (self._keep(asked), self._learn(told), self._tell(), self._send_settled()):
            group.create_task(work)

    async def take(self, key: Key, tokens: int) -> Taken:
        """Books one request of `tokens` tokens if the key's limits allow it. If so, `settle` it later."""
        self._running[key.owner] += 1
        self._stir.set()
        ask = Take(
            key=key.owner,
            gateway=self._host.id,
            tokens=tokens,
            running=self._running[key.owner],
            requests_per_minute=key.requests_per_minute,
            tokens_per_minute=key.tokens_per_minute,
            concurrent=key.concurrent,
        )
        try:
            taken = await self._ask(ask)
        except BaseException:
            self._ended(key.owner)
            raise
        if taken.refused:
            self._ended(key.owner)
        return taken

    def settle(self, key: Key, *, tokens: int, age_s: float) -> None:
        """A request that was taken `age_s` ago has ended and used `tokens` more (or less) than was taken."""
        self._ended(key.owner)
        self._settled.put_nowait(
            Settle(
                key=key.owner,
                gateway=self._host.id,
                tokens=tokens,
                age_ms=int(age_s * 1000),
                running=self._running[key.owner],
            )
        )

    def _ended(self, key: str) -> None:
        self._running[key] -= 1
        if self._running[key] <= 0:
            del self._running[key]

    async def _ask(self, ask: Take) -> Taken:
        """Of its keeper; if none answers, by what is known here."""
        for _ in range(TRIES):
            keeper = self._keeper(ask.key)
            if keeper is None:
                break
            subject = subjects.limits(keeper.id, keeper.epoch)
            try:
                taken: Taken = await self._host.bus.call(subject, ask, _codec, timeout_s=ASK_S)
                return taken
            except (NoResponder, CallTimeout, CallRejected, MalformedMessage):
                self._host.directory.exclude(keeper.id, keeper.epoch)
            except BusDown:
                break
        return self._budgets.take(ask, time.monotonic())

    def _keeper(self, key: str, *, without: str = "") -> Heartbeat | None:
        """The gateway that keeps this key's count (or did, `without` one that has come); None: this one."""
        mine = self._host.id
        live = {
            beat.id: beat
            for beat in self._host.directory.live(Role.GATEWAY)
            if beat.id not in (mine, without)
        }
        candidates = list(live) if live and self._host.stopping.is_set() else [mine, *live]
        chosen = max(candidates, key=lambda id: (xxhash.xxh3_64_intdigest(f"{key} {id}".encode()), id))
        return live.get(chosen)

    async def _keep(self, inbox: Inbox) -> None:
        async for delivery in inbox:
            self._stir.set()
            now = time.monotonic()
            if isinstance(delivery.message, Take):
                await delivery.respond(self._budgets.take(delivery.message, now))
            else:
                self._budgets.settle(delivery.message, now)

    async def _send_settled(self) -> None:
        while True:
            settle = await self._settled.get()
            keeper = self._keeper(settle.key)
            if keeper is None:
                self._budgets.settle(settle, time.monotonic())
                continue
            try:
                await self._host.bus.publish(subjects.limits(keeper.id, keeper.epoch), settle)
            except BusDown:
                self._budgets.settle(settle, time.monotonic())  # told to the others when it is back

    async def _learn(self, inbox: Inbox) -> None:
        async for delivery in inbox:
            told: Spent = delivery.message
            if told.gateway == self._host.id:
                continue
            now = time.monotonic()
            for spent in told.keys:
                # Of what it keeps itself this gateway knows better, unless it has only just come to keep it.
                self._budgets.adopt(spent, now, unless_more=self._keeper(spent.key) is None)
            self._stir.set()
            if told.running is not None:
                self._budgets.run(told.gateway, told.running)

    async def _tell(self) -> None:
        last, said = 0.0, False
        while True:
            if not (said or self._running or self._budgets.known()):
                self._stir.clear()
            await self._stir.wait()
            await asyncio.sleep(to_next(TELL_S))
            now = time.monotonic()
            mine = {key for key in self._budgets.changed if self._keeper(key) is None} | self._handed
            self._budgets.changed.clear()
            self._handed.clear()
            running = None
            if now - last >= RUNNING_S:
                last = now
                self._budgets.forget(now)
                self._budgets.run(self._host.id, dict(self._running))
                if self._running or said:
                    running, said = dict(self._running), bool(self._running)
            await self._send(mine, running, now)

    async def _send(self, keys: set[str], running: dict[str, int] | None, now: float) -> None:
        spent = self._budgets.tell(keys, now)
        if not spent and running is None:
            return
        try:
            for first in range(0, max(1, len(spent)), KEYS_A_MESSAGE):
                part = spent[first : first + KEYS_A_MESSAGE]
                await self._host.bus.publish(
                    subjects.spent(), Spent(gateway=self._host.id, keys=part, running=running)
                )
        except BusDown:
            self._budgets.changed |= keys

    def _peer_changed(self, beat: Heartbeat, kind: str) -> None:
        if beat.role is not Role.GATEWAY or beat.id == self._host.id:
            return
        peer = (beat.id, beat.epoch)
        if kind == "left":
            self._ready.discard(peer)
            self._budgets.run(beat.id, {})
        elif beat.state is State.READY and peer not in self._ready:  # the keeper of some keys from now on
            self._ready.add(peer)
            self._handed |= {
                key for key in self._budgets.known() if self._keeper(key, without=beat.id) is None
            }
