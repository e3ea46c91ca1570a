"""docs/configuration.md, written from the settings tree: `python -m baton.config.reference`."""

from __future__ import annotations

import json
from typing import Any

from baton.config.load import OTHER_VARIABLES
from baton.config.options import OPTIONS

INTRO = """\
# Configuration

Every option has one default, and three places where it can be set. A flag wins over the environment, the
environment over the file:

- a TOML file, named by `--config FILE` or `BATON_CONFIG`: `[gateway]`, then `port = 8080`
- the environment: `BATON_GATEWAY_PORT=8080`; lists are separated by commas, booleans are `true` or `false`
- a flag: `--gateway-port 8080`; the common ones have short names as well, see `baton up --help`

An unknown option, or a value of the wrong kind, is refused with one line that names it, where it came from
and what is allowed; so is any other variable that starts with `BATON_`. (Kubernetes makes such variables for
a Service called `baton-...`: set `enableServiceLinks: false` in the pod.)

Passwords and keys are never logged. Give them in the environment or in a file only you can read, not as a
flag: a machine's other users can read command lines.

This page is written from `libs/baton/config/settings.py`. After a change there, run
`python -m baton.config.reference > docs/configuration.md`.
"""


def render() -> str:
    """The whole page."""
    lines = [INTRO]
    section = ""
    for option in OPTIONS.values():
        if option.section != section:
            section = option.section
            lines += [f"\n## {section}\n", "| option | environment | default | takes | what it is |"]
            lines.append("|---|---|---|---|---|")
        cells = (
            f"`{option.key}`",
            f"`{option.environment}`",
            _default(option.default),
            option.allowed,
            option.description.replace("|", "\\|"),
        )
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["\n## Other variables\n", "| environment | what it is |", "|---|---|"]
    lines += [f"| `{name}` | {what} |" for name, what in OTHER_VARIABLES.items()]
    return "\n".join(lines) + "\n"


def _default(value: Any) -> str:
    if value == "":
        return "empty"
    if isinstance(value, str):
        return f"`{value}`"
    if isinstance(value, list):
        return "`" + ",".join(str(item) for item in value) + "`"
    return f"`{json.dumps(value)}`"


if __name__ == "__main__":
    print(render(), end="")
