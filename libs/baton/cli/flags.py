"""Flags for every setting, made from the settings tree, plus short names for the common ones."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.config.settings import Settings

# short name -> the option it stands for; it takes the same values
SHORT = {
    "--model": "model.name",
    "--dtype": "model.dtype",
    "--engine": "worker.engine",
    "--host": "gateway.host",
    "--port": "gateway.port",
    "--keys-file": "gateway.keys_file",
    "--cors": "gateway.cors",
    "--nats": "bus.url",
    "--redis": "kvstore.redis_url",
    "--threads": "worker.threads",
    "--kv-memory-mb": "worker.kv_memory_mb",
    "--max-batch-tokens": "worker.max_batch_tokens",
    "--log-level": "telemetry.log_level",
}
_PREFIX = "setting:"


def add_settings(parser: argparse.ArgumentParser, takes: str = "") -> None:
    """Adds `--config`, the short names and `--section-option` for the whole tree.

    `takes` names the command's own arguments in its usage line, which would be a page long otherwise.
    """
    parser.usage = f"{parser.prog} {takes} [options]".replace("  ", " ")
    from baton.config.options import OPTIONS

    common = parser.add_argument_group("settings in common use (short for those below)")
    common.add_argument("--config", metavar="FILE", help="TOML file of settings; BATON_CONFIG without it")
    for flag, key in SHORT.items():
        option = OPTIONS[key]
        _add(common, flag, key, option.description, option.default, option.secret)
    common.add_argument(
        "--no-prefix-cache",
        dest=_PREFIX + "worker.prefix_cache",
        action="store_const",
        const="false",
        default=argparse.SUPPRESS,
        help="recompute every prompt (worker.prefix_cache false)",
    )
    sections: dict[str, argparse._ArgumentGroup] = {}
    for key, option in OPTIONS.items():
        if option.section not in sections:
            sections[option.section] = parser.add_argument_group(
                f"settings: {option.section}",
                f"also [{option.section}] in a file and BATON_{option.section.upper()}_*",
            )
        help_line = f"{option.description} ({option.allowed})"
        _add(sections[option.section], option.flag, key, help_line, option.default, option.secret)


def _add(
    group: argparse._ArgumentGroup, flag: str, key: str, help_line: str, default: Any, secret: bool
) -> None:
    shown = ",".join(default) if isinstance(default, list) else default
    text = f"{help_line}; default {shown}" if shown not in ("", None) else help_line
    if secret:
        text += f"; better by BATON_{key.replace('.', '_').upper()}, since others can read a command line"
    group.add_argument(
        flag,
        dest=_PREFIX + key,
        metavar="VALUE",
        default=argparse.SUPPRESS,
        help=text.replace("%", "%%"),
    )


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The settings given as flags, by dotted name."""
    return {
        name.removeprefix(_PREFIX): value for name, value in vars(args).items() if name.startswith(_PREFIX)
    }


def load_settings(args: argparse.Namespace) -> Settings:
    """Settings from file, environment and flags; a wrong one is said on stderr and ends the command (2)."""
    from baton.config.load import ConfigError, load

    try:
        settings = load(args.config, os.environ, given(args))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if settings.worker.engine == "mock" and settings.model.name == type(settings.model)().name:
        settings.model.name = "mock"  # the mock has no model; its services are found under this name
    return settings


def is_given(args: argparse.Namespace, key: str) -> bool:
    """Was this setting given at all, be it with its default value? Call it after `load_settings`."""
    import tomllib
    from pathlib import Path

    from baton.config.options import OPTIONS

    option = OPTIONS[key]
    if key in given(args) or option.environment in os.environ:
        return True
    file = args.config or os.environ.get("BATON_CONFIG")
    if not file:
        return False
    return option.name in tomllib.loads(Path(file).read_text()).get(option.section, {})
