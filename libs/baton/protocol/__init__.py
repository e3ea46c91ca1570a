"""The vocabulary: every message that crosses a process, and every subject it travels on. Read this first.

`request`   gateway <-> tokenizer      `placing`  tokenizer <-> router
`work`      tokenizer <-> worker       `handoff`  worker <-> worker
`kvevents`  worker -> router, KV store `liveness` everybody -> everybody
`stats`     everybody -> metrics       `sequence` the one form in which a sequence moves
"""
