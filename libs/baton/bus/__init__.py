"""The bus: NATS core for control and tokens, JetStream for what must last.

`connection` one process's link: publish, call, watch     `inbox`      one ordered, bounded queue of messages
`directory`  who is alive, from heartbeats (`roster`)     `streams`    both ends of an indexed token stream
`tombstones` what was cancelled                           `deadlines`  time as milliseconds remaining
`jetstream`  the check that streams can be stored         `server`     the embedded nats-server
`client`     nats-py, bent to the rules of the bus
"""

import sys
from importlib import import_module
from typing import Any, cast

# For websockets, which the bus does not use, nats-py imports aiohttp, if it can: a third of a worker's start.
if "aiohttp" not in sys.modules:
    cast(Any, sys.modules)["aiohttp"] = None
    try:
        import_module("nats.aio.transport")
    finally:
        del sys.modules["aiohttp"]
