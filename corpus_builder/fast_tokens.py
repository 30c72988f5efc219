"""A byte-level tokenizer in tiktoken's engine: the same ids, some four times as fast, wherever that is proved.

The engine is built from the model's own `tokenizer.json`. It is used only if it agrees with the tokenizer itself on a
sample of the very texts that are asked for and on a list of edge cases, and then only for texts whose every
character has agreed: how a text is cut into words depends on the class of each character, and two libraries may know
different versions of Unicode. All other texts go to the tokenizer itself. tiktoken is optional. Side effects: threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from corpus_builder.frame import WORTH_IT, Frame
from corpus_builder.text_ids import TextIds, flatten, join, split
from corpus_builder.tiktoken_engine import Engine, load_engine

TOKENIZERS, TIKTOKEN = "tokenizers", "tiktoken"
_SAMPLE, _SAMPLE_CHARACTERS = 400, 1_000  # texts that are drawn, and how far into each
#: Characters that are encoded in one call. The tokenizer makes objects of all of a call, which should fit the caches:
#: from here to eight times as many cost a tenth. The engine makes one array, and asks once more for each call.
_CHUNK, _CHUNK_OF_ENGINE = 1 << 15, 1 << 18
_ASCII, _CODE_POINTS = 0x80, 0x110000
_EDGES = (
    "", "\n", "\n\na", " ", "  a", "a  ", "a\n \n b", "\t\ta", "\r\n", "<|im_end|>", "<|im_start|>user\n", "it's I'LL",
    "①②③ Ⅷ ½", "e\u0301 \u1e9b\u0323", "12345 1,234.5", "灯塔。\n\n## 二", "¿qué?", "a\u2028b\u00a0c", "🧑\u200d💻🌊",
    "def f(x):\n    return x\n", "    " * 9, "!!!??", "\ufeffa", "\x00\x7f", "ﬁ ǆ İ ß", "안녕 하세요", "نور", "प्रकाश",
    "\u0301a", "'ſ 'K I'D",
)  # fmt: skip


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
        self._engine: Engine | None = None
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

    def encode_texts(self, texts: Sequence[str], *, lead: TextIds | None = None) -> TextIds:
        """Return the ids of each text, after those of `lead`: those of the frame, whatever the engine."""
        parts = self._encode(texts)
        return join(parts if lead is None else [lead, *parts])

    def _encode(self, texts: Sequence[str]) -> list[TextIds]:
        was_fast = self.is_fast
        self._decide(texts)
        if was_fast:
            self._check(texts)
        if self._engine is None:
            # Also with one thread: outside the first one, memory is handed out faster, by a tenth of the whole.
            return list(self._in_threads(self._by_frame, _chunks(texts, _CHUNK)))
        chunks = list(_chunks(texts, _CHUNK_OF_ENGINE))
        for chunk in chunks:
            self._prove(chunk)
        if self.threads == 1:
            return [self._by_engine(chunk) for chunk in chunks]
        return list(self._in_threads(self._by_engine, chunks))

    def ends(self, text: str) -> Sequence[int]:
        """Return where about each token of `text` ends, in characters, ascending."""
        if self._engine is None:
            return self._frame.token_ends(text)
        ids = self._kept.get(text) or self._ids_by_engine(text)
        return self._frame.token_ends(text) if ids is None else self._engine.ends(text, ids)

    def _in_threads(self, encode: Callable[[list[str]], TextIds], chunks: Iterable[list[str]]) -> Iterator[TextIds]:
        with ThreadPoolExecutor(self.threads) as pool:
            yield from pool.map(encode, chunks)

    def _by_frame(self, texts: list[str]) -> TextIds:
        return flatten(self._frame.encode_texts(texts))

    def _by_engine(self, texts: list[str]) -> TextIds:
        assert self._engine is not None
        if not (self._doubtful and any(map(self._is_doubtful, texts))):
            try:
                return self._engine.encode_texts(texts)
            except ValueError:
                pass  # as below: one of them is too much
        found = [self._ids_by_engine(text) for text in texts]
        by_frame = iter(self._frame.encode_texts([text for text, ids in zip(texts, found, strict=True) if ids is None]))
        return flatten([next(by_frame) if ids is None else ids for ids in found])

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

    def _differing(self, engine: Engine, texts: Sequence[str]) -> list[int]:
        """Return the positions of the texts that the engine encodes in another way."""
        right, found = self._by_frame(list(texts)), engine.encode_texts(list(texts))
        if np.array_equal(right.lengths, found.lengths) and np.array_equal(right.ids, found.ids):
            return []
        parts = zip(split(right), split(found), strict=True)
        return [at for at, (ids, other) in enumerate(parts) if not np.array_equal(ids, other)]


def _chunks(texts: Sequence[str], characters: int) -> Iterator[list[str]]:
    """Yield the texts, in order, some `characters` at a time."""
    ends = accumulate(map(len, texts))
    chunk: list[str] = []
    limit = characters
    for text, end in zip(texts, ends, strict=True):
        chunk.append(text)
        if end >= limit:
            yield chunk
            chunk, limit = [], end + characters
    if chunk:
        yield chunk
