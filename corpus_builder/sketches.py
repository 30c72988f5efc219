"""Many texts -> pairs that are alike, by MinHash: one sketch a text, bands of sketches to find candidates.

For corpora beyond what `shingles.similar_pairs` compares one by one; datasketch and numpy are imported only here.
A text as similar as wanted is found with p > 0.999; the similarity of a pair is an estimate, good to about 0.04.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from corpus_builder.groups import Groups
from corpus_builder.shingles import WORDS_PER_SHINGLE, words_of

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Sketch = NDArray[np.uint32]

#: 24 bands of 5: a pair of similarity 0.8 shares one with p = 0.9999, one of 0.5 with p = 0.53.
BANDS, ROWS = 24, 5
SKETCH_BYTES = 4 * BANDS * ROWS
#: Groups of one bucket that a text is compared with: texts from one template may share a band without being alike.
_MAX_FIRSTS = 200
_WORDS_AT_ONCE = 8192  # times 120 permutations of four bytes: 4 MB


class Sketcher:
    """Makes sketches; remembers the words that it has hashed."""

    def __init__(self) -> None:
        from datasketch import MinHash

        self._empty = MinHash(num_perm=BANDS * ROWS, seed=1, hashfunc=int)
        self._hashes = _WordHashes()

    def sketch(self, text: str) -> bytes:
        """Return the sketch of a text."""
        import numpy as np

        words = np.fromiter(map(self._hashes.__getitem__, words_of(text)), dtype=np.uint32)
        minhash = self._empty.copy()
        for start in range(0, max(1, len(words) - WORDS_PER_SHINGLE + 1), _WORDS_AT_ONCE):
            part = words[start : start + _WORDS_AT_ONCE + WORDS_PER_SHINGLE - 1]
            minhash.update_batch(_rolled(part).tolist())
        return bytes(minhash.hashvalues.tobytes())


class _WordHashes(dict[str, int]):
    """The hash of each word, made when it is first asked for."""

    def __missing__(self, word: str) -> int:
        return self.setdefault(word, zlib.crc32(word.encode("utf-8", "surrogatepass")))


def _rolled(words: Any) -> Any:
    """Return one hash for each shingle of hashed words, (N,) -> (N - 4,); of a shorter text, one."""
    import numpy as np

    if len(words) < WORDS_PER_SHINGLE:
        words = np.concatenate([words, np.zeros(WORDS_PER_SHINGLE - len(words), dtype=np.uint32)])
    count = len(words) - WORDS_PER_SHINGLE + 1
    mixed = np.zeros(count, dtype=np.uint32)
    for at in range(WORDS_PER_SHINGLE):
        mixed = (mixed ^ words[at : at + count]) * np.uint32(0x9E3779B1)  # odd: nothing is lost by the product
        mixed ^= mixed >> np.uint32(15)
    return mixed


def similar_pairs(sketches: Sequence[bytes], similarity: float, groups: Groups) -> Iterator[tuple[int, int]]:
    """Yield each text with an earlier one that is as similar as wanted, and join them.

    Candidates share a band. Inside a band's bucket each text is compared with the first of every group there, so a
    bucket of a thousand copies costs a thousand comparisons, not half a million.
    """
    import numpy as np

    table = np.frombuffer(b"".join(sketches), dtype=np.uint32).reshape(len(sketches), BANDS * ROWS)
    for band in range(BANDS):
        for bucket in _buckets(table[:, band * ROWS : (band + 1) * ROWS]):
            yield from _joined(table, bucket, similarity, groups)


def _buckets(columns: Any) -> Iterator[list[int]]:
    """Yield the rows that are equal, ascending, where there are several."""
    import numpy as np

    keys = np.ascontiguousarray(columns).view(np.dtype((np.void, 4 * ROWS))).ravel()
    order = np.argsort(keys, kind="stable")
    borders = np.flatnonzero(keys[order][1:] != keys[order][:-1]) + 1
    for rows in np.split(order, borders):
        if len(rows) > 1:
            yield [int(row) for row in rows]


def _joined(table: Any, bucket: Iterable[int], similarity: float, groups: Groups) -> Iterator[tuple[int, int]]:
    firsts: dict[int, int] = {}
    for row in bucket:
        for first in list(firsts.values()):
            if groups.find(first) != groups.find(row) and (table[first] == table[row]).mean() >= similarity:
                groups.join(first, row)
                yield first, row
        if len(firsts) < _MAX_FIRSTS:
            firsts.setdefault(groups.find(row), row)


def pack_sketches(sketches: Mapping[int, bytes]) -> bytes:
    """Return sketches by number as bytes; the inverse of `unpack_sketches`."""
    return b"".join(number.to_bytes(8, "big") + sketches[number] for number in sorted(sketches))


def unpack_sketches(packed: bytes) -> dict[int, bytes]:
    """Return the sketches that `pack_sketches` packed."""
    step = 8 + SKETCH_BYTES
    return {
        int.from_bytes(packed[at : at + 8], "big"): packed[at + 8 : at + step] for at in range(0, len(packed), step)
    }
