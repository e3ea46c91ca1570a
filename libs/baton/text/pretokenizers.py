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
# Most cased letters, as the model lists them; in code points, as some change when a text is normalised.
_DEEPSEEK_LETTERS = (
    "\\s?["
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5"
    "\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba"
    "\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45"
    "\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe"
    "\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102"
    "\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
    "]+"
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
