"""`baton secrets`: makes the passwords of a cluster, and the files that NATS, Redis and each service read.

    DIR/nats/nats.conf          one user a service, with permissions
    DIR/nats/clients.conf       further users, if you put any there: lines that `baton key nats` printed
    DIR/redis/redis.conf        and DIR/redis/password, for health checks
    DIR/SERVICE/baton.toml      for BATON_CONFIG: that service's own user and password, and no other's
    DIR/operator/baton.toml     for `baton status`, `drain` and the like

Run again, it keeps passwords that are there and brings the rest up to date.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import tomllib
from pathlib import Path

PASSWORD_BYTES = 24
REDIS = "redis"
CLIENTS = "clients.conf"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dir", nargs="?", type=Path, metavar="DIR", help="the folder; made if it is not there"
    )
    parser.add_argument(
        "--kubernetes", metavar="NAME", help="print a Secret of this name with new passwords instead"
    )
    parser.add_argument("--redis", default="redis:6379", metavar="HOST:PORT", help="where Redis is reached")
    parser.add_argument("--store-dir", default="/data", help="where the NATS server keeps JetStream's files")
    parser.add_argument("--nats-tls-cert", default="", metavar="FILE", help="the NATS server's certificate")
    parser.add_argument("--nats-tls-key", default="", metavar="FILE", help="its key")
    parser.add_argument("--nats-tls-ca", default="", metavar="FILE", help="ask clients for one of this CA's")


def run(args: argparse.Namespace) -> int:
    if bool(args.dir) == bool(args.kubernetes):
        print("error: name a folder, or --kubernetes NAME", file=sys.stderr)
        return 2
    if bool(args.nats_tls_cert) != bool(args.nats_tls_key) or (args.nats_tls_ca and not args.nats_tls_cert):
        print(
            "error: --nats-tls-cert and --nats-tls-key go together; --nats-tls-ca needs them", file=sys.stderr
        )
        return 2
    if args.kubernetes:
        print(kubernetes_secret(args.kubernetes), end="")
        return 0
    try:
        new = write_secrets(args)
    except (OSError, ValueError, tomllib.TOMLDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{args.dir}: " + (f"new passwords for {', '.join(new)}" if new else "all passwords were there"))
    return 0


def write_secrets(args: argparse.Namespace) -> list[str]:
    """Writes every file under `args.dir`. Returns whose passwords are new.

    Raises:
        OSError: a file cannot be written. ValueError: one that is there is not what it should be.
    """
    from baton.bus.server_config import ServerTls, server_config
    from baton.protocol.access import USERS

    root: Path = args.dir
    if not root.exists():
        root.mkdir(parents=True, mode=0o700)
    passwords, new = {}, []
    for user in (*USERS, REDIS):
        kept = _kept(root, user)
        passwords[user] = kept or secrets.token_hex(PASSWORD_BYTES)
        new += [] if kept else [user]
    tls = ServerTls(args.nats_tls_cert, args.nats_tls_key, args.nats_tls_ca) if args.nats_tls_cert else None
    for user in USERS:
        text = f'[bus]\nuser = "{user}"\npassword = "{passwords[user]}"\n'
        if user == "kvstore":
            text += f'\n[kvstore]\nredis_url = "redis://:{passwords[REDIS]}@{args.redis}/0"\n'
        _write(root / user / "baton.toml", text, 0o600)
    # Read by those servers' own users, who differ; who may get at them is for the folders above to say.
    _write(root / REDIS / "password", passwords[REDIS] + "\n", 0o644)
    _write(root / REDIS / "redis.conf", _redis_conf(passwords[REDIS]), 0o644)
    config = server_config(
        {user: passwords[user] for user in USERS}, store_dir=args.store_dir, tls=tls, clients=_clients(root)
    )
    _write(root / "nats" / "nats.conf", config, 0o644)
    return new


def kubernetes_secret(name: str) -> str:
    """A Secret as the chart's `auth.existingSecret` takes it: each user's password, and Redis's."""
    from baton.protocol.access import USERS

    lines = ["apiVersion: v1", "kind: Secret", f"metadata: {{name: {name}}}", "stringData:"]
    lines += [f'  {user}: "{secrets.token_hex(PASSWORD_BYTES)}"' for user in (*USERS, REDIS)]
    return "\n".join(lines) + "\n"


def _kept(root: Path, user: str) -> str:
    try:
        if user == REDIS:
            return (root / REDIS / "password").read_text().strip()
        tree = tomllib.loads((root / user / "baton.toml").read_text())
    except FileNotFoundError:
        return ""
    password = tree.get("bus", {}).get("password", "")
    if not (isinstance(password, str) and password.isalnum()):
        raise ValueError(f"{root / user / 'baton.toml'} holds no password: remove it for a new one")
    return password


def _clients(root: Path) -> list[str]:
    try:
        return (root / "nats" / CLIENTS).read_text().splitlines()
    except FileNotFoundError:
        return []


def _redis_conf(password: str) -> str:
    lines = ["bind * -::*", f"requirepass {password}", "dir /data", "save 900 1"]
    return "\n".join([*lines, "appendonly no", "stop-writes-on-bgsave-error no"]) + "\n"


def _write(path: Path, text: str, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    passing = path.with_suffix(".new")
    passing.unlink(missing_ok=True)
    with open(os.open(passing, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
    os.chmod(passing, mode)
    os.replace(passing, path)
