"""Our answers against OpenAI's published schema, and what real clients sent against our gateway.

    make conformance SPEC=path/to/openapi.json

Beside the specification it looks for `sse/*.bin` (streams of OpenAI's own, read with the reader of our tests)
and `clients.jsonl` (requests of real clients, replayed: answered as the schema has it, or refused by name).
Exits with 1 and one line for each thing that does not conform.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from api_streams import check_responses, named_events
from jsonschema import Draft202012Validator
from rawhttp import dechunked, send
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012
from running import Running
from sse import check_stream, read_chunks, read_events

FLAGS = (
    "--engine", "mock", "--kv-memory-mb", "8", "--mock-step-us", "500", "--mock-token-us", "1",
    "--mock-max-context", "1024",
)  # fmt: skip
Json = dict[str, Any]

MESSAGES = [{"role": "user", "content": "hi"}]
CHATS: list[Json] = [
    {},
    {"n": 2, "seed": 1},
    {"logprobs": True, "top_logprobs": 2},
    {"stop": ["a", "e"]},
    {"stream": True},
    {"stream": True, "n": 2, "logprobs": True, "top_logprobs": 1, "stream_options": {"include_usage": True}},
]
COMPLETIONS: list[Json] = [
    {},
    {"prompt": ["a", "b"], "n": 2},
    {"logprobs": 3},
    {"echo": True},
    {"best_of": 3},
    {"stream": True, "logprobs": 1, "stream_options": {"include_usage": True}},
]
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": False}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"]}
RESPONSES: list[Json] = [
    {},
    {"instructions": "Be.", "metadata": {"a": "b"}, "store": False},
    {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
    {"tools": [TOOL], "tool_choice": "required", "max_output_tokens": 100},
    {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}, "max_output_tokens": 100},
]


class Specification:
    """OpenAI's schemas. OpenAPI 3.1 has no `nullable`, but they keep 3.0's: `{X, nullable}` is X or null."""

    def __init__(self, path: Path) -> None:
        tree = _nulls(json.loads(path.read_bytes()))
        resource = Resource.from_contents(tree, default_specification=DRAFT202012)
        self._registry = Registry().with_resource("urn:openai", resource)

    def problems(self, name: str, body: Any) -> list[str]:
        """What keeps `body` from being a `name`."""
        schema = {"$ref": f"urn:openai#/components/schemas/{name}"}
        found = Draft202012Validator(schema, registry=self._registry).iter_errors(body)
        return [f"{name}{error.json_path[1:]}: {error.message[:200]}" for error in found]


def _nulls(node: Any) -> Any:
    if isinstance(node, list):
        return [_nulls(item) for item in node]
    if not isinstance(node, dict):
        return node
    rest = {key: _nulls(value) for key, value in node.items() if key != "nullable"}
    return {"anyOf": [rest, {"type": "null"}]} if node.get("nullable") is True else rest


def recorded_streams(spec: Specification, folder: Path) -> Iterator[str]:
    """OpenAI's own streams: our reader reads them, and the schema as we read it takes them."""
    count = 0
    for path in sorted(folder.glob("*.bin")):
        events = read_events(path.read_bytes(), whole=False)
        for event in events:
            if event.data != "[DONE]":
                count += 1
                problems = spec.problems("CreateChatCompletionStreamResponse", json.loads(event.data))
                yield from (f"{path.name}: {problem}" for problem in problems)
    print(f"read {count} chunks of OpenAI's streams")


def our_answers(spec: Specification, baton: Running) -> Iterator[str]:
    for fields in CHATS:
        body = {"model": "mock", "messages": MESSAGES, "max_tokens": 8, **fields}
        yield from _answer(spec, baton, "/v1/chat/completions", body, "CreateChatCompletionResponse")
    for fields in COMPLETIONS:
        body = {"model": "mock", "prompt": "hi", "max_tokens": 8, **fields}
        yield from _answer(spec, baton, "/v1/completions", body, "CreateCompletionResponse")
    for fields in RESPONSES:
        yield from _responses(spec, baton, {"model": "mock", "input": "hi", "max_output_tokens": 8, **fields})
    _, models = baton.get("/v1/models")
    yield from spec.problems("ListModelsResponse", models)
    for status, body in (baton.get("/v1/models/none"), baton.post("/v1/completions", {}), baton.get("/none")):
        if status < 400:
            yield f"an error was answered {status}"
        yield from spec.problems("ErrorResponse", body)


def _answer(spec: Specification, baton: Running, path: str, body: Json, whole: str) -> Iterator[str]:
    answer = send(baton.url, "POST", path, json.dumps(body).encode())
    if answer.status != 200:
        yield f"{path} {body}: {answer.status}"
        return
    if not body.get("stream"):
        yield from spec.problems(whole, json.loads(answer.body))
        return
    chat = "chat" in path
    chunks = read_chunks(dechunked(answer.body))
    check_stream(chunks, chat=chat)
    name = "CreateChatCompletionStreamResponse" if chat else whole
    for chunk in chunks:
        if not chat:
            _finish(chunk)
        yield from spec.problems(name, chunk)


def _responses(spec: Specification, baton: Running, body: Json) -> Iterator[str]:
    status, whole = baton.post("/v1/responses", body)
    if status != 200:
        yield f"/v1/responses {body}: {status}"
        return
    yield from spec.problems("Response", whole)
    answer = send(baton.url, "POST", "/v1/responses", json.dumps({**body, "stream": True}).encode())
    events = named_events(dechunked(answer.body))
    check_responses(events)
    for event in events:
        yield from spec.problems("ResponseStreamEvent", event)
    if body.get("store") is not False:
        _, items = baton.get(f"/v1/responses/{whole['id']}/input_items")
        yield from spec.problems("ResponseItemList", items)


def _finish(chunk: Json) -> None:
    """The schema has streamed completions like whole ones; OpenAI's have no finish reason before the last."""
    for choice in chunk["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"


def replayed(spec: Specification, baton: Running, path: Path) -> Iterator[str]:
    """Requests of real clients. What is not there yet is 404, what is not supported 400 with its name."""
    served = refused = absent = 0
    for line in path.read_text().splitlines():
        record = json.loads(line)
        sent, place = record["b"], f"{record['tag']} {record['m']} {record['p']}"
        if isinstance(sent, dict) and "model" in sent:
            sent["model"] = "mock"
        multipart = isinstance(sent, dict) and "__raw__" in sent
        body = b"" if sent is None else sent["__raw__"].encode() if multipart else json.dumps(sent).encode()
        skipped = ("host", "content-length", "connection", "accept-encoding")
        headers = {name.title(): value for name, value in record["h"].items() if name not in skipped}
        headers.setdefault("Content-Type", "application/json")
        answer = send(baton.url, record["m"], record["p"], body, headers)
        if answer.status == 200:
            served += 1
            continue
        yield from (
            f"{place}: {problem}" for problem in spec.problems("ErrorResponse", json.loads(answer.body))
        )
        error = answer.error
        if answer.status == 400 and error["param"] and error["param"].split("[")[0].split(".")[0] in sent:
            refused += 1
        elif answer.status == 404 and error["code"] == "not_found":
            absent += 1
        else:
            yield f"{place}: {answer.status} {error['message']}"
    told = f"{served} served, {refused} refused by name, {absent} of endpoints that are not there"
    print(f"replayed clients' requests: {told}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("spec", type=Path, help="OpenAI's openapi.json")
    path = parser.parse_args().spec
    spec = Specification(path)
    problems = list(recorded_streams(spec, path.parent / "sse"))
    with tempfile.TemporaryDirectory() as folder, Running(Path(folder), *FLAGS) as baton:
        problems += our_answers(spec, baton)
        if (clients := path.parent / "clients.jsonl").exists():
            problems += replayed(spec, baton, clients)
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
