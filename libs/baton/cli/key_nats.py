"""`baton key nats`: credentials with which a NATS client reaches its own batch jobs and nothing else."""

from __future__ import annotations

import argparse
import json
import sys

from baton.cli.flags import is_given
from baton.cli.local import local_run


def run(args: argparse.Namespace) -> int:
    from baton.batch.clients import admit, new_client
    from baton.batch.names import check_owner, incoming, out_stream
    from baton.cli.supervisor.rundir import base_dirs

    if args.owner and not check_owner(args.owner):
        print("error: --owner is 1 to 64 small letters and digits", file=sys.stderr)
        return 2
    client = new_client(args.owner)
    url = ""
    run = None if is_given(args, "bus.url") else local_run(args.pid)
    if run is not None:
        folders = [base / f"baton-{run.pid}" / "nats" for base in base_dirs()]
        if any(admit(folder, client) for folder in folders if folder.is_dir()):
            url = run.nats_url
    told = {
        "user": client.owner,
        "password": client.password,
        "url": url or None,
        "publish_to": incoming(client.owner),
        "results_stream": out_stream(client.owner),
        "inbox_prefix": f"_INBOX.{client.owner}",
    }
    print(json.dumps(told, indent=2))
    if url:
        print(f"let in at the NATS server of this machine's Baton, {url}, while it runs", file=sys.stderr)
    else:
        print("put this among the users in your nats-server's configuration, and reload it:", file=sys.stderr)
        print(f"  {client.entry()}", file=sys.stderr)
    return 0
