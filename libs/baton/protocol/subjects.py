"""Every subject of the bus. No string of a user's is ever part of one.

    baton.v1.<model>.hb.<role>.<id>               heartbeats
    baton.v1.<model>.ctl.<role>.<id>.<epoch>      a process's ordered control queue
    baton.v1.<model>.tokens.<id>.<epoch>          tokens, to a tokenizer
    baton.v1.<model>.kv.<id>.<epoch>              KV events of a worker
    baton.v1._.ask                                `Ask` for heartbeats, heard by every service
    baton.v1._.text.<id>.<epoch>                  text, to a gateway
    baton.v1._.limits.<id>.<epoch>                use of API keys, to the gateway that keeps their counts
    baton.v1._.spent                              `Spent`, heard by every gateway
    baton.v1._.stats.<id>                         metric snapshots

`<model>` is `model_token(name)`; `_` stands for services that serve every model. The epoch is in the
subject so that a message to a process that died finds nobody, at once, rather than its successor.
"""

from __future__ import annotations

import re

import xxhash

from baton.protocol.liveness import Role

ROOT = "baton.v1"
ANY_MODEL = "_"


def model_token(name: str) -> str:
    """A model's subject token: its name made safe, plus a hash so that two names never share one."""
    if not name:
        return ANY_MODEL
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:32]
    return f"{slug}-{xxhash.xxh3_64_hexdigest(name.encode())[:8]}"


def heartbeat(model: str, role: Role | str, instance: str) -> str:
    return f"{ROOT}.{model_token(model)}.hb.{role}.{instance}"


def all_heartbeats(model: str | None = None) -> str:
    """Heartbeats of one model's services, or of every service of the cluster."""
    return f"{ROOT}.{'*' if model is None else model_token(model)}.hb.*.*"


def ask() -> str:
    return f"{ROOT}.{ANY_MODEL}.ask"


def control(model: str, role: Role | str, instance: str, epoch: int) -> str:
    return f"{ROOT}.{model_token(model)}.ctl.{role}.{instance}.{epoch}"


def tokens(model: str, instance: str, epoch: int) -> str:
    return f"{ROOT}.{model_token(model)}.tokens.{instance}.{epoch}"


def kv_events(model: str, instance: str, epoch: int) -> str:
    return f"{ROOT}.{model_token(model)}.kv.{instance}.{epoch}"


def all_kv_events(model: str) -> str:
    return f"{ROOT}.{model_token(model)}.kv.*.*"


def text(instance: str, epoch: int) -> str:
    return f"{ROOT}.{ANY_MODEL}.text.{instance}.{epoch}"


def limits(instance: str, epoch: int) -> str:
    return f"{ROOT}.{ANY_MODEL}.limits.{instance}.{epoch}"


def spent() -> str:
    return f"{ROOT}.{ANY_MODEL}.spent"


def stats(instance: str) -> str:
    return f"{ROOT}.{ANY_MODEL}.stats.{instance}"


def all_stats() -> str:
    return f"{ROOT}.{ANY_MODEL}.stats.*"


def inbox(user: str) -> str:
    """Where answers to processes of this NATS user go; where each service has its own, no other hears it."""
    return f"_INBOX.{user}" if re.fullmatch(r"[a-z0-9_-]{1,64}", user) else "_INBOX"


def check_instance(instance: str) -> str:
    """An instance id as it may stand in a subject.

    Raises:
        ValueError: it is empty, too long, or holds something other than letters, digits, `-` and `_`.
    """
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", instance):
        raise ValueError(f"an instance id is 1 to 64 letters, digits, '-' or '_'; got {instance!r}")
    return instance
