"""`baton key new|list|revoke`: the file of API keys. Gateways see a change within a second.

`baton key nats`: credentials for batch jobs over NATS.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from baton.cli.flags import add_settings, load_settings
from baton.cli.local import add_run

if TYPE_CHECKING:
    from baton.config.keys import KeyEntry

_LIMITS = {
    "--requests-per-minute": "requests in any minute, over all gateways",
    "--tokens-per-minute": "tokens, of prompts and answers, in any minute",
    "--concurrent": "requests at once",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        choices=("new", "list", "revoke", "nats"),
        help="what to do with the file of API keys; nats: credentials for batch jobs over NATS",
    )
    parser.add_argument("name", metavar="NAME", nargs="?", default="", help="the key's name in the file")
    limits = parser.add_argument_group("what a new key may do; without these, everything")
    limits.add_argument("--models", metavar="A,B", default="", help="the models it may ask")
    for flag, help_line in _LIMITS.items():
        limits.add_argument(flag, metavar="N", type=_count, default=0, help=help_line)
    limits.add_argument(
        "--priority", metavar="N", type=int, default=0, help="of its requests, at most; higher goes first"
    )
    nats = parser.add_argument_group("batch jobs over NATS (docs/batch.md)")
    nats.add_argument("--owner", metavar="OWNER", default="", help="new credentials for jobs of this owner")
    add_run(parser)
    add_settings(parser, "new|list|revoke NAME --keys-file FILE | nats")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("takes 1 or more")
    return number


def run(args: argparse.Namespace) -> int:
    if args.action == "nats":
        from baton.cli import key_nats

        return key_nats.run(args)
    from baton.config import keys

    file = load_settings(args).gateway.keys_file
    if not file:
        print("error: which file? --keys-file FILE, or BATON_GATEWAY_KEYS_FILE", file=sys.stderr)
        return 2
    if (args.action == "list") == bool(args.name):
        wanted = "takes no NAME" if args.name else "needs a NAME"
        print(f"error: `baton key {args.action}` {wanted}", file=sys.stderr)
        return 2
    path = Path(file).expanduser()
    try:
        match args.action:
            case "new":
                secret = keys.new_secret()
                keys.add(path, args.name, _entry(args, keys.digest(secret)))
                print(secret)
                print(f"{args.name} is in {path}, hashed: this is the only time it is shown", file=sys.stderr)
            case "revoke":
                keys.remove(path, args.name)
                print(f"{args.name} is revoked", file=sys.stderr)
            case _:
                for name, entry in keys.read(path).items():
                    print(f"{name}  {_told(entry)}")
    except keys.KeyFileError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _entry(args: argparse.Namespace, digest: str) -> KeyEntry:
    from baton.config.keys import KeyEntry, KeyFileError

    if not -1_000 <= args.priority <= 1_000:
        raise KeyFileError("a priority is -1000 to 1000")
    return KeyEntry(
        sha256=digest,
        models=[model.strip() for model in args.models.split(",") if model.strip()] or None,
        requests_per_minute=args.requests_per_minute,
        tokens_per_minute=args.tokens_per_minute,
        concurrent=args.concurrent,
        priority=args.priority,
    )


def _told(entry: KeyEntry) -> str:
    models = "all models" if entry.models is None else f"models {','.join(entry.models) or 'none'}"
    parts = [models]
    for value, what in (
        (entry.requests_per_minute, "requests/min"),
        (entry.tokens_per_minute, "tokens/min"),
        (entry.concurrent, "at once"),
    ):
        if value:
            parts.append(f"{value} {what}")
    if entry.priority:
        parts.append(f"priority {entry.priority}")
    return ", ".join(parts)
