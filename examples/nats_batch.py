"""A batch job over NATS, without HTTP and without any code of Baton's: only nats-py and JSON.

    baton key nats > credentials.json       (while `baton up` runs on this machine)
    python examples/nats_batch.py credentials.json

docs/batch.md describes every subject and message.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
import uuid
from pathlib import Path
from typing import Any

import nats
from nats.aio.msg import Msg

QUESTIONS = {
    "france": "What is the capital of France? Answer in one sentence.",
    "moon": "Who was the first person to walk on the Moon? Answer in one sentence.",
    "water": "What is water made of? Answer in one sentence.",
}


async def main(credentials: dict[str, Any], model: str) -> None:
    connection = await nats.connect(
        credentials["url"],
        user=credentials["user"],
        password=credentials["password"],
        inbox_prefix=credentials["inbox_prefix"].encode(),
    )
    job = f"questions-{uuid.uuid4().hex[:8]}"  # whatever we like to call it
    token = hashlib.sha256(job.encode()).hexdigest()[:32]  # and what its subjects call it
    out = f"baton.v1._.batch.out.{credentials['user']}.{token}"

    async def tell(**message: Any) -> None:
        """Sends a message; it is stored for good when this returns."""
        data = json.dumps(message).encode()
        answer = json.loads((await connection.request(credentials["publish_to"], data, timeout=5)).data)
        if "error" in answer:
            raise SystemExit(f"not stored: {answer['error']}")

    # First listen, then send: results come as they are made, in no order.
    results: asyncio.Queue[Msg] = asyncio.Queue()
    for kind in ("result.*", "progress"):
        await connection.subscribe(f"{out}.{kind}", cb=results.put)

    await tell(t="open", job=job, priority="high", expires_s=600)
    for custom_id, question in QUESTIONS.items():
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": 48,
            "temperature": 0,
        }
        endpoint = "/v1/chat/completions"
        await tell(t="request", job=job, custom_id=custom_id, endpoint=endpoint, body=body)
    await tell(t="close", job=job)

    while True:
        message = json.loads((await asyncio.wait_for(results.get(), 120)).data)
        if message["t"] == "progress":
            done = message["completed"] + message["failed"]
            print(f"-- {message['status']}: {done} of {message['total']}")
            if message["status"] in ("completed", "expired", "cancelled"):
                break
        elif message["error"]:
            print(f"{message['custom_id']}: failed, {message['error']['message']}")
        else:
            answer = message["response"]["body"]
            text = answer["choices"][0]["message"]["content"] if "choices" in answer else answer
            print(f"{message['custom_id']}: {text}")

    # Results are kept: each can be had again by the name of its request.
    again = f"{out}.result.{hashlib.sha256(b'france').hexdigest()[:32]}"
    get = f"$JS.API.DIRECT.GET.{credentials['results_stream']}.{again}"
    stored = await connection.request(get, timeout=5)
    print(f"kept: the result of {json.loads(stored.data)['custom_id']!r}")
    await connection.close()


if __name__ == "__main__":
    chosen = sys.argv[2] if len(sys.argv) > 2 else "smollm2-135m-instruct"
    asyncio.run(main(json.loads(Path(sys.argv[1]).read_text()), chosen))
