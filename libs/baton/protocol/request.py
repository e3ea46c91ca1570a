"""Gateway <-> tokenizer: a request in text, and its answer in text."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from baton.protocol.base import Message, Part, Row
from baton.protocol.errors import Failure
from baton.protocol.sampling import SamplingParams

MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 512
MAX_CHOICES = 128


class ChatMessage(Part):
    """One message of a conversation, checked by the gateway, rendered by the tokenizer's template."""

    role: str
    content: str | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] = []  # in OpenAI's form; an assistant's
    tool_call_id: str | None = None


class Structure(Part):
    """The form that the answer must have; the tokenizer makes a grammar of it.

    `kind` is json_object, json_schema (`text` is the schema, as JSON), regex, choice (one of `choices`), or
    grammar (`text` in Lark or GBNF). `param` is the field of the request that errors name.
    """

    kind: str
    text: str = ""
    choices: list[str] = []
    param: str = "response_format"


class Tool(Part):
    """A function that the model may call. `parameters` is a JSON schema, as JSON; "": any object."""

    name: str
    description: str = ""
    parameters: str = ""
    strict: bool = False


class Generate(Message):
    """Gateway -> tokenizer (a call): own this request. Answered `Accepted` or `Rejected`.

    Exactly one of `messages`, `prompt`, `prompt_tokens` is set. `sampling.max_tokens` 0 means "up to the
    context's end". Sent again (`resend` > 0) to another tokenizer when the first one dies: same seed, same
    text; the gateway drops the characters it has already sent on.
    """

    request: str  # our id: 32 hex digits, never the client's
    model: str
    reply_to: str  # subject that takes `TextBatch`
    messages: list[ChatMessage] | None = None
    prompt: str | None = None
    prompt_tokens: bytes | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the answer goes on with the last message's text
    template_arguments: dict[str, Any] = {}
    sampling: SamplingParams = msgspec.field(default_factory=SamplingParams)
    stop: Annotated[list[str], Meta(max_length=MAX_STOP_STRINGS)] = []
    skip_special_tokens: bool = True
    priority: int = 0  # higher goes first
    cache_salt: str = ""
    deadline_ms: int = 600_000  # left from now
    resend: int = 0
    choice: int = 0  # which of the answers to the same prompt: randomness is (seed, choice, index)
    # Further requests: the choices after this one, with all else the same. The prompt is read once for all;
    # each is answered, cancelled and sent again by itself.
    forks: Annotated[list[str], Meta(max_length=MAX_CHOICES)] = []
    echo: bool = False  # the prompt's text comes first in the answer's, `prompt_logprobs` of it with the text
    only_prompt: bool = False  # no answer follows: `max_tokens` of a completion is 0
    structure: Structure | None = None
    tools: list[Tool] = []
    tool_choice: str = "auto"  # none, auto, required, or `name:` and the one function to call
    parallel_tool_calls: bool = True


class Encode(Message):
    """Gateway -> tokenizer (a call): this request's prompt as tokens. Answered `Encoded` or `Rejected`."""

    generate: Generate


class Encoded(Message):
    """Tokenizer -> gateway: a prompt's tokens, little-endian uint32, and how many the model takes."""

    tokens: bytes
    max_context: int


class Decode(Message):
    """Gateway -> tokenizer (a call): the text of these tokens. Answered `Decoded` or `Rejected`."""

    tokens: bytes


class Decoded(Message):
    """Tokenizer -> gateway: the text, special tokens included."""

    text: str


class Accepted(Message):
    """The receiver has taken charge. Sent before anything else, within 500 ms."""


class Rejected(Message):
    """The receiver has not taken charge, and why."""

    failure: Failure


class Usage(Part):
    """What a finished request used. `cached_tokens` are prompt tokens found in a prefix cache at prefill,
    `reasoning_tokens` those of the completion that came before its answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class TokenText(Row):
    """One token as a client with `logprobs` sees it; the `raw` of a delta join to its text."""

    raw: bytes
    logprob: float | None  # None: of the first token of an echoed prompt
    top: list[tuple[bytes, float]] = []
    hidden: bool = False  # `raw` is its name, and no part of the text


class Timing(Part):
    """Where a request's time went, in milliseconds, as its owner and its workers measured it."""

    tokenize_ms: float = 0.0
    place_ms: float = 0.0  # waiting for the router, its queue included
    queue_ms: float = 0.0  # in the prefill engine's queue
    prefill_ms: float = 0.0  # first scheduled to first token
    handoff_ms: float = 0.0  # first token known to admitted at decode
    decode_ms: float = 0.0  # admitted at decode to last token
    handoff_bytes: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    transport: str = ""  # shm, tcp, none


class CallDelta(Row):
    """A piece of a tool call: `id` and `name` come once, with its first piece, then more of its arguments."""

    index: int
    id: str
    name: str
    arguments: str
    start: int  # characters of this call's arguments before these


class TextDelta(Row):
    """New text of one request. The last one of a request holds `finish` and `usage`, or `failure`.

    The first one has a `usage` as well: what is known of it before the answer.
    """

    request: str
    start: int  # index of the first character of `text` in the whole answer (Unicode code points)
    text: str
    finish: str = ""  # stop, length, tool_calls, cancelled
    tokens: list[TokenText] = []
    usage: Usage | None = None
    failure: Failure | None = None
    timing: Timing | None = None
    token_start: int = 0  # how many `tokens` of this answer came before
    calls: list[CallDelta] = []
    reasoning: str = ""
    reasoning_start: int = 0  # index of the first character of `reasoning` in all of it
    calls_start: int = 0  # calls begun before this, plus characters of their arguments
    stop: str = ""  # the stop string that ended the answer


class TextBatch(Message):
    """Tokenizer -> gateway: everything new since the last one, for all this gateway's requests."""

    tokenizer: str
    epoch: int
    deltas: list[TextDelta]


class CancelRequest(Message):
    """Gateway -> tokenizer: the client has gone; free everything this request holds. Idempotent.

    With `finish` the client still reads: a last delta with the usage says that it was cancelled.
    """

    request: str
    reason: str = ""
    finish: bool = False


class CancelResponse(Message):
    """Gateway -> gateway (a call): end this response, if you stream it. `ResponseCancelled` or `Rejected`."""

    response: str  # its id
    owner: str  # of the key that asks


class ResponseCancelled(Message):
    """The response as it is now that it has ended, as JSON."""

    body: bytes


class Inquire(Message):
    """Gateway -> tokenizer (a call): do you still own this request? `Accepted`, or `Rejected` with STALE."""

    request: str
