"""Sequences, block pool, scheduler, sampling rules: what a step computes, and for whom.

Pure: no torch, asyncio, NATS or clock; the time comes in as an argument. Read in this order:

`sequence`      one sequence and the states it goes through
`block_pool`    KV blocks: reference counts, the LRU list that doubles as prefix cache, generations
`scheduler`     who runs in the next step: one token budget, no phases, pre-emption
`engine`        the whole, as a worker drives it: add, schedule, commit, hold, reserve, admit
`reservations`  the receiving side of a hand-off
`plan`          what the engine tells a runner, and what it hears back; `progress`: what the worker hears
`sampling`      logits -> token: penalties, filters, counter-based randomness, log-probabilities
"""
