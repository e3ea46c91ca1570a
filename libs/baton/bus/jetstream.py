"""The check that the server stores streams, before a service relies on it."""

from __future__ import annotations

import nats.errors
import nats.js.errors
from nats.js import JetStreamContext

from baton.bus.connection import Bus
from baton.bus.errors import BusDown, BusRefused


async def require_jetstream(bus: Bus) -> JetStreamContext:
    """JetStream on this bus.

    Raises:
        BusRefused: the server has it switched off. BusDown: no answer.
    """
    stream = bus.jetstream()
    try:
        await stream.account_info()
    except (nats.js.errors.APIError, nats.errors.NoRespondersError) as error:
        raise BusRefused(
            f"JetStream is off on {bus!r}: start nats-server with `-js`,"
            " or put `jetstream { store_dir: ... }` in its configuration"
        ) from error
    except (nats.errors.Error, TimeoutError) as error:
        raise BusDown(f"JetStream on {bus!r} does not answer: {error}") from error
    return stream
