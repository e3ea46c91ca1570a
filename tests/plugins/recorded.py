"""Messages as a release sends them, kept for later releases to read.

python tests/plugins/recorded.py >tests/data/messages/VERSION.json        once, when VERSION is released
"""

from __future__ import annotations

import base64
import importlib
import json
import pkgutil
from typing import Any

import msgspec
from msgspec import inspect

import baton
from baton import protocol
from baton.protocol.base import Message
from baton.protocol.batch import Asked


def message_types() -> dict[str, type[msgspec.Struct]]:
    """Every message that `baton.protocol` has, by its tag on the wire."""
    for module in pkgutil.iter_modules(protocol.__path__, "baton.protocol."):
        importlib.import_module(module.name)
    kinds = {
        kind for kind in _below(Message) | _below(Asked) if kind.__module__.startswith("baton.protocol.")
    }
    return {kind.__struct_config__.tag: kind for kind in sorted(kinds, key=lambda kind: kind.__name__)}


def _below(kind: type[msgspec.Struct]) -> set[type[msgspec.Struct]]:
    direct = set(kind.__subclasses__())
    return direct.union(*(_below(one) for one in direct))


def sample(kind: inspect.Type, name: str, depth: int = 0) -> Any:
    """A value of this type with nothing left at its default; the same one each time."""
    match kind:
        case inspect.Metadata():
            return sample(kind.type, name, depth)
        case inspect.UnionType():
            some = [one for one in kind.types if not isinstance(one, inspect.NoneType)]
            return sample(some[0], name, depth)
        case inspect.StructType():
            values = {}
            for field in kind.fields:
                recursive = depth > 4 and not field.required
                if not recursive:
                    value = sample(field.type, field.name, depth + 1)
                    values[field.name] = _other(field.type, value) if value == field.default else value
            return kind.cls(**values)
        case inspect.ListType():
            return [sample(kind.item_type, name, depth)]
        case inspect.TupleType():
            return tuple(sample(one, name, depth) for one in kind.item_types)
        case inspect.VarTupleType():
            return (sample(kind.item_type, name, depth),)
        case inspect.DictType():
            return {sample(kind.key_type, name, depth): sample(kind.value_type, name, depth)}
        case inspect.EnumType():
            return list(kind.cls)[-1]
        case inspect.LiteralType():
            return kind.values[-1]
        case inspect.IntType():
            return max(7, kind.ge or 0)
        case inspect.FloatType():
            return 0.5
        case inspect.BoolType():
            return True
        case inspect.StrType():
            return f"{name} é" if kind.max_length is None else "a name"
        case inspect.BytesType():
            return bytes(range(8))
        case inspect.AnyType():
            return {"any": [1, "x", None]}
    raise TypeError(f"{name}: no sample of {kind}")


def _other(kind: inspect.Type, value: Any) -> Any:
    return kind.values[0] if isinstance(kind, inspect.LiteralType) else not value


def record() -> dict[str, Any]:
    """Of each message: its bytes, and what they mean."""
    messages = {}
    for tag, kind in message_types().items():
        message = sample(inspect.type_info(kind), tag)
        wire = msgspec.msgpack.encode(message)
        messages[tag] = {"wire": base64.b64encode(wire).decode(), "reads": meaning(message)}
    return {"release": baton.__version__, "messages": messages}


def meaning(message: msgspec.Struct) -> Any:
    """The message as JSON has it, every field named, also of those sent as arrays."""
    return _plain(message)


def _plain(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        return {field: _plain(getattr(value, field)) for field in value.__struct_fields__}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value


if __name__ == "__main__":
    print(json.dumps(record(), indent=1, ensure_ascii=False, sort_keys=True))
