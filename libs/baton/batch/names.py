"""Where batch things lie. No string of a user's is part of a subject: ids are ours, names are hashed.

    stream baton-batch-in
        baton.v1._.batch.in.<owner>                            what an owner's NATS clients send
    stream baton-batch-items
        baton.v1._.batch.item.<priority>.<owner>.<job>.<n>     requests that wait or run
    stream baton-batch-out-<owner>
        baton.v1._.batch.out.<owner>.<job>.result.<n>          results, one each
        baton.v1._.batch.out.<owner>.<job>.failed.<n>          those of them that failed, again
        baton.v1._.batch.out.<owner>.<job>.progress            the job's state; the newest is kept
        baton.v1._.batch.out.<owner>.rejected                  messages that were no use, and why

`<n>` is the token of a `custom_id`, `<job>` of a NATS client's job name, or the id of a batch made over HTTP.
Jobs and file records are in the key-value bucket `baton-batch`, contents in the object store `baton-files`.
"""

from __future__ import annotations

import base64
import hashlib
import re
import uuid

from baton.protocol.subjects import ROOT

_BASE = f"{ROOT}._.batch"

IN_STREAM = "baton-batch-in"
ITEM_STREAM = "baton-batch-items"
BUCKET = "baton-batch"
STATE_STREAM = f"KV_{BUCKET}"
FILES = "baton-files"
FILE_STREAM = f"OBJ_{FILES}"
INTAKE = "intake"  # the consumer of what clients send

COMMON = "common"  # the owner of everything while no keys are configured
PRIORITIES = ("high", "normal", "low")
_owner = re.compile(r"[a-z0-9]{1,64}")
_id = re.compile(r"(file-|batch_)?[0-9a-f]{32}")


def token(text: str) -> str:
    """A name of a user's as a subject token: the first 32 hex digits of its SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def owner_token(owner: str) -> str:
    """An API key's owner as a subject token."""
    return owner or COMMON


def check_owner(owner: str) -> bool:
    return _owner.fullmatch(owner) is not None


def check_id(id: str) -> bool:
    """Whether this may be the id of a file or a job; nothing else becomes part of a subject."""
    return _id.fullmatch(id) is not None


def new_id(prefix: str) -> str:
    """`file-` or `batch_`, and 32 hex digits."""
    return prefix + uuid.uuid4().hex


def incoming(owner: str) -> str:
    return f"{_BASE}.in.{owner}"


def item(priority: str, owner: str, job: str, number: str = "*") -> str:
    return f"{_BASE}.item.{priority}.{owner}.{job}.{number}"


def items_of(priority: str) -> str:
    return f"{_BASE}.item.{priority}.>"


def out_stream(owner: str) -> str:
    return f"baton-batch-out-{owner}"


def out(owner: str, job: str, kind: str, number: str = "") -> str:
    """`kind`: result, failed, progress."""
    return f"{_BASE}.out.{owner}.{job}.{kind}" + (f".{number}" if number else "")


def rejected(owner: str) -> str:
    return f"{_BASE}.out.{owner}.rejected"


def all_incoming() -> str:
    return f"{_BASE}.in.*"


def all_items() -> str:
    return f"{_BASE}.item.>"


def all_out(owner: str) -> str:
    return f"{_BASE}.out.{owner}.>"


def nudge() -> str:
    return f"{_BASE}.nudge"


def performer(gateway: str, epoch: int) -> str:
    """Where a gateway takes `Perform`."""
    return f"{_BASE}.perform.{gateway}.{epoch}"


def performed(service: str, epoch: int) -> str:
    """Where a batch service takes `Performed`."""
    return f"{_BASE}.performed.{service}.{epoch}"


def key(kind: str, owner: str, id: str) -> str:
    """The subject of a job's or file's record, or a pattern with `*`."""
    return f"$KV.{BUCKET}.{kind}.{owner}.{id}"


def meta(id: str) -> str:
    """Where the object store has what it knows of a file."""
    return f"$O.{FILES}.M.{base64.urlsafe_b64encode(id.encode()).decode()}"


def chunk(part: str) -> str:
    return f"$O.{FILES}.C.{part}"
