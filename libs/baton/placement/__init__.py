"""Where a request runs: prefix index, load view, filter -> score -> pick, admission queue.

Pure: no asyncio, NATS or clock, so that the router and a simulator run the same code.
"""
