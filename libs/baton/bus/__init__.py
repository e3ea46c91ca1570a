"""The bus: NATS core for control and tokens, JetStream for what must last.

`connection` one process's link: publish, call, watch     `inbox`      one ordered, bounded queue of messages
`directory`  who is alive, from heartbeats (`roster`)     `streams`    both ends of an indexed token stream
`tombstones` what was cancelled                           `deadlines`  time as milliseconds remaining
`jetstream`  the check that streams can be stored         `server`     the embedded nats-server
`client`     nats-py, bent to the rules of the bus
"""
