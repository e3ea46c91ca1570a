"""Sampling parameters: the part of a request that decides which token comes next."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from baton.protocol.base import Part

MAX_LOGIT_BIAS = 1_024
MAX_STOP_IDS = 64
MAX_TOP_LOGPROBS = 20
MAX_GRAMMAR_CHARS = 256 * 1024

StopIds = Annotated[list[int], Meta(max_length=MAX_STOP_IDS)]
Unsigned64 = Annotated[int, Meta(ge=0)]


class Constraint(Part):
    """A grammar that the output must follow, as llguidance reads it (its JSON form or Lark).

    Its state is a function of the output tokens, so nothing else travels. `json`: runs of digits and white
    space outside of strings are bounded where the grammar allows, so that a small model ends; these are
    counted from the end of the first `skip` on (the end of the reasoning), `skip` "" being from the start,
    and from the start as well if the output does not begin with `begin` ("": it always reasons first).
    """

    grammar: Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)]
    json: bool = False
    skip: str = ""
    begin: str = ""


class SamplingParams(Part):
    """How a sequence's tokens are chosen. Ranges are checked by the gateway; workers trust them.

    The default is greedy; `temperature` 0 means greedy whatever the filters say. `seed` is drawn by the
    gateway when the client gives none, so that a replay anywhere draws the same tokens.
    """

    seed: Unsigned64 = 0
    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output (Keskar et al. 2019, arXiv:1909.05858)
    presence_penalty: float = 0.0  # over output only, as OpenAI defines it
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    max_tokens: int = 16  # output tokens, at least 1; the tokenizer caps it by the context
    min_tokens: int = 0  # stop ids are masked before this many output tokens
    stop_token_ids: StopIds = []  # the model's own EOS ids are added by the tokenizer
    ignore_eos: bool = False  # the tokenizer then sends no EOS ids; kept for the record
    logprobs: int = -1  # -1: none; 0: of the chosen token; k: and of the k most likely
    prompt_logprobs: int = -1  # as `logprobs`, of each prompt token but the first
    constraint: Constraint | None = None


class PromptRows(Part):
    """Log-probabilities of consecutive prompt tokens, each given all tokens before it; little-endian, packed.

    n tokens with k likely ones each: `chosen` is float32 [n], `top` float32 [n, k] in falling order,
    `top_ids` uint32 [n, k]. `start` is the position of the first, at least 1: nothing precedes token 0.
    """

    start: int
    chosen: bytes
    top_ids: bytes = b""
    top: bytes = b""


class TokenLogprobs(Part):
    """Log-probabilities at one output position, from the raw logits (before penalties and temperature)."""

    chosen: float
    top_ids: list[int] = []
    top: list[float] = []
