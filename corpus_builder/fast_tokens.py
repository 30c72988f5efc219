"""A byte-level tokenizer in tiktoken's engine: the same ids, some four times as fast, wherever that is proved.

The engine is built from the model's own `tokenizer.json`. It is used only if it agrees with the tokenizer itself on a
sample of the very texts that are asked for and on a list of edge cases, and then only for texts whose every
character has agreed: how a text is cut into words depends on the class of each character, and two libraries may know
different versions of Unicode. All other texts go to the tokenizer itself. Side effects: none; tiktoken is optional.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from corpus_builder.frame import Frame

if TYPE_CHECKING:
    import tiktoken

#: Characters after which the engine is built: below, building it (0.5 s) takes longer than it saves.
WORTH_IT = 1_000_000
_SAMPLE = 400
#: Source: GPT-2's encoder.py; what a ByteLevel pre-tokenizer with `use_regex` splits by.
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_EDGES = (
    "", "\n", "\n\na", " ", "  a", "a  ", "a\n \n b", "\t\ta", "\r\n", "<|im_end|>", "<|im_start|>user\n", "it's I'LL",
    "①②③ Ⅷ ½", "e\u0301 \u1e9b\u0323", "12345 1,234.5", "灯塔。\n\n## 二", "¿qué?", "a\u2028b\u00a0c", "🧑\u200d💻🌊",
    "def f(x):\n    return x\n", "    " * 9, "!!!??", "\ufeffa", "\x00\x7f", "ﬁ ǆ İ ß", "안녕 하세요", "نور", "प्रकाश",
)  # fmt: skip


class FastTokens:
    """Encodes texts as a frame does; remembers which characters are proved."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._engine: _Engine | None = None
        self._asked = 0
        self._is_decided = False
        self._proved: set[str] = set()
        self._doubtful: set[str] = set()

    def count_texts(self, texts: Sequence[str]) -> list[int]:
        """Return how many ids each text has."""
        self._asked += sum(map(len, texts))
        if not self._is_decided and self._asked > WORTH_IT:
            self._is_decided = True
            self._engine = self._checked_engine(texts)
        if self._engine is None:
            return self._frame.count_texts(texts)
        self._prove("".join(texts))
        counts = [-1 if self._is_doubtful(text) else len(self._engine.encode(text)) for text in texts]
        doubtful = [text for text, count in zip(texts, counts, strict=True) if count < 0]
        by_frame = iter(self._frame.count_texts(doubtful))
        return [next(by_frame) if count < 0 else count for count in counts]

    def ends(self, text: str) -> Sequence[int]:
        """Return where about each token of `text` ends, in characters, ascending."""
        if self._engine is None or self._is_doubtful(text):
            return self._frame.token_ends(text)
        return self._engine.ends(text)

    def _is_doubtful(self, text: str) -> bool:
        return bool(self._doubtful) and not self._doubtful.isdisjoint(text)

    def _checked_engine(self, texts: Sequence[str]) -> _Engine | None:
        engine = load_engine(self._frame.tokenizer_json)
        step = max(1, len(texts) // _SAMPLE)
        return engine if engine is not None and not self._differing(engine, [*_EDGES, *texts[::step]]) else None

    def _prove(self, text: str) -> None:
        """Try every character not met before beside letters, digits, spaces, line ends and itself."""
        assert self._engine is not None
        new = sorted(set(text) - self._proved)
        probes = [f"a{one}b {one} {one}{one}1{one}1 {one}\n{one}\n\n{one}é{one}灯{one}.{one}" for one in new]
        differing = set(self._differing(self._engine, probes))
        self._doubtful |= {one for at, one in enumerate(new) if at in differing}
        self._proved |= set(new)

    def _differing(self, engine: _Engine, texts: Sequence[str]) -> list[int]:
        """Return the positions of the texts that the engine encodes in another way."""
        right = self._frame.encode_texts(texts)
        return [at for at, (text, ids) in enumerate(zip(texts, right, strict=True)) if engine.encode(text) != ids]


@dataclass(frozen=True, slots=True)
class _Engine:
    """tiktoken with one model's vocabulary."""

    encoding: tiktoken.Encoding
    is_nfc: bool
    lengths: Sequence[int]  # bytes of each id

    def encode(self, text: str) -> list[int]:
        if self.is_nfc and not text.isascii():
            text = unicodedata.normalize("NFC", text)
        return self.encoding.encode_ordinary(text)

    def ends(self, text: str) -> list[int]:
        """As `Frame.token_ends`, off by what the normalization has changed."""
        import numpy as np

        byte_ends = np.cumsum(np.take(self.lengths, self.encode(text)))
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        widths = 1 + (codes > 0x7F).astype(np.int64) + (codes > 0x7FF) + (codes > 0xFFFF)
        ends = np.searchsorted(np.cumsum(widths), byte_ends, side="left") + 1
        return [int(end) for end in np.minimum(ends, len(text))]


def load_engine(tokenizer_json: str) -> _Engine | None:
    """Return the engine for a tokenizer; None where it is of another kind, or without tiktoken."""
    try:
        import tiktoken
    except ImportError:
        return None
    packed = json.loads(tokenizer_json)
    pattern = _pattern_of(packed.get("pre_tokenizer"))
    ranks = _ranks_of(packed["model"])
    normalizer = (packed.get("normalizer") or {}).get("type")
    if pattern is None or ranks is None or normalizer not in (None, "NFC"):
        return None
    lengths = [0] * (max(ranks.values()) + 1)
    for token, rank in ranks.items():
        lengths[rank] = len(token)
    encoding = tiktoken.Encoding("model", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return _Engine(encoding, normalizer == "NFC", lengths)


def _pattern_of(packed: Any) -> str | None:
    """Return the regular expression by which a pre-tokenizer splits a text into words, byte by byte inside."""
    steps = packed.get("pretokenizers") if packed and packed.get("type") == "Sequence" else [packed]
    kinds = [step.get("type") for step in steps or () if step]
    last = steps[-1] if kinds and kinds[-1] == "ByteLevel" else None
    if last is None or last.get("add_prefix_space"):
        return None
    if kinds == ["ByteLevel"] and last.get("use_regex", True):
        return _GPT2_PATTERN
    if kinds != ["Split", "ByteLevel"] or last.get("use_regex", True):
        return None
    split = steps[0]
    is_plain = split.get("behavior") == "Isolated" and not split.get("invert")
    pattern: str | None = split["pattern"].get("Regex")
    return pattern if is_plain else None


def _ranks_of(model: Any) -> dict[bytes, int] | None:
    """Return the id of each byte and of what each merge makes; None if the ids are not in the merges' order."""
    if model.get("type") != "BPE" or any(
        model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    ):
        return None
    vocab: dict[str, int] = model["vocab"]
    merged = ["".join(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
    ids = [vocab[token] for token in merged]
    alphabet = byte_alphabet()
    if ids != sorted(set(ids)) or not alphabet.keys() <= vocab.keys():
        return None
    table = {ord(spelled): chr(byte) for spelled, byte in alphabet.items()}
    tokens: Iterable[str] = (*alphabet, *merged)
    return {token.translate(table).encode("latin-1"): vocab[token] for token in tokens}


def byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Source: GPT-2's encoder.py, bytes_to_unicode.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}
