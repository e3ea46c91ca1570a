"""NATS credentials for clients with jobs of their own: exactly what their jobs need, and nothing else."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.batch import names

_name = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Client:
    """A client's user name is its owner token: unguessable, and all that its subjects are made of."""

    owner: str
    password: str

    @property
    def permissions(self) -> dict[str, Any]:
        stream = names.out_stream(self.owner)
        return {
            "publish": {
                "allow": [
                    names.incoming(self.owner),
                    f"$JS.API.STREAM.INFO.{stream}",
                    f"$JS.API.DIRECT.GET.{stream}",
                    f"$JS.API.DIRECT.GET.{stream}.>",
                    f"$JS.API.CONSUMER.INFO.{stream}.*",
                    f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*",
                    f"$JS.ACK.{stream}.>",
                ]
            },
            "subscribe": {"allow": [names.all_out(self.owner), f"_INBOX.{self.owner}.>"]},
        }

    def entry(self) -> str:
        """Its line among the `users` of a nats-server's `authorization` (JSON is NATS's syntax as well)."""
        return json.dumps({"user": self.owner, "password": self.password, "permissions": self.permissions})


def new_client(owner: str = "") -> Client:
    """Credentials for a new owner, or for one that is there."""
    return Client(owner or secrets.token_hex(16), secrets.token_urlsafe(24))


def check_name(name: str) -> bool:
    return _name.fullmatch(name) is not None


def admit(folder: Path, client: Client) -> bool:
    """Lets a client in at the embedded server that runs in `folder`. False: there is none.

    The server reads its users again; they last as long as it does.
    """
    users, pid = folder / "users.conf", _pid(folder)
    if pid is None or not users.exists():
        return False
    text = users.read_text()
    end = text.rindex("]")
    new = folder / "users.conf.new"
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(f"{text[:end]}  {client.entry()}\n{text[end:]}")
    new.replace(users)
    os.kill(pid, signal.SIGHUP)
    return True


def _pid(folder: Path) -> int | None:
    """The server's process: it says so in the name of its file of ports."""
    found = [path.stem.rpartition("_")[2] for path in folder.glob("*.ports")]
    return next((int(pid) for pid in found if pid.isdecimal()), None)
