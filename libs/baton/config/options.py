"""The settings tree as a flat list of options: what the loader, the reference page and the CLI read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_type_hints

import msgspec
from msgspec import inspect

from baton.config.secrets import is_secret
from baton.config.settings import Settings


@dataclass(frozen=True, slots=True)
class Option:
    """One option of one section."""

    section: str
    name: str
    annotation: Any
    kind: inspect.Type
    default: Any
    description: str
    secret: bool

    @property
    def key(self) -> str:
        """Its name in the file and in messages: `gateway.port`."""
        return f"{self.section}.{self.name}"

    @property
    def environment(self) -> str:
        return f"BATON_{self.section}_{self.name}".upper()

    @property
    def flag(self) -> str:
        return f"--{self.section}-{self.name}".replace("_", "-")

    @property
    def allowed(self) -> str:
        """The values it takes, in words."""
        return _allowed(self.kind)


def _allowed(kind: inspect.Type) -> str:
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType() | inspect.FloatType():
            noun = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
            return noun + _range(kind)
        case inspect.LiteralType():
            return "one of " + ", ".join(str(value) for value in sorted(kind.values, key=_by_size))
        case inspect.ListType():
            items = _allowed(kind.item_type).removeprefix("one of ")
            return f"a list of {items}" + (", not empty" if kind.min_length else "")
        case inspect.StrType():
            return "text"
    raise TypeError(f"the loader has no words for {kind}")


def _by_size(value: object) -> tuple[int, str]:
    return (value, "") if isinstance(value, int) else (0, str(value))


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    if kind.ge is not None and kind.le is not None:
        return f" from {kind.ge} to {kind.le}"
    if kind.gt is not None:
        return f" above {kind.gt}"
    if kind.ge is not None:
        return f" of at least {kind.ge}"
    return ""


def _options() -> Iterator[Option]:
    for section in msgspec.structs.fields(Settings):
        annotations = get_type_hints(section.type, include_extras=True)
        for field in msgspec.structs.fields(section.type):
            annotation = annotations[field.name]
            kind, description = inspect.type_info(annotation), ""
            while isinstance(kind, inspect.Metadata):
                description = (kind.extra_json_schema or {}).get("description", description)
                kind = kind.type
            default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
            yield Option(
                section.name, field.name, annotation, kind, default, description, is_secret(annotation)
            )


OPTIONS: dict[str, Option] = {option.key: option for option in _options()}
