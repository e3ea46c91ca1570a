"""What has been taken from the queue and not yet begun, in the order in which it is best begun. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

from nats.aio.msg import Msg

from baton.batch.order import Key
from baton.batch.results import Item


@dataclass(slots=True, order=True)
class Entry:
    """One request in hand."""

    key: Key  # groups requests whose prompts begin alike
    seq: int  # in the stream of items
    item: Item = field(compare=False)
    model: str = field(compare=False)
    msg: Msg = field(compare=False)  # the newest delivery, to acknowledge
    priority: int = field(compare=False, default=0)  # smaller goes first
    redelivered: bool = field(compare=False, default=False)
    runs: bool = field(compare=False, default=False)  # it counts among those that run


class Window:
    """Requests of one model. Of the best priority, those are next that follow the last one begun in prefix
    order, round and round: neighbours share most of their prompts, and none waits for ever."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Entry]] = {}
        self._at: tuple[Key, int] = ((), 0)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, entry: Entry) -> None:
        insort(self._waiting.setdefault(entry.priority, []), entry)
        self._count += 1

    def pop(self) -> Entry:
        """The next one to begin.

        Raises:
            IndexError: there is none.
        """
        if not self._waiting:
            raise IndexError("the window is empty")
        best = min(self._waiting)
        waiting = self._waiting[best]
        place = bisect_left(waiting, self._at, key=lambda entry: (entry.key, entry.seq))
        entry = waiting.pop(place if place < len(waiting) else 0)
        if not waiting:
            del self._waiting[best]
        self._at = (entry.key, entry.seq)
        self._count -= 1
        return entry
