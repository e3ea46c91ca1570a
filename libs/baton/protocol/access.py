"""Which service may say and hear what: the permissions of a NATS server with one user a service.

Made from the subjects, so that they cannot drift apart. All users are of one account, as accounts cannot hear
each other. Answers go to inboxes that only the asking service can hear, and only those it asks may write to.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.protocol import subjects
from baton.protocol.liveness import Role
from baton.protocol.subjects import ANY_MODEL, ROOT

OPERATOR = "operator"  # who runs `baton status`, `drain`, `chat` and `batch`; no service
USERS = (*(str(role) for role in Role), OPERATOR)

# Who calls whom, on its control subject. The answers go the other way.
_CALLS: dict[str, tuple[Role, ...]] = {
    Role.GATEWAY: (Role.TOKENIZER, Role.METRICS, Role.GATEWAY),
    Role.TOKENIZER: (Role.ROUTER, Role.PREFILL, Role.DECODE),
    Role.ROUTER: (Role.PREFILL, Role.DECODE),
    Role.PREFILL: (Role.PREFILL, Role.DECODE, Role.KVSTORE),
    Role.DECODE: (Role.PREFILL, Role.DECODE, Role.KVSTORE),
    Role.KVSTORE: (),
    Role.METRICS: (),
    Role.BATCH: (Role.GATEWAY,),
    OPERATOR: tuple(Role),
}

_TEXT = f"{ROOT}.{ANY_MODEL}.text.>"
_LIMITS = (f"{ROOT}.{ANY_MODEL}.limits.>", subjects.spent())
_TOKENS = f"{ROOT}.*.tokens.>"
_KV_EVENTS = f"{ROOT}.*.kv.>"
_BATCH = f"{ROOT}.{ANY_MODEL}.batch.>"

# What is said beside calls: who says it, who hears it.
_SAYS: dict[str, tuple[str, ...]] = {
    Role.TOKENIZER: (_TEXT,),
    Role.PREFILL: (_TOKENS, _KV_EVENTS),
    Role.DECODE: (_TOKENS, _KV_EVENTS),
    Role.GATEWAY: (*_LIMITS, _BATCH),
    Role.BATCH: (_BATCH,),
    OPERATOR: (_BATCH,),
}
_HEARS: dict[str, tuple[str, ...]] = {
    Role.GATEWAY: (_TEXT, *_LIMITS, _BATCH),
    Role.TOKENIZER: (_TOKENS,),
    Role.ROUTER: (_KV_EVENTS,),
    Role.METRICS: (subjects.all_stats(),),
    Role.BATCH: (_BATCH,),
    OPERATOR: (_BATCH, subjects.all_stats()),
}
_STORES = (Role.GATEWAY, Role.BATCH, OPERATOR)  # what lasts lies in JetStream
_JETSTREAM = ("$JS.API.>", "$JS.ACK.>", "$KV.>", "$O.>")


@dataclass(frozen=True, slots=True)
class Access:
    """Subjects, with wildcards, that a user may publish to and subscribe to. Anything else is refused."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def access(user: str) -> Access:
    """What one of `USERS` may do.

    Raises:
        KeyError: there is no such user.
    """
    publish = [_control(role) for role in _CALLS[user]]
    publish += [_inbox(caller) for caller, called in _CALLS.items() if user in called or caller == user]
    publish += [subjects.ask(), *_SAYS.get(user, ())]
    subscribe = [_inbox(user), subjects.all_heartbeats(), *_HEARS.get(user, ())]
    if user != OPERATOR:
        publish += [f"{ROOT}.*.hb.{user}.*", subjects.all_stats()]
        subscribe += [subjects.ask(), _control(user)]
    if user in _STORES:
        publish += _JETSTREAM
    return Access(tuple(publish), tuple(subscribe))


def _control(role: str) -> str:
    return f"{ROOT}.*.ctl.{role}.>"


def _inbox(user: str) -> str:
    return f"{subjects.inbox(user)}.>"
