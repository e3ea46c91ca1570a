"""How each `tokenizer.ggml.pre` cuts text into words before BPE: the table behind byte-level GGUF files.

A GGUF file names its rule and does not carry it. The rules are facts of the models' own `tokenizer.json`
where that was at hand (normalisation included, which llama.cpp leaves out), else what `src/llama-vocab.cpp`
of ggml-org/llama.cpp applies for the name. A name that is not here is refused: a near miss would give wrong
ids in silence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from baton.models.errors import UnsupportedModel

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_AHEAD = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = (
    rf"{_AHEAD}{_UPPER}*{_LOWER}+|{_AHEAD}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_GPT4O = (
    rf"{_AHEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_AHEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
_SEED_CODER = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}"
    rf"| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_EXAONE_MOE = (
    rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
_CJK_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_CJK_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LETTERS = (
    "\\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼι"
    "ῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)

Steps = Callable[[], list[PreTokenizer]]


@dataclass(frozen=True, slots=True)
class Rule:
    """`steps` cut one after the other, each what the one before left; one of them spells bytes."""

    steps: Steps
    nfc: bool = False  # normalised to NFC first
    ignore_merges: bool = False  # a word that is a token is taken whole, whatever the merges say
    add_bos: bool = False  # unless the file says otherwise

    def normalizer(self) -> Normalizer | None:
        return normalizers.NFC() if self.nfc else None

    def pre_tokenizer(self) -> PreTokenizer:
        return pre_tokenizers.Sequence(self.steps())


def _bytes(*, words: bool) -> PreTokenizer:
    """Spells bytes in the printable alphabet; with `words` after cutting as GPT-2 does."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)


def _split(pattern: str) -> PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _splits(*patterns: str) -> Steps:
    return lambda: [*map(_split, patterns), _bytes(words=False)]


def _gpt2() -> list[PreTokenizer]:
    return [_bytes(words=True)]


def _digits() -> list[PreTokenizer]:
    return [pre_tokenizers.Digits(individual_digits=True), _bytes(words=True)]


def _deepseek(*patterns: str) -> Steps:
    return lambda: [
        *map(_split, patterns),
        pre_tokenizers.Digits(individual_digits=True),
        _bytes(words=False),
    ]


def _falcon() -> list[PreTokenizer]:
    return [
        pre_tokenizers.Punctuation("contiguous"),
        _bytes(words=True),
        pre_tokenizers.Digits(individual_digits=False),
        _split("[0-9][0-9][0-9]"),
    ]


def _default() -> list[PreTokenizer]:
    """llama.cpp's own rule, for files that name none."""
    return [
        _split(r"[\p{P}$+<=>^~|]+"),
        _split(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
        _split(r"\p{N}+"),
        _split("[0-9][0-9][0-9]"),
        _bytes(words=False),
    ]


# "own" marks rules read from a model's own tokenizer; the others are llama.cpp's.
_RULES: tuple[tuple[Rule, str], ...] = (
    (Rule(_default), "default"),
    (Rule(_gpt2), "gpt-2 phi-2 mellum gigachat a.x-4.0 exaone4 jais trillion granite-docling"),  # own: gpt-2
    (Rule(_gpt2, nfc=True), "olmo mpt"),  # own: both are GPT-NeoX's
    (Rule(_digits), "smollm starcoder refact codeshell exaone minerva-7b mellum2"),  # own: smollm, refact
    (Rule(_digits, nfc=True), "command-r"),  # own
    (Rule(_falcon), "falcon"),  # own
    (
        Rule(_splits(_LLAMA3), ignore_merges=True, add_bos=True),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",  # own: llama-bpe
    ),
    (Rule(_splits(_LLAMA3)), "dbrx smaug-bpe glm4 chatglm-bpe"),
    (Rule(_splits(_QWEN2), nfc=True), "qwen2"),  # own
    (Rule(_splits(_QWEN2)), "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2"),
    (Rule(_splits(_QWEN35), nfc=True), "qwen35"),  # own
    (Rule(_splits(_TEKKEN), ignore_merges=True, add_bos=True), "tekken"),
    (Rule(_splits(_GPT4O)), "gpt-4o llama4 kanana2 talkie minimax-m2"),  # own: gpt-4o
    (Rule(_splits(r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)), "tiny_aya cohere2moe"),
    (
        Rule(
            _deepseek(
                "[\r\n]", _DEEPSEEK_LETTERS, "\\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", "\\s+$", _CJK_HANGUL
            )
        ),
        "deepseek-llm",  # own
    ),
    (Rule(_deepseek("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_HANGUL)), "deepseek-coder"),  # own
    (
        Rule(_splits(r"\p{N}{1,3}", _CJK_KANA, _DEEPSEEK_V3)),
        "deepseek-v3 hunyuan-dense hy_v4 joyai-llm",  # own: deepseek-v3
    ),
    (Rule(_splits(_SEED_CODER)), "seed-coder"),
    (Rule(_splits(_BAILING)), "bailingmoe bailingmoe2 llada-moe"),
    (Rule(_splits(_EXAONE_MOE)), "exaone-moe"),
    (Rule(_splits(_BLOOM)), "bloom poro-chat gpt3-finnish"),
    (
        Rule(lambda: [_split(_BLOOM), pre_tokenizers.Digits(individual_digits=True), _bytes(words=False)]),
        "viking",
    ),
)

RULES: dict[str, Rule] = {name: rule for rule, names in _RULES for name in names.split()}


def rule_for(name: str) -> Rule:
    """The rule a GGUF file names.

    Raises:
        UnsupportedModel: there is none of that name here.
    """
    rule = RULES.get(name)
    if rule is None:
        raise UnsupportedModel(
            f"the pre-tokenizer {name[:64]!r} (tokenizer.ggml.pre) is not known; "
            f"known are {', '.join(sorted(RULES))}"
        )
    return rule
