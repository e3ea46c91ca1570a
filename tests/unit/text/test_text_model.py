"""A model's text side as services load it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.models.catalogue import ModelPath
from baton.models.errors import ModelFileError, ModelNotFound
from baton.text.mock import BOS, EOS, IM_END, IM_START
from baton.text.model_files import TextModel, load_tokenizer
from baton.text.templates import MAX_TEMPLATE_CHARS, encode_chat

MAX_MEGABYTES = 120
GGUF: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<|end|>", "<s>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 4,
    "tokenizer.ggml.eos_token_id": 3,
    "llama.context_length": 128,
    "tokenizer.chat_template": "{{ bos_token }}"
    "{% for m in messages %}{{ m.content ~ eos_token }}{% endfor %}",
}
Write = Callable[[dict[str, Any]], Path]


def opened(path: Path) -> TextModel:
    return TextModel.open(ModelPath("made", path, "gguf"))


def test_a_gguf_file(write_gguf: Write) -> None:
    model = opened(write_gguf(GGUF))
    assert (model.name, model.max_context, model.vocab_size) == ("made", 128, 5)
    assert encode_chat(model.tokenizer, model.template, [{"role": "user", "content": "ab"}]) == [4, 2, 3]


def test_a_model_without_a_template_takes_no_chat(write_gguf: Write) -> None:
    made = dict(GGUF)
    del made["tokenizer.chat_template"], made["llama.context_length"]
    model = opened(write_gguf(made))
    assert model.template is None and model.max_context == 0


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("tokenizer.chat_template", "{% if", "tokenizer.chat_template: line 1"),
        ("tokenizer.chat_template", "x" * (MAX_TEMPLATE_CHARS + 1), "characters; templates of up to"),
        ("tokenizer.chat_template", 7, "chat_template is not a text"),
        ("llama.context_length", "long", "the context length is long"),
        ("tokenizer.ggml.tokens", ["a"], "entries, but the vocabulary has 1 tokens"),
    ],
)
def test_bad_metadata_is_one_clear_error(write_gguf: Write, key: str, value: Any, words: str) -> None:
    with pytest.raises(ModelFileError, match=words) as raised:
        opened(write_gguf({**GGUF, key: value}))
    assert "\n" not in str(raised.value) and "made.gguf" in str(raised.value)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_file_cut_short_is_one_clear_error(write_gguf: Write, share: float) -> None:
    path = write_gguf(GGUF)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelFileError, match=r"made\.gguf"):
        opened(path)


def test_the_mock() -> None:
    model = TextModel.load("mock", mock_context=77)
    assert (model.max_context, model.vocab_size, model.tokenizer.eos_ids) == (77, 260, [EOS, IM_END])
    assert model.tokenizer.bos_id == BOS
    assert model.tokenizer.encode("né", special=False) == [0x6E, 0xC3, 0xA9]
    ids = encode_chat(model.tokenizer, model.template, [{"role": "user", "content": "hi"}])
    expected = [IM_START, *b"user\nhi", IM_END, *b"\n", IM_START, *b"assistant\n"]
    assert ids == expected


def test_names_are_resolved(smollm2: Path, tmp_path: Path) -> None:
    assert TextModel.load(str(smollm2)).vocab_size == 49_152
    assert load_tokenizer(ModelPath("s", smollm2, "gguf")).vocab_size == 49_152
    with pytest.raises(ModelNotFound):
        TextModel.load("no-such-model", tmp_path)


def test_a_process_with_a_tokenizer_is_small_and_has_no_torch(smollm2: Path) -> None:
    code = (
        "import sys, psutil\n"
        "from baton.text.model_files import TextModel\n"
        "from baton.text.templates import encode_chat\n"
        "model = TextModel.load(sys.argv[1])\n"
        "encode_chat(model.tokenizer, model.template, [{'role': 'user', 'content': 'word ' * 2000}])\n"
        "assert not {'torch', 'transformers', 'sentencepiece', 'gguf'} & set(sys.modules)\n"
        "print(psutil.Process().memory_info().rss // 2**20)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(smollm2)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < MAX_MEGABYTES
