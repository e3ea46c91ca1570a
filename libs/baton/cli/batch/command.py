"""`baton batch submit|watch|fetch|cancel|list`."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from baton.cli.batch.upload import count_lines, first_line, upload
from baton.cli.flags import add_settings, load_settings
from baton.cli.http import Api, ApiError
from baton.cli.local import add_run, local_run

OVER = ("completed", "failed", "expired", "cancelled")
POLL_S = 0.5
OUTAGE_S = 30.0  # a gateway that is away is waited for
SHOWN_ERRORS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, help_line in (
        ("submit", "send a JSONL file of requests"),
        ("watch", "follow a batch until it is over"),
        ("fetch", "write a batch's results to a file or to standard output"),
        ("cancel", "end a batch; results that are there are kept"),
        ("list", "show batches, the newest first"),
    ):
        action = actions.add_parser(name, help=help_line, description=help_line, allow_abbrev=False)
        if name == "submit":
            action.add_argument("file", metavar="FILE", help="the requests, one JSON object a line")
            action.add_argument("--wait", action="store_true", help="watch it, then write the results")
            action.add_argument("--window", default="24h", help="how long it may take; default 24h")
            action.add_argument(
                "--priority", choices=("high", "normal", "low"), default="low", help="among batches"
            )
        elif name != "list":
            action.add_argument("batch", metavar="BATCH", help="its id")
        else:
            action.add_argument("--limit", type=int, default=20, help="how many; default 20")
        if name in ("submit", "fetch"):
            action.add_argument(
                "-o", "--output", metavar="FILE", help="where results go; default: standard output"
            )
        action.add_argument(
            "--url", help="address of the API; without it the Baton that runs on this machine"
        )
        add_run(action)
        add_settings(action, {"submit": "FILE", "list": ""}.get(name, "BATCH"))


def run(args: argparse.Namespace) -> int:
    try:
        api = _api(args)
        match args.action:
            case "submit":
                return _submit(api, args)
            case "watch":
                return _watch(api, args.batch)
            case "fetch":
                return _fetch(api, api.get(f"/v1/batches/{args.batch}"), args.output)
            case "cancel":
                batch = api.post(f"/v1/batches/{args.batch}/cancel", {})
                print(f"{batch['id']} {batch['status']}")
                return 0
            case _:
                _list(api, args.limit)
                return 0
    except (ApiError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _api(args: argparse.Namespace) -> Api:
    settings = load_settings(args)
    key, url = settings.gateway.api_key, args.url or ""
    if not url:
        run = local_run(args.pid)
        url = run.gateway_url if run is not None else f"http://127.0.0.1:{settings.gateway.port}"
        key = key or (run.api_key if run is not None else "")
    return Api(url, api_key=key)


def _submit(api: Api, args: argparse.Namespace) -> int:
    endpoint = first_line(args.file)
    file = upload(api, args.file)
    asked = {
        "input_file_id": file["id"],
        "endpoint": endpoint,
        "completion_window": args.window,
        "priority": args.priority,
    }
    batch = api.post("/v1/batches", asked)
    print(f"{batch['id']}: {count_lines(args.file)} requests from {args.file}", file=sys.stderr)
    if not args.wait:
        print(batch["id"])
        return 0
    code = _watch(api, batch["id"])
    return _fetch(api, api.get(f"/v1/batches/{batch['id']}"), args.output) or code


def _look(api: Api, id: str) -> dict[str, Any]:
    """The batch; a gateway or bus that is away for a moment is waited for."""
    until = time.monotonic() + OUTAGE_S
    while True:
        try:
            batch: dict[str, Any] = api.get(f"/v1/batches/{id}")
            return batch
        except ApiError as error:
            if error.status not in (0, 429, 503) or time.monotonic() > until:
                raise
        time.sleep(POLL_S)


def _watch(api: Api, id: str) -> int:
    """Shows progress until the batch is over. 0 if it was completed without a failure."""
    from baton.cli.batch.progress import Bar

    with Bar() as bar:
        while True:
            batch = _look(api, id)
            bar.show(batch)
            if batch["status"] in OVER:
                break
            time.sleep(POLL_S)
    counts = batch["request_counts"]
    words = (
        f"{batch['status']}: {counts['completed']} completed, {counts['failed']} failed of {counts['total']}"
    )
    print(words, file=sys.stderr)
    errors = (batch["errors"] or {}).get("data", [])
    for error in errors[:SHOWN_ERRORS]:
        where = f"line {error['line']}: " if error["line"] else ""
        print(f"  {where}{error['message']} ({error['code']})", file=sys.stderr)
    if len(errors) > SHOWN_ERRORS:
        print(f"  and {len(errors) - SHOWN_ERRORS} more", file=sys.stderr)
    return 0 if batch["status"] == "completed" and not counts["failed"] else 1


def _fetch(api: Api, batch: dict[str, Any], output: str | None) -> int:
    """Writes the output file's lines, then those of the error file."""
    files = [file for file in (batch["output_file_id"], batch["error_file_id"]) if file]
    if not files:
        print(f"error: there are no results; the batch is {batch['status']}", file=sys.stderr)
        return 1
    if output is None:
        for file in files:
            api.download(f"/v1/files/{file}/content", sys.stdout.buffer)
        return 0
    with open(output, "wb") as target:
        for file in files:
            api.download(f"/v1/files/{file}/content", target)
    print(f"results are in {output}", file=sys.stderr)
    return 0


def _list(api: Api, limit: int) -> None:
    for batch in api.get(f"/v1/batches?limit={limit}")["data"]:
        counts = batch["request_counts"]
        made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(batch["created_at"]))
        done = f"{counts['completed'] + counts['failed']}/{counts['total']}"
        print(f"{batch['id']}  {made}  {batch['status']:<11}  {done:>11}  {batch['endpoint']}")
