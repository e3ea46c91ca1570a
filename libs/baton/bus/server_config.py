"""The configuration of a NATS server for a cluster: one user a service, each with its permissions."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.protocol.access import USERS, access

HEAD = """\
# Made from baton.protocol by `baton secrets`: one user a service, and what each may say and hear.
port: 4222
http: 8222
ping_interval: "1s"
ping_max: 2
max_payload: 8MB
write_deadline: "10s"
"""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """The server's certificate; with `ca`, clients must show one that it has signed."""

    cert: str
    key: str
    ca: str = ""


def server_config(
    passwords: Mapping[str, str],
    *,
    store_dir: str = "/data",
    tls: ServerTls | None = None,
    clients: Sequence[str] = (),
) -> str:
    """The text of `nats.conf`.

    Args:
        passwords: of each of `USERS`; `$NAME` stands for an environment variable of the server.
        store_dir: where JetStream keeps its files.
        clients: further users, as `baton key nats` prints them.

    Raises:
        ValueError: a password is empty, or cannot stand in the file.
    """
    lines = [HEAD, f"jetstream {{ store_dir: {_quote(store_dir)} }}"]
    if tls is not None:
        lines += ["tls {", f"  cert_file: {_quote(tls.cert)}", f"  key_file: {_quote(tls.key)}"]
        lines += [f"  ca_file: {_quote(tls.ca)}", "  verify: true"] if tls.ca else []
        lines += ["}"]
    lines += ["authorization {", "  users = ["]
    for user in USERS:
        may = access(user)
        lines += [
            f"    {{ user: {user}, password: {_password(passwords[user])}, permissions: {{",
            f"      publish: {{ allow: {_list(may.publish)} }}",
            f"      subscribe: {{ allow: {_list(may.subscribe)} }}",
            "    } }",
        ]
    return "\n".join([*lines, *(f"    {client}" for client in clients), "  ]", "}", ""])


def _list(subjects: tuple[str, ...]) -> str:
    return "[" + ", ".join(_quote(one) for one in subjects) + "]"


def _password(text: str) -> str:
    return text if text.startswith("$") and text[1:].isidentifier() else _quote(text)


def _quote(text: str) -> str:
    if not text or not text.isprintable() or text.startswith("$2a$"):
        raise ValueError("a NATS password or path is not empty, printable, and not a bcrypt hash")
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def environment_name(user: str) -> str:
    """The server's variable that holds a user's password, where the file may hold none."""
    return f"NATS_PASSWORD_{user.upper()}"


if __name__ == "__main__":  # deploy/chart/files/nats.conf
    tls = ServerTls("/tls/tls.crt", "/tls/tls.key") if "--tls" in sys.argv else None
    print(server_config({user: f"${environment_name(user)}" for user in USERS}, tls=tls), end="")
