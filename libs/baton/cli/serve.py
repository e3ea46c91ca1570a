"""`baton serve SERVICE`: runs one service in this process."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

from baton.cli.flags import add_settings, load_settings

# Named, not imported: the libraries know no service, and only the one asked for is loaded.
SERVICES = {
    name: f"baton_services.{name}.main"
    for name in ("gateway", "tokenizer", "router", "prefill", "decode", "kvstore", "metrics", "batch")
}
WORKERS = ("prefill", "decode")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("service", choices=sorted(SERVICES), metavar="SERVICE", help=", ".join(SERVICES))
    parser.add_argument(
        "--id", default="", help="its name in the cluster; made up from host and process without"
    )
    add_settings(parser, "SERVICE")


def run(args: argparse.Namespace) -> int:
    settings = load_settings(args)
    # Before numpy is loaded: its pool of a thread a core costs memory, and cores that belong to others.
    threads = settings.worker.threads if args.service in WORKERS else 1
    if threads:
        for name in _THREAD_VARIABLES:
            os.environ.setdefault(name, str(threads))
    if supervisor := os.environ.get("BATON_SUPERVISED", ""):
        from baton.cli.orphan import end_with_parent

        end_with_parent(int(supervisor) if supervisor.isdigit() else 0)
    if args.id:
        from baton.protocol.subjects import check_instance

        try:
            check_instance(args.id)
        except ValueError as error:
            print(f"error: --id: {error}", file=sys.stderr)
            return 2
    module = importlib.import_module(SERVICES[args.service])
    return int(module.serve(settings, args.id))
