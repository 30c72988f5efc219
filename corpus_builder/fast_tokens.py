"""A byte-level tokenizer in tiktoken's engine: the same ids, some four times as fast, wherever that is proved.

The engine is built from the model's own `tokenizer.json`. It is used only if it agrees with the tokenizer itself on a
sample of the very texts that are asked for and on a list of edge cases, and then only for texts whose every
character has agreed: how a text is cut into words depends on the class of each character, and two libraries may know
different versions of Unicode. All other texts go to the tokenizer itself. Side effects: none; tiktoken is optional.
"""

from __future__ import annotations

import json
import re
import unicodedata
from array import array
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

    def __init__(self, frame: Frame, *, worth_it: int = WORTH_IT) -> None:
        self._frame = frame
        self._worth_it = worth_it
        self._engine: _Engine | None = None
        self._asked = 0
        self._is_decided = False
        self._proved: set[str] = set()
        self._doubtful: set[str] = set()
        self._unproved, self._in_pattern = _other_than(""), 0
        self._kept: dict[str, list[int]] = {}

    @property
    def is_fast(self) -> bool:
        """Whether the engine is used."""
        return self._engine is not None

    def count_texts(self, texts: Sequence[str], *, keep_from: int | None = None) -> list[int]:
        """Return how many ids each text has; texts of `keep_from` characters on may be asked for their `ends` next."""
        self._asked += sum(map(len, texts))
        if not self._is_decided and self._asked > self._worth_it:
            self._is_decided = True
            self._engine = self._checked_engine(texts)
        if self._engine is None:
            return self._frame.count_texts(texts)
        self._prove("".join(texts))
        found = [None if self._is_doubtful(text) else self._engine.encode(text) for text in texts]
        if keep_from is not None:
            pairs = zip(texts, found, strict=True)
            self._kept = {text: ids for text, ids in pairs if ids is not None and len(text) >= keep_from}
        doubtful = [text for text, ids in zip(texts, found, strict=True) if ids is None]
        by_frame = iter(self._frame.count_texts(doubtful))
        return [next(by_frame) if ids is None else len(ids) for ids in found]

    def ends(self, text: str) -> Sequence[int]:
        """Return where about each token of `text` ends, in characters, ascending."""
        if self._engine is None or self._is_doubtful(text):
            return self._frame.token_ends(text)
        ids = self._kept.get(text)
        return self._engine.ends(text, self._engine.encode(text) if ids is None else ids)

    def _is_doubtful(self, text: str) -> bool:
        return bool(self._doubtful) and not self._doubtful.isdisjoint(text)

    def _checked_engine(self, texts: Sequence[str]) -> _Engine | None:
        engine = load_engine(self._frame.tokenizer_json)
        step = max(1, len(texts) // _SAMPLE)
        return engine if engine is not None and not self._differing(engine, [*_EDGES, *texts[::step]]) else None

    def _prove(self, text: str) -> None:
        """Try every character not met before beside letters, digits, spaces, line ends and itself."""
        assert self._engine is not None
        new = sorted(set(self._unproved.findall(text)) - self._proved)
        probes = [f"a{one}b {one} {one}{one}1{one}1 {one}\n{one}\n\n{one}é{one}灯{one}.{one}" for one in new]
        differing = set(self._differing(self._engine, probes))
        self._doubtful |= {one for at, one in enumerate(new) if at in differing}
        self._proved |= set(new)
        if len(self._proved) > 1.2 * self._in_pattern:
            self._in_pattern = len(self._proved)
            self._unproved = _other_than(self._proved)

    def _differing(self, engine: _Engine, texts: Sequence[str]) -> list[int]:
        """Return the positions of the texts that the engine encodes in another way."""
        right = self._frame.encode_texts(texts)
        return [at for at, (text, ids) in enumerate(zip(texts, right, strict=True)) if engine.encode(text) != ids]


@dataclass(frozen=True, slots=True)
class _Engine:
    """tiktoken with one model's vocabulary."""

    encoding: tiktoken.Encoding
    is_nfc: bool
    lengths: array[int]  # bytes of each id

    def encode(self, text: str) -> list[int]:
        if self.is_nfc and not text.isascii():
            text = unicodedata.normalize("NFC", text)
        return self.encoding.encode_ordinary(text)

    def ends(self, text: str, ids: Sequence[int]) -> list[int]:
        """As `Frame.token_ends` from the ids of `text`, off by what the normalization has changed."""
        import numpy as np

        byte_ends = np.cumsum(np.asarray(self.lengths)[np.asarray(ids, dtype=np.int64)])
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        widths = 1 + (codes > 0x7F).astype(np.int64) + (codes > 0x7FF) + (codes > 0xFFFF)
        ends = np.searchsorted(np.cumsum(widths), byte_ends, side="left") + 1
        found: list[int] = np.minimum(ends, len(text)).tolist()
        return found


def _other_than(known: Iterable[str]) -> re.Pattern[str]:
    """Return what finds the characters that are not known, and pictures: Python is slow at classes that hold those."""
    inside = "".join(re.escape(one) for one in sorted(known) if one <= "\uffff")
    return re.compile(f"[^{inside}]" if inside else r"[\s\S]")


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
    lengths = array("q", [0]) * (max(ranks.values()) + 1)
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
