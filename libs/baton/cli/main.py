"""The `baton` command. A command's module is imported only when it is the one that was asked for."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

# name -> (module with `add_arguments(parser)` and `run(args) -> exit code`, what it does)
COMMANDS = {
    "up": ("baton.cli.up", "start everything on this machine and stay in the foreground"),
    "serve": ("baton.cli.serve", "run one service, for compose, Kubernetes and the curious"),
    "pull": ("baton.cli.pull", "take a model into the cache"),
    "chat": ("baton.cli.chat", "talk to a running Baton in the terminal"),
    "status": ("baton.cli.status", "show the services of a running cluster"),
    "key": ("baton.cli.key", "make, list and revoke API keys"),
    "batch": ("baton.cli.batch.command", "send a file of requests, follow it, fetch its results"),
    "drain": ("baton.cli.drain", "let one service finish what it has, then leave"),
    "secrets": ("baton.cli.secrets", "make the passwords of a cluster, for compose and Kubernetes"),
    "doctor": ("baton.cli.doctor", "check this machine and say what to fix"),
    "chaos": ("baton.cli.chaos.command", "break a cluster of its own under load, and see what is lost"),
    "bench": ("baton.cli.bench", "measure: control, engine or handoff"),
}


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    import baton

    parser = argparse.ArgumentParser(
        prog="baton",
        description="Serves large language models with prefill and decode in different workers.",
        epilog="`baton COMMAND --help` tells a command's options. First steps: baton up, then baton chat.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"baton {baton.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, (module, help_line) in COMMANDS.items():
        command = commands.add_parser(name, help=help_line, description=help_line, allow_abbrev=False)
        if name == chosen:
            importlib.import_module(module).add_arguments(command)
    commands.add_parser("version", help="print the version")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code: 0 done, 1 failed, 2 wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    parser = _parser(chosen)
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return 2
    if args.command == "version":
        import baton

        print(baton.__version__)
        return 0
    try:
        code = importlib.import_module(COMMANDS[args.command][0]).run(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `baton status | head`: the reader has gone, and so has the reason to print
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
