"""A byte-level tokenizer in tiktoken's engine: the same ids, some four times as fast, wherever that is proved.

The engine is built from the model's own `tokenizer.json`. It is used only if it agrees with the tokenizer itself on a
sample of the very texts that are asked for and on a list of edge cases, and then only for texts whose every
character has agreed: how a text is cut into words depends on the class of each character, and two libraries may know
different versions of Unicode. All other texts go to the tokenizer itself. Side effects: none; tiktoken is optional.
"""

from __future__ import annotations

import gc
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate, chain, groupby, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from corpus_builder.frame import Frame
from corpus_builder.token_bytes import byte_alphabet, spelled_bytes
from corpus_builder.token_counts import WORTH_IT

if TYPE_CHECKING:
    import tiktoken

TOKENIZERS, TIKTOKEN = "tokenizers", "tiktoken"
_SAMPLE, _SAMPLE_CHARACTERS = 400, 1_000  # texts that are drawn, and how far into each
#: Characters that are encoded in one call.
_CHUNK = 1 << 18
_ASCII, _CODE_POINTS = 0x80, 0x110000
_LOOKS_AROUND = re.compile(r"\(\?(?:[=!]|<[=!])")
#: Source: GPT-2's encoder.py; what a ByteLevel pre-tokenizer with `use_regex` splits by.
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
#: Between texts that are encoded in one call: a special token of the engine, so that each is read by itself. Its
#: first character stands nowhere else in it, so no end of a text can become a part of it; its last one takes no accent.
_BETWEEN = "\x01<|between texts|>\x00"
_EDGES = (
    "", "\n", "\n\na", " ", "  a", "a  ", "a\n \n b", "\t\ta", "\r\n", "<|im_end|>", "<|im_start|>user\n", "it's I'LL",
    "①②③ Ⅷ ½", "e\u0301 \u1e9b\u0323", "12345 1,234.5", "灯塔。\n\n## 二", "¿qué?", "a\u2028b\u00a0c", "🧑\u200d💻🌊",
    "def f(x):\n    return x\n", "    " * 9, "!!!??", "\ufeffa", "\x00\x7f", "ﬁ ǆ İ ß", "안녕 하세요", "نور", "प्रकाश",
    "\u0301a", "'ſ 'K I'D",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class TextIds:
    """The ids of N texts, T in all: `ids` (T,) text after text; `lengths` (N,), ids of each."""

    ids: NDArray[np.int32]
    lengths: NDArray[np.int64]


def _flat(lists: Sequence[Sequence[int]]) -> TextIds:
    lengths = np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))
    return TextIds(np.fromiter(chain.from_iterable(lists), dtype=np.int32, count=int(lengths.sum())), lengths)


def _joined(parts: Sequence[TextIds]) -> TextIds:
    """Return the texts of all parts, in order."""
    return TextIds(
        np.concatenate([np.empty(0, dtype=np.int32), *(part.ids for part in parts)]),
        np.concatenate([np.empty(0, dtype=np.int64), *(part.lengths for part in parts)]),
    )


class FastTokens:
    """Encodes texts as a frame does; remembers which characters are proved.

    Args:
        worth_it: Characters after which the engine is tried.
        threads: Threads that encode in `encode_texts`; both engines let others run meanwhile. The tokenizer's own
            (TOKENIZERS_PARALLELISM) are not needed.
    """

    def __init__(self, frame: Frame, *, worth_it: int = WORTH_IT, threads: int = 1) -> None:
        self._frame = frame
        self._worth_it, self.threads = worth_it, threads
        self._engine: _Engine | None = None
        self._asked = 0
        self._is_proved: NDArray[np.bool_] = np.zeros(_CODE_POINTS, dtype=np.bool_)
        self._doubtful: set[str] = set()
        self._kept: dict[str, list[int]] = {}
        #: Why the engine is used or not, in one word.
        self.reason = "little_text"

    @property
    def is_fast(self) -> bool:
        """Whether the engine is used."""
        return self._engine is not None

    @property
    def engine(self) -> str:
        """What encodes: `tokenizers` or `tiktoken`."""
        return TIKTOKEN if self.is_fast else TOKENIZERS

    def count_texts(self, texts: Sequence[str], *, keep_from: int | None = None) -> list[int]:
        """Return how many ids each text has; texts of `keep_from` characters on may be asked for their `ends` next."""
        self._decide(texts)
        if self._engine is None:
            return self._frame.count_texts(texts)
        self._prove(texts)
        found = [self._ids_by_engine(text) for text in texts]
        if keep_from is not None:
            pairs = zip(texts, found, strict=True)
            self._kept = {text: ids for text, ids in pairs if ids is not None and len(text) >= keep_from}
        doubtful = [text for text, ids in zip(texts, found, strict=True) if ids is None]
        by_frame = iter(self._frame.count_texts(doubtful))
        return [next(by_frame) if ids is None else len(ids) for ids in found]

    def encode_texts(self, texts: Sequence[str]) -> TextIds:
        """Return the ids of each text: those of the frame, whatever the engine."""
        was_fast = self.is_fast
        self._decide(texts)
        if was_fast:
            self._check(texts)
        if self._engine is None:
            # Also with one thread: outside the first one, memory is handed out faster, by a tenth of the whole.
            return _joined(list(self._in_threads(self._by_frame, texts)))
        for chunk in _chunks(texts):
            self._prove(chunk)
        if self.threads == 1:
            return _joined([self._by_engine(chunk) for chunk in _chunks(texts)])
        return _joined(list(self._in_threads(self._by_engine, texts)))

    def ends(self, text: str) -> Sequence[int]:
        """Return where about each token of `text` ends, in characters, ascending."""
        if self._engine is None:
            return self._frame.token_ends(text)
        ids = self._kept.get(text) or self._ids_by_engine(text)
        return self._frame.token_ends(text) if ids is None else self._engine.ends(text, ids)

    def _in_threads(self, encode: Callable[[list[str]], TextIds], texts: Sequence[str]) -> Iterator[TextIds]:
        with ThreadPoolExecutor(self.threads) as pool:
            yield from pool.map(encode, _chunks(texts))

    def _by_frame(self, texts: list[str]) -> TextIds:
        return _flat(self._frame.encode_texts(texts))

    def _by_engine(self, texts: list[str]) -> TextIds:
        assert self._engine is not None
        if not (self._doubtful and any(map(self._is_doubtful, texts))):
            try:
                return self._engine.encode_texts(texts)
            except ValueError:
                pass  # as below: one of them is too much
        found = [self._ids_by_engine(text) for text in texts]
        by_frame = iter(self._frame.encode_texts([text for text, ids in zip(texts, found, strict=True) if ids is None]))
        return _flat([next(by_frame) if ids is None else ids for ids in found])

    def _ids_by_engine(self, text: str) -> list[int] | None:
        """Return the ids of a text, None where the engine is not proved for it or gives it up.

        It gives up a million spaces in a row: its regular expressions have a stack of their own.
        """
        assert self._engine is not None
        try:
            return None if self._is_doubtful(text) else self._engine.encode(text)
        except ValueError:
            return None

    def _is_doubtful(self, text: str) -> bool:
        return bool(self._doubtful) and not self._doubtful.isdisjoint(text)

    def _decide(self, texts: Sequence[str]) -> None:
        """Try the engine once enough was asked for; from then on the answer stays."""
        self._asked += sum(map(len, texts))
        if self.reason != "little_text" or self._asked <= self._worth_it:
            return
        self._engine, self.reason = load_engine(self._frame.tokenizer_json), "ids_equal"
        if self._engine is None:
            self.reason = "tokenizer_of_another_kind" if find_spec("tiktoken") else "no_tiktoken"
        self._check([*_EDGES, *texts])

    def _check(self, texts: Sequence[str]) -> None:
        """Give the engine up if it differs on a sample of `texts`."""
        drawn = [*texts[: len(_EDGES)], *texts[:: max(1, len(texts) // _SAMPLE)]]
        if self._engine is not None and self._differing(self._engine, [text[:_SAMPLE_CHARACTERS] for text in drawn]):
            self._engine, self.reason = None, "ids_differ"

    def _prove(self, texts: Sequence[str]) -> None:
        """Try every character not met before beside letters, digits, spaces, line ends and itself."""
        assert self._engine is not None
        is_met = np.zeros(_CODE_POINTS, dtype=np.bool_)
        is_met[:_ASCII] = True
        others = "".join([text for text in texts if not text.isascii()])
        is_met[np.frombuffer(others.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)] = True
        codes = np.flatnonzero(is_met & ~self._is_proved)
        new = [chr(code) for code in codes.tolist()]
        probes = [f"a{one}1{one} {one}.\n{one}{one}'{one}" for one in new]
        self._doubtful |= {new[at] for at in self._differing(self._engine, probes)}
        self._is_proved[codes] = True

    def _differing(self, engine: _Engine, texts: Sequence[str]) -> list[int]:
        """Return the positions of the texts that the engine encodes in another way."""
        right, found = self._by_frame(list(texts)), engine.encode_texts(list(texts))
        if np.array_equal(right.lengths, found.lengths) and np.array_equal(right.ids, found.ids):
            return []
        parts = zip(_split(right), _split(found), strict=True)
        return [at for at, (ids, other) in enumerate(parts) if not np.array_equal(ids, other)]


def _split(texts: TextIds) -> list[NDArray[np.int32]]:
    """Return the ids of each text."""
    ends = np.cumsum(texts.lengths).tolist()
    return [texts.ids[start:end] for start, end in pairwise([0, *ends])]


def _chunks(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield the texts, in order, some _CHUNK characters at a time."""
    ends = accumulate(map(len, texts))
    chunk: list[str] = []
    limit = _CHUNK
    for text, end in zip(texts, ends, strict=True):
        chunk.append(text)
        if end >= limit:
            yield chunk
            chunk, limit = [], end + _CHUNK
    if chunk:
        yield chunk


@dataclass(frozen=True, slots=True)
class _Engine:
    """tiktoken with one model's vocabulary.

    Attributes:
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
            return _flat([self.encode(text) for text in texts])
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


def load_engine(tokenizer_json: str) -> _Engine | None:
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
    return _Engine(encoding, normalizer == "NFC", between, lengths)


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
