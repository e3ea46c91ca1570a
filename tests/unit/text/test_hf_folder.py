"""Hub folders: tokenizer.json as `tokenizers` reads it, special tokens apart from users' text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from text_corpus import NASTY
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE, WordLevel
from tokenizers.trainers import BpeTrainer

from baton.models.catalogue import ModelPath
from baton.models.errors import ModelFileError, UnsupportedModel
from baton.text.detokenizer import decode
from baton.text.model_files import TextModel

SPECIALS = [
    AddedToken("<s>", special=True, normalized=False),
    AddedToken("</s>", special=True, normalized=False),
    AddedToken("<|left|>", special=True, normalized=False, lstrip=True),
    AddedToken("<|right|>", special=True, normalized=False, rstrip=True),
    AddedToken("word", special=True, normalized=False, single_word=True),
]
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
MARKED = [
    "<s>hi</s> there",
    "a  <|left|>  b",
    "a  <|right|>  b<|right|>",
    "<|left|><|right|> ",
    "a word sword words",
    "a<tag>  b",
]


def byte_level() -> RustTokenizer:
    tokenizer = RustTokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def metaspace(scheme: str) -> RustTokenizer:
    tokenizer = RustTokenizer(BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = llama_decoder(strip=scheme != "never")
    return tokenizer


def llama_decoder(*, strip: bool) -> decoders.Decoder:
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strip else [])])


def prepended() -> RustTokenizer:
    """As Llama 2's: by a normalizer, before every stretch of text."""
    tokenizer = RustTokenizer(BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = llama_decoder(strip=True)
    return tokenizer


KINDS: dict[str, Callable[[], RustTokenizer]] = {
    "byte-level": byte_level,
    "space first": lambda: metaspace("first"),
    "space always": lambda: metaspace("always"),
    "space never": lambda: metaspace("never"),
    "space prepended": prepended,
}


def write_folder(folder: Path, tokenizer: RustTokenizer, **files: Any) -> ModelPath:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "config": {"max_position_embeddings": 512, "eos_token_id": 1},
        "tokenizer_config": {
            "bos_token": {"content": "<s>"},
            "eos_token": "</s>",
            "chat_template": TEMPLATE,
        },
        "generation_config": {"eos_token_id": [1, 2]},
    } | files
    for name, content in files.items():
        if content is not None:
            (folder / f"{name}.json").write_text(json.dumps(content))
    return ModelPath(folder.name, folder, "hf")


def trained(kind: str) -> RustTokenizer:
    tokenizer = KINDS[kind]()
    initial = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))] if kind != "byte-level" else []
    trainer = BpeTrainer(
        vocab_size=600,
        special_tokens=[*map(str, ("<s>", "</s>")), *initial],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if kind == "byte-level" else [],
        show_progress=False,
    )
    tokenizer.train_from_iterator([*NASTY.values()] * 3, trainer)
    # Byte pieces and <unk> are ordinary entries of a vocabulary, not added tokens.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in ("<s>", "</s>")]
    tokenizer = RustTokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.add_tokens([AddedToken("\u2581\u2581", normalized=True), AddedToken("<tag>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return tokenizer


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_texts(kind: str, tmp_path: Path) -> None:
    theirs = trained(kind)
    ours = TextModel.open(write_folder(tmp_path / "model", theirs)).tokenizer
    for text in [*NASTY.values(), *MARKED]:
        for special in (True, False):
            theirs.encode_special_tokens = not special
            expected = theirs.encode(text, add_special_tokens=False).ids
            assert ours.encode(text, special=special) == expected, (text, special)
        assert not any(map(ours.is_special, expected))
        if "\u2581" not in text:
            assert decode(ours, expected) == theirs.decode(expected), text
    assert ours.encode_prompt("hi") == theirs.encode("hi").ids


def test_what_the_files_say(tmp_path: Path) -> None:
    model = TextModel.open(write_folder(tmp_path / "model", trained("byte-level")))
    tokenizer = model.tokenizer
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.eos_ids) == (0, True, [1, 2])
    assert (model.name, model.max_context) == ("model", 512)
    assert model.vocab_size == trained("byte-level").get_vocab_size()
    assert model.template is not None
    assert model.template.render([{"role": "user", "content": "hi"}]) == "<s>[user]hi</s>"


def test_templates_lie_in_three_places(tmp_path: Path) -> None:
    def template(folder: str, source: Any, file: str | None = None) -> str | None:
        settings = {"chat_template": source}
        path = write_folder(tmp_path / folder, trained("byte-level"), tokenizer_config=settings)
        if file is not None:
            (path.path / "chat_template.jinja").write_text(file)
        found = TextModel.open(path).template
        return None if found is None else found.source

    assert template("none", None) is None
    assert template("one", "A") == "A"
    several = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert template("several", several) == "D"
    assert template("file", "A", "F") == "F"


def test_ends_come_from_the_first_file_that_has_them(tmp_path: Path) -> None:
    def ends(folder: str, **files: Any) -> list[int]:
        files = {"tokenizer_config": {}, **files}
        return TextModel.open(
            write_folder(tmp_path / folder, trained("byte-level"), **files)
        ).tokenizer.eos_ids

    assert ends("both") == [1, 2]
    assert ends("config", generation_config=None) == [1]
    assert ends("named", generation_config=None, config={}, tokenizer_config={"eos_token": "</s>"}) == [1]


def test_a_metaspace_decoder_drops_the_first_space(tmp_path: Path) -> None:
    tokenizer = trained("space first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    ours = TextModel.open(write_folder(tmp_path / "m", tokenizer)).tokenizer
    ids = ours.encode("Hello world", special=False)
    assert decode(ours, ids) == tokenizer.decode(ids) == "Hello world"


def test_words_that_are_special_tokens_stay_plain(tmp_path: Path) -> None:
    """A vocabulary that takes whole words, one of which is special."""
    tokenizer = RustTokenizer(BPE({"!": 0, "!!": 1}, [], ignore_merges=True))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("!!", special=True, normalized=False)])
    ours = TextModel.open(write_folder(tmp_path / "m", tokenizer, generation_config=None)).tokenizer
    assert ours.encode("!!", special=False) == [0, 0]
    assert ours.encode("!!", special=True) == [1]


def test_bad_folders_are_one_clear_error(tmp_path: Path) -> None:
    def fails(words: str, error: type[Exception] = ModelFileError, **files: Any) -> None:
        path = write_folder(tmp_path / "bad", trained("byte-level"), **files)
        with pytest.raises(error, match=words):
            TextModel.open(path)

    fails("eos_token_id is 99999", generation_config={"eos_token_id": 99_999})
    fails("neither a whole number nor a list", generation_config={"eos_token_id": ["a"]})
    fails("context length", config={"max_position_embeddings": "big"})
    fails("chat_template is not a text", tokenizer_config={"chat_template": 7})
    fails("Expected `object`", config=[])

    path = write_folder(tmp_path / "cut", trained("byte-level"))
    whole = (path.path / "tokenizer.json").read_text()
    (path.path / "tokenizer.json").write_text(whole[: len(whole) // 2])
    with pytest.raises(ModelFileError, match="not a tokenizer"):
        TextModel.open(path)
    (path.path / "tokenizer.json").unlink()
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: missing"):
        TextModel.open(path)

    words = RustTokenizer(WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a"))
    words.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModel, match="WordPiece"):
        TextModel.open(write_folder(tmp_path / "wordpiece", words))
