"""Log lines on stderr: for people (`text`) or for machines (`json`).

`log.info("hand-off done", extra={"request": id, "bytes": n})` shows the extra fields as `key=value`, or as
keys of the JSON object. A value can not break out of its line.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from baton.config.settings import TelemetrySettings

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), 127)} | {10: "\\n", 13: "\\r", 9: "\\t"}


def get_logger(name: str) -> logging.Logger:
    """The logger of a module: `get_logger(__name__)`."""
    return logging.getLogger(name)


def setup_logging(settings: TelemetrySettings, role: str, instance: str) -> None:
    """Sends this process's log lines to stderr. Other libraries speak from `warning` up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter((_Json if settings.log_format == "json" else _Text)(role, instance))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for ours in ("baton", "baton_services", "baton_kernels"):
        logging.getLogger(ours).setLevel(settings.log_level.upper())
    logging.raiseExceptions = False  # a reader of stderr that went away must not end a service


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


class _Text(logging.Formatter):
    """`12:00:00.123 INFO    prefill-1 hand-off done request=ab12 bytes=4096`, then any traceback."""

    def __init__(self, role: str, instance: str) -> None:
        super().__init__()
        self._origin = instance or role

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock}.{int(record.msecs):03d} {record.levelname:<7} {self._origin} "
        line += record.getMessage().translate(_ESCAPES)
        line += "".join(f" {key}={_logfmt(value)}" for key, value in _fields(record).items())
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _logfmt(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    if not text or any(character in ' "=' or ord(character) < 32 for character in text):
        return json.dumps(text, ensure_ascii=False)
    return text


class _Json(logging.Formatter):
    """One object a line: `ts` (Unix seconds), `level`, `role`, `instance`, `logger`, `message`, fields."""

    def __init__(self, role: str, instance: str) -> None:
        super().__init__()
        self._origin = {"role": role, "instance": instance}

    def format(self, record: logging.LogRecord) -> str:
        line = _fields(record) | {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            **self._origin,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
