"""Reading the settings: flags win over the environment, the environment over the file."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from baton.config.options import OPTIONS, Option
from baton.config.secrets import redact
from baton.config.settings import Settings

# Variables with our prefix that are no option of the tree.
OTHER_VARIABLES = {
    "BATON_CONFIG": "path of the TOML file",
    "BATON_SUPERVISED": "set by `baton up` for the processes it starts: its own process id, or 1 for "
    "whoever the parent is; they end when it dies",
}

MAX_FILE_BYTES = 1 << 20
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
_SECTIONS = tuple(dict.fromkeys(option.section for option in OPTIONS.values()))
_BY_ENVIRONMENT = {option.environment: option for option in OPTIONS.values()}


class ConfigError(ValueError):
    """An unknown option or a value it does not take, in one line: which, from where, what is allowed."""


def load(file: Path | str | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> Settings:
    """The settings from a TOML file, the environment and the flags given.

    `file` None means the one named by `BATON_CONFIG`, if any. `flags` holds what was given on the command
    line by dotted name (`gateway.port`), as text or as the option's own type.

    Raises:
        ConfigError: a source is unreadable, names an unknown option, or gives a value of the wrong kind.
    """
    file = file or environ.get("BATON_CONFIG") or None
    values: dict[str, Any] = {}
    if file is not None:
        values |= _from_file(Path(file))
    values |= _from_environment(environ)
    values |= _from_flags(flags)
    tree: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        option = OPTIONS[key]
        tree.setdefault(option.section, {})[option.name] = value
    return msgspec.convert(tree, Settings)


def _from_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as stream:
            raw = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"settings file {path}: {error.strerror or error}") from error
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"settings file {path}: larger than {MAX_FILE_BYTES} bytes")
    try:
        tree = tomllib.loads(raw.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"settings file {path}: not TOML: {error}") from error
    values = {}
    for section, options in tree.items():
        if section not in _SECTIONS:
            raise ConfigError(f"{path}: unknown section [{section}]; {_choices(_SECTIONS)}")
        if not isinstance(options, dict):
            raise ConfigError(f"{path}: {section} is a section: write [{section}] and its options below")
        for name, value in options.items():
            option = OPTIONS.get(f"{section}.{name}")
            if option is None:
                raise ConfigError(f"{path}: unknown option {section}.{name}; {_options_of(section)}")
            values[option.key] = _checked(option, value, str(path), strict=True)
    return values


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values = {}
    for name in sorted(environ):
        if not name.startswith("BATON_") or name in OTHER_VARIABLES:
            continue
        option = _BY_ENVIRONMENT.get(name)
        if option is None:
            known = [*_BY_ENVIRONMENT, *OTHER_VARIABLES]
            raise ConfigError(f"environment: unknown option {name}; {_nearest(name, known)}")
        values[option.key] = _checked(option, environ[name], f"environment, {name}", strict=False)
    return values


def _from_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for key, value in flags.items():
        option = OPTIONS.get(key)
        if option is None:
            flag = "--" + key.replace(".", "-").replace("_", "-")
            known = [known.flag for known in OPTIONS.values()]
            raise ConfigError(f"flags: unknown option {flag}; {_nearest(flag, known)}")
        values[key] = _checked(option, value, f"flag {option.flag}", strict=not isinstance(value, str))
    return values


def _checked(option: Option, value: Any, source: str, *, strict: bool) -> Any:
    """`value` as the option's own type; text is parsed unless `strict`."""
    try:
        parsed = value if strict else _parse(option.kind, value)
        return msgspec.convert(parsed, option.annotation, strict=strict)
    except msgspec.ValidationError:
        shown = redact(value, secret=option.secret)
        message = f"{option.key} (from {source}) takes {option.allowed}, not {shown!r:.100}"
    raise ConfigError(message)


def _parse(kind: inspect.Type, text: str) -> Any:
    if isinstance(kind, inspect.BoolType):
        word = text.strip().lower()
        return True if word in _TRUE else False if word in _FALSE else text
    if isinstance(kind, inspect.ListType):
        return [item.strip() for item in text.split(",")] if text.strip() else []
    return text if isinstance(kind, inspect.StrType) else text.strip()


def _options_of(section: str) -> str:
    return _choices([option.name for option in OPTIONS.values() if option.section == section])


def _choices(known: Iterable[str]) -> str:
    return "known are " + ", ".join(known)


def _nearest(given: str, known: list[str]) -> str:
    near = difflib.get_close_matches(given, known, n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return hint + "docs/configuration.md lists all options"
