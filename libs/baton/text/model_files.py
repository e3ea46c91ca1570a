"""What a model's own files say about text: its tokenizer, its chat template, and how much it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.models.catalogue import ModelPath, resolve
from baton.models.errors import ModelFileError
from baton.models.gguf import GgufFile
from baton.models.jsonfile import read_json
from baton.text.gguf_tokenizers import from_gguf
from baton.text.hf_tokenizer import from_folder
from baton.text.mock import BOS as MOCK_BOS
from baton.text.mock import EOS as MOCK_EOS
from baton.text.mock import SPECIALS, TEMPLATE, mock_tokenizer
from baton.text.templates import MAX_TEMPLATE_CHARS, ChatTemplate
from baton.text.tokenizer import Tokenizer

MOCK_MAX_CONTEXT = 32_768
# What a template may name, and the key of GGUF metadata that holds its id.
_NAMED_TOKENS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
    "sep_token": "tokenizer.ggml.seperator_token_id",
    "cls_token": "tokenizer.ggml.cls_token_id",
    "mask_token": "tokenizer.ggml.mask_token_id",
}


@dataclass(frozen=True, slots=True)
class TextModel:
    """A model without its weights.

    `max_context` is in tokens, prompt and answer together, as its files have it; 0 if they do not say.
    `template` is None for a model that has none: it takes completions only.
    """

    name: str
    tokenizer: Tokenizer
    template: ChatTemplate | None
    max_context: int

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @classmethod
    def load(
        cls, name: str, cache_dir: str | Path = "", *, mock_context: int = MOCK_MAX_CONTEXT
    ) -> TextModel:
        """The model that a catalogue name, a hub name, a path or "mock" stands for.

        Raises:
            ModelNotFound: it is not at hand; the text says how to get it.
            ModelFileError: its files are damaged or inconsistent.
            UnsupportedModel: they ask for something that is not read.
        """
        return cls.open(resolve(name, cache_dir), mock_context=mock_context)

    @classmethod
    def open(cls, path: ModelPath, *, mock_context: int = MOCK_MAX_CONTEXT) -> TextModel:
        """As `load`, of a model already found."""
        if path.kind == "mock":
            tokens = {"bos_token": SPECIALS[MOCK_BOS], "eos_token": SPECIALS[MOCK_EOS]}
            return cls(path.name, mock_tokenizer(), ChatTemplate(TEMPLATE, tokens), mock_context)
        if path.kind == "gguf":
            return _from_gguf(path.name, path.path)
        return _from_folder(path.name, path.path)


def load_tokenizer(path: ModelPath) -> Tokenizer:
    """A model's tokenizer alone. Raises as `TextModel.load`."""
    return TextModel.open(path).tokenizer


def _from_gguf(name: str, path: Path) -> TextModel:
    metadata = GgufFile.open(path).metadata
    tokenizer = from_gguf(metadata, path)
    source = metadata.get("tokenizer.chat_template")
    template = None
    if source is not None:
        if not isinstance(source, str):
            raise ModelFileError(f"{path}: tokenizer.chat_template is not a text")
        texts = metadata["tokenizer.ggml.tokens"]
        ids = {named: metadata.get(key) for named, key in _NAMED_TOKENS.items()}
        # Ids that matter were refused with the tokenizer if out of range.
        tokens = {
            named: texts[id_] for named, id_ in ids.items() if isinstance(id_, int) and 0 <= id_ < len(texts)
        }
        template = ChatTemplate(source, tokens, where=f"{path}: tokenizer.chat_template")
    context = metadata.get(f"{metadata.get('general.architecture')}.context_length", 0)
    return TextModel(name, tokenizer, template, _context(context, path))


def _from_folder(name: str, folder: Path) -> TextModel:
    config = read_json(folder / "config.json")
    settings = _optional(folder / "tokenizer_config.json")
    generation = _optional(folder / "generation_config.json")
    tokens = {
        named: text for named in _NAMED_TOKENS if (text := _token_text(settings.get(named))) is not None
    }
    ends = _ids(generation.get("eos_token_id"), folder) or _ids(config.get("eos_token_id"), folder)
    tokenizer = from_folder(folder, ends, tokens.get("bos_token"), tokens.get("eos_token"))
    source = _template_source(folder, settings)
    template = None if source is None else ChatTemplate(source, tokens, where=f"{folder}: chat template")
    context = config.get("max_position_embeddings", 0)
    return TextModel(name, tokenizer, template, _context(context, folder))


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token_text(value: Any) -> str | None:
    """Plain, or as an added token is written."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _ids(value: Any, folder: Path) -> list[int]:
    """None, one id or several."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(id_, int) and not isinstance(id_, bool) for id_ in ids):
        raise ModelFileError(f"{folder}: eos_token_id is neither a whole number nor a list of them")
    return ids


def _template_source(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """`chat_template.jinja` if there is one, else `tokenizer_config.json`'s: one, or several by name."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        if path.stat().st_size > 4 * MAX_TEMPLATE_CHARS:
            raise ModelFileError(f"{path}: templates of up to {MAX_TEMPLATE_CHARS} characters are read")
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFileError(f"{path}: {error}") from error
    source = settings.get("chat_template")
    if isinstance(source, list):
        named = {item.get("name"): item.get("template") for item in source if isinstance(item, Mapping)}
        source = named.get("default")
    if source is not None and not isinstance(source, str):
        raise ModelFileError(f"{folder / 'tokenizer_config.json'}: chat_template is not a text")
    return source


def _context(value: Any, where: Path) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ModelFileError(f"{where}: the context length is {str(value)[:32]}, not a whole number")
    return value
