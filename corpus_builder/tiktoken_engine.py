"""tiktoken's engine with a model's own vocabulary, read from its `tokenizer.json`. Pure; tiktoken is optional.

Whether its ids are the tokenizer's is for others to prove (fast_tokens.py).
"""

from __future__ import annotations

import gc
import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from corpus_builder.text_ids import TextIds, flatten
from corpus_builder.token_bytes import byte_alphabet, spelled_bytes

if TYPE_CHECKING:
    import tiktoken

_LOOKS_AROUND = re.compile(r"\(\?(?:[=!]|<[=!])")
#: Source: GPT-2's encoder.py; what a ByteLevel pre-tokenizer with `use_regex` splits by.
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
#: Between texts that are encoded in one call: a special token of the engine, so that each is read by itself. Its
#: first character stands nowhere else in it, so no end of a text can become a part of it; its last one takes no accent.
_BETWEEN = "\x01<|between texts|>\x00"


@dataclass(frozen=True, slots=True)
class Engine:
    """tiktoken with one model's vocabulary.

    Attributes:
        encoding: tiktoken's own.
        is_nfc: The model's tokenizer puts a text into normal form C first.
        between: Id of the token between texts.
        lengths: Bytes of each id.
    """

    encoding: tiktoken.Encoding
    is_nfc: bool
    between: int
    lengths: NDArray[np.int64]

    def encode(self, text: str) -> list[int]:
        """Return the ids of one text; `encode_ordinary` would panic where this raises ValueError."""
        return self.encoding.encode(self._normalized(text), disallowed_special=())

    def encode_texts(self, texts: list[str]) -> TextIds:
        """Return the ids of each text, all in one call: into a buffer, without a Python number per token."""
        whole = self._normalized(_BETWEEN.join(texts))
        found = self.encoding.encode_to_numpy(whole, allowed_special={_BETWEEN}, disallowed_special=())
        is_border = found == self.between
        borders = np.flatnonzero(is_border)
        if len(borders) != len(texts) - 1:  # a text that holds the border itself, or no text at all
            return flatten([self.encode(text) for text in texts])
        lengths = np.diff(borders, prepend=-1, append=len(found)) - 1
        return TextIds(found[~is_border].view(np.int32), lengths)

    def ends(self, text: str, ids: Sequence[int]) -> list[int]:
        """As `Frame.token_ends` from the ids of `text`, off by what the normalization has changed."""
        byte_ends = np.cumsum(self.lengths[np.asarray(ids, dtype=np.int64)])
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        widths = 1 + (codes > 0x7F).astype(np.int64) + (codes > 0x7FF) + (codes > 0xFFFF)
        ends = np.searchsorted(np.cumsum(widths), byte_ends, side="left") + 1
        found: list[int] = np.minimum(ends, len(text)).tolist()
        return found

    def _normalized(self, text: str) -> str:
        return unicodedata.normalize("NFC", text) if self.is_nfc and not text.isascii() else text


def load_engine(tokenizer_json: str) -> Engine | None:
    """Return the engine for a tokenizer; None where it is of another kind, or without tiktoken."""
    try:
        import tiktoken
    except ImportError:
        return None
    with _no_collections():
        packed = json.loads(tokenizer_json)
        pattern = _pattern_of(packed.get("pre_tokenizer"))
        ranks = _ranks_of(packed["model"])
    normalizer = (packed.get("normalizer") or {}).get("type")
    if pattern is None or ranks is None or normalizer not in (None, "NFC"):
        return None
    between = max(ranks.values()) + 1
    lengths = np.zeros(between, dtype=np.int64)
    numbers = np.fromiter(ranks.values(), dtype=np.int64, count=len(ranks))
    lengths[numbers] = np.fromiter(map(len, ranks), dtype=np.int64, count=len(ranks))
    encoding = tiktoken.Encoding(
        "model", pat_str=group_plain_alternatives(pattern), mergeable_ranks=ranks, special_tokens={_BETWEEN: between}
    )
    return Engine(encoding, normalizer == "NFC", between, lengths)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Keep the garbage collector away from 300,000 new objects of which none is garbage: half the time of reading."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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


def group_plain_alternatives(pattern: str) -> str:
    """Return an equal pattern whose neighbouring plain alternatives are one group.

    tiktoken's regular expressions go step by step where an alternative looks around; what is in a group without such
    is matched at once, a third faster.

    >>> group_plain_alternatives(r"[a|b]+|\\d|\\s+(?!\\S)|\\s+")
    '(?:[a|b]+|\\d)|\\s+(?!\\S)|\\s+'
    """
    groups = groupby(_alternatives(pattern), key=lambda one: _LOOKS_AROUND.search(one) is not None)
    joined = [(looks, "|".join(ones)) for looks, ones in groups]
    return "|".join(text if looks else f"(?:{text})" for looks, text in joined)


def _alternatives(pattern: str) -> list[str]:
    """Return what stands between the outermost bars of a regular expression."""
    found, depth, is_set = [""], 0, False
    for piece in re.findall(r"\\.|[^\\]", pattern, re.DOTALL):
        is_set = piece == "[" or (is_set and piece != "]")
        depth += 0 if is_set else (piece == "(") - (piece == ")")
        if piece == "|" and not depth and not is_set:
            found.append("")
        else:
            found[-1] += piece
    return found


def _ranks_of(model: Any) -> dict[bytes, int] | None:
    """Return the id of each byte and of what each merge makes; None if the ids are not in the merges' order."""
    if model.get("type") != "BPE" or any(
        model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    ):
        return None
    vocab: dict[str, int] = model["vocab"]
    merged = ["".join(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
    ids = np.fromiter(map(vocab.__getitem__, merged), dtype=np.int64, count=len(merged))
    alphabet = byte_alphabet()
    if (np.diff(ids) <= 0).any() or not alphabet.keys() <= vocab.keys():
        return None
    tokens = [*alphabet, *merged]
    spelled = spelled_bytes("".join(tokens))
    if (spelled < 0).any():
        return None
    whole = spelled.astype(np.uint8).tobytes()
    ends = accumulate(map(len, tokens), initial=0)
    numbers = [*(vocab[token] for token in alphabet), *ids.tolist()]
    return {whole[start:end]: number for (start, end), number in zip(pairwise(ends), numbers, strict=True)}
