"""KV blocks: how they are named, where they lie, and how they move.

`hashing`      block hashes                    `handoff`       both ends of a hand-off, pure
`fingerprint`  what makes blocks alike         `transports`    pulling blocks: shared memory, TCP
`pool`         the pool file of a worker       `store_client`  a worker's link to the KV store
"""
