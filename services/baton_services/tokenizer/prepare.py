"""From a `Generate` to tokens: template, encoding, the context's limit, the model's stop ids."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec

from baton.config.settings import Settings
from baton.models.errors import ModelError
from baton.protocol.base import unpack_tokens
from baton.protocol.errors import Code, RequestError
from baton.protocol.liveness import ModelInfo
from baton.protocol.request import Generate
from baton.protocol.sampling import MAX_STOP_IDS, Constraint
from baton.service.base import StartupError
from baton.text import reasoning
from baton.text.detokenizer import Detokenizer, decode
from baton.text.model_files import TextModel
from baton.text.templates import encode_chat
from baton_services.tokenizer.answer import Answer
from baton_services.tokenizer.forms import Forms
from baton_services.tokenizer.live import LiveRequest
from baton_services.tokenizer.prompt_scores import MOST, PromptScores

# Below this an encode takes less than a thread's round trip; above, it would hold the loop up.
INLINE_CHARS = 4_000
# Text of more characters than the context's longest tokens have bytes, times this, is not encoded to be told
# too long: normalising may shorten a text, but not by so much.
SHRINK = 4


class Preparer:
    """Makes live requests ready to be placed. Long texts are encoded in a thread."""

    def __init__(self, text: TextModel, info: ModelInfo, threads: int, tool_calls: str = "auto") -> None:
        self._text = text
        self.max_context = info.max_context
        longest = max(len(text.tokenizer.token_bytes(token)) for token in range(text.vocab_size))
        self._max_characters = info.max_context * longest * SHRINK
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="encode")
        self._forms = Forms(text, tool_calls)

    def live(self, generate: Generate) -> LiveRequest:
        """A request not yet prepared, with its further choices."""
        live = self._one(generate)
        for number, request in enumerate(generate.forks, start=1):
            choice = generate.choice + number
            fork = msgspec.structs.replace(generate, request=request, choice=choice, forks=[])
            live.riders.append(self._one(fork))
            live.riders[-1].dispatching = True
        return live

    def _one(self, generate: Generate) -> LiveRequest:
        answer = Answer(
            self._text.tokenizer,
            generate.stop,
            skip_special=generate.skip_special_tokens,
            continues=generate.messages is None or generate.continue_final_message,
            min_tokens=generate.sampling.min_tokens,
            keep=self._forms.kept(generate),
        )
        return LiveRequest(generate, time.monotonic() + generate.deadline_ms / 1000, answer)

    async def prepare(self, live: LiveRequest) -> None:
        """Fills in `prompt` and `sampling`, of its further choices as well.

        Raises:
            RequestError: the template refuses the messages, a token id is out of range, the prompt leaves
                no room for an answer, or the answer's form cannot be kept.
        """
        started = time.monotonic()
        live.prompt = await self.encode(live.generate)
        self._check_tokens(live.generate.sampling.logit_bias, "logit_bias")
        self._check_tokens(live.generate.sampling.stop_token_ids, "stop_token_ids")
        self._limit(live, await self._forms.constraint(live.generate, live.prompt))
        if live.sampling.prompt_logprobs >= 0:
            live.scores = self._scores(live)
        live.timing.tokenize_ms = (time.monotonic() - started) * 1000
        for rider in live.riders:
            rider.follow(live)
        for each in (live, *live.riders):
            each.reader = self._forms.reader(each.generate, each.prompt)
            if each.generate.echo:
                each.answer.echo(self._text_of(each))

    async def encode(self, generate: Generate) -> list[int]:
        """The prompt's tokens.

        Raises:
            RequestError: the template refuses the messages, a token id is out of range, or the prompt is
                hopelessly long.
        """
        characters = _characters(generate)
        if characters > self._max_characters:
            raise self._too_long(generate, f"{characters} characters")
        if characters <= INLINE_CHARS:
            return self._encode(generate)
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._encode, generate)

    async def decode(self, tokens: list[int]) -> str:
        """The text of tokens, special ones included.

        Raises:
            RequestError: an id is out of range.
        """
        self._check_tokens(tokens, "tokens")
        work = partial(decode, self._text.tokenizer, tokens, skip_special=False)
        if len(tokens) <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._forms.close()

    def _encode(self, generate: Generate) -> list[int]:
        if generate.messages is not None:
            messages, arguments = self._forms.conversation(generate)
            return encode_chat(
                self._text.tokenizer,
                self._text.template,
                messages,
                add_generation_prompt=generate.add_generation_prompt,
                arguments=arguments,
                continue_final=generate.continue_final_message,
            )
        if generate.prompt is not None:
            return self._text.tokenizer.encode_prompt(generate.prompt)
        tokens = unpack_tokens(generate.prompt_tokens or b"").tolist()
        self._check_tokens(tokens, "prompt")
        return tokens

    def _check_tokens(self, tokens: Iterable[int], param: str) -> None:
        vocab = self._text.tokenizer.vocab_size
        bad = next((token for token in tokens if token >= vocab), None)
        if bad is not None:
            words = f"{param}: token id {bad} is not in the vocabulary of {vocab}"
            raise RequestError.of(Code.INVALID_REQUEST, words, param=param)

    def _text_of(self, live: LiveRequest) -> str:
        """The prompt as its sender knows it."""
        given = live.generate.prompt
        if given is not None:
            return given
        skip = live.generate.skip_special_tokens
        return decode(self._text.tokenizer, live.prompt, skip_special=skip, continues=True)

    def _scores(self, live: LiveRequest) -> PromptScores:
        tokenizer, given = self._text.tokenizer, live.generate.prompt
        skip = live.generate.skip_special_tokens
        detokenizer = Detokenizer(tokenizer, skip_special=skip, continues=given is None)
        return PromptScores(live.prompt, tokenizer, detokenizer)

    def _limit(self, live: LiveRequest, constraint: Constraint | None) -> None:
        asked, context = live.generate.sampling, self.max_context
        used = len(live.prompt)
        if not used:
            words = "the prompt has no tokens"
            raise RequestError.of(Code.INVALID_REQUEST, words, param=_source(live.generate))
        if used + max(asked.max_tokens, 1) > context:
            wanted = f" and {asked.max_tokens} were asked for as answer" if asked.max_tokens else ""
            raise self._too_long(live.generate, f"{used}{wanted}")
        if asked.prompt_logprobs >= 0 and used * (1 + asked.prompt_logprobs) > MOST:
            words = f"logprobs: {asked.prompt_logprobs} for each of {used} tokens, at most {MOST} in all"
            raise RequestError.of(Code.INVALID_REQUEST, words, param="logprobs")
        eos = [] if asked.ignore_eos else self._text.tokenizer.eos_ids
        stop_ids = list(dict.fromkeys([*asked.stop_token_ids, *eos]))[:MAX_STOP_IDS]
        live.sampling = msgspec.structs.replace(
            asked,
            max_tokens=asked.max_tokens or context - used,
            stop_token_ids=stop_ids,
            constraint=constraint,
        )

    def _too_long(self, generate: Generate, what: str) -> RequestError:
        words = f"this model's context is {self.max_context} tokens; the prompt has {what}"
        return RequestError.of(Code.CONTEXT_LENGTH, words, param=_source(generate))


def _source(generate: Generate) -> str:
    """The field that the prompt comes from."""
    return "messages" if generate.messages is not None else "prompt"


def _characters(generate: Generate) -> int:
    if generate.messages is not None:
        tools = sum(len(tool.description) + len(tool.parameters) for tool in generate.tools)
        return tools + sum(len(message.content or "") for message in generate.messages)
    return len(generate.prompt or "")


def load_text(settings: Settings) -> tuple[TextModel, ModelInfo]:
    """The model's text side, and what it is called.

    Raises:
        StartupError: it is not at hand, or its files cannot be used.
    """
    try:
        text = TextModel.load(
            settings.model.name, settings.model.cache_dir, mock_context=settings.mock.max_context
        )
    except ModelError as error:
        raise StartupError(str(error)) from error
    limits = [limit for limit in (settings.model.max_context, text.max_context) if limit]
    if not limits:
        raise StartupError(f"{text.name} does not say how long its context is: set --model-max-context")
    info = ModelInfo(
        name=text.name,
        max_context=min(limits),
        vocab_size=text.vocab_size,
        aliases=settings.model.aliases,
        reasons=reasoning.detect(text.template.source if text.template is not None else None) is not None,
    )
    return text, info
