"""The mock engine's vocabulary: 256 bytes and a few special tokens, with a trivial ChatML template."""

from __future__ import annotations

from baton.text.tokenizer import SpecialToken, Tokenizer

BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
VOCAB_SIZE = 260
SPECIALS = {BOS: "<|bos|>", EOS: "<|eos|>", IM_START: "<|im_start|>", IM_END: "<|im_end|>"}

TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class _ByteEncoder:
    def encode(self, text: str, first: bool) -> list[int]:
        return list(text.encode())


def mock_tokenizer() -> Tokenizer:
    """A token a byte."""
    return Tokenizer(
        _ByteEncoder(),
        lambda token: bytes([token]),
        vocab_size=VOCAB_SIZE,
        specials=[SpecialToken(id_, text) for id_, text in SPECIALS.items()],
        bos_id=BOS,
        eos_ids=[EOS, IM_END],
    )
