"""`baton chat`: a conversation in the terminal, over the HTTP API."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Generator
from typing import Any

from baton.cli.flags import add_settings, is_given, load_settings
from baton.cli.http import Api, ApiError
from baton.cli.local import add_run, local_run

Messages = list[dict[str, str]]

# Control characters are the terminal's commands; a model has none to give. Newline and tab stay.
_UNSAFE = {code: None for code in (*range(32), *range(127, 160)) if code not in (9, 10)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompt", nargs="*", help="ask this and leave; without it, a conversation (or standard input)"
    )
    parser.add_argument("--url", help="address of the API; without it the Baton that runs on this machine")
    parser.add_argument("--system", help="a system message")
    parser.add_argument("--max-tokens", type=int, default=1_024, help="longest answer, tokens; default 1024")
    parser.add_argument("--temperature", type=float, default=0.2, help="0 is greedy; default 0.2")
    parser.add_argument("--seed", type=int, help="the same seed gives the same answer")
    add_run(parser)
    add_settings(parser, "[PROMPT ...]")


def run(args: argparse.Namespace) -> int:
    try:
        return _chat(args)
    except ApiError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _chat(args: argparse.Namespace) -> int:
    settings = load_settings(args)
    key = settings.gateway.api_key
    url = args.url or ""
    if not url:
        run = local_run(args.pid)
        url = run.gateway_url if run is not None else f"http://127.0.0.1:{settings.gateway.port}"
        key = key or (run.api_key if run is not None else "")
        if not url:
            raise ApiError("the Baton that runs here is still starting; wait for its `ready`")
    api = Api(url, api_key=key, timeout_s=settings.gateway.request_timeout_s)
    try:
        model = settings.model.name if is_given(args, "model.name") else _only_model(api)
    except ApiError as error:
        hint = "" if error.status else "; `baton up` starts one, --url names another"
        raise ApiError(f"{error}{hint}", error.status) from error
    body: dict[str, Any] = {"model": model, "max_tokens": args.max_tokens, "stream": True}
    body |= {name: getattr(args, name) for name in ("temperature", "seed") if getattr(args, name) is not None}
    messages: Messages = [{"role": "system", "content": args.system}] if args.system else []
    if args.prompt or not sys.stdin.isatty():
        text = " ".join(args.prompt) or sys.stdin.read().strip()
        if not text:
            print("error: there is nothing to ask: standard input is empty", file=sys.stderr)
            return 2
        _answer(api, body, [*messages, {"role": "user", "content": text}])
        return 0
    return _converse(api, body, messages, model)


def _only_model(api: Api) -> str:
    try:
        return str(api.get("/v1/models")["data"][0]["id"])
    except (KeyError, IndexError, TypeError) as error:
        raise ApiError(f"{api.url} serves no model yet") from error


def _converse(api: Api, body: dict[str, Any], messages: Messages, model: str) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (its import gives `input` a history and editing)
    print(f"{model} at {api.url}. /new starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer.")
    system = list(messages)
    while True:
        try:
            text = input(_bold("\nyou> ")).strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print()
            continue
        if text in ("/exit", "/quit"):
            return 0
        if text == "/new":
            messages = list(system)
            continue
        if not text:
            continue
        messages.append({"role": "user", "content": text})
        try:
            messages.append({"role": "assistant", "content": _answer(api, body, messages)})
        except ApiError as error:
            messages.pop()  # so that it can be asked again
            print(f"error: {error}", file=sys.stderr)


def _answer(api: Api, body: dict[str, Any], messages: Messages) -> str:
    """Streams one answer to stdout and returns it; Ctrl-C ends it where it is."""
    said: list[str] = []
    pieces = _pieces(api, {**body, "messages": messages})
    try:
        for piece in pieces:
            said.append(piece)
            sys.stdout.write(piece.translate(_UNSAFE))
            sys.stdout.flush()
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        sys.stdout.write(" [stopped]")
    finally:
        pieces.close()  # drops the connection, which frees the request everywhere
    sys.stdout.write("\n")
    return "".join(said)


def _pieces(api: Api, body: dict[str, Any]) -> Generator[str, None, None]:
    with contextlib.closing(api.stream("/v1/chat/completions", body)) as stream:
        for event in stream:
            for choice in event.get("choices", []):
                if text := choice.get("delta", {}).get("content"):
                    yield text


def _bold(text: str) -> str:
    """In bold where the terminal can; readline is told that the codes take no room."""
    if os.environ.get("TERM", "dumb") == "dumb" or "NO_COLOR" in os.environ:
        return text
    return f"\x01\x1b[1m\x02{text}\x01\x1b[0m\x02"
