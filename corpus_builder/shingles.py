"""Texts -> shingles, so that near-copies can be told: five words in a row, a Chinese character being a word. Pure.

A text is written with one character a word first ("The lamp 点灯" -> four characters), so that a shingle is a slice.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain

from corpus_builder.groups import Groups

WORDS_PER_SHINGLE = 5  # of Chinese, about three words; texts that differ in one word in thirty still share 0.8
_CJK = r"\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")
#: Planes of Unicode without a character, 524,288 of them: one for each word that is not one character already.
_FREE, _FREE_COUNT = 0x50000, 0x80000


def words_of(text: str) -> list[str]:
    """Return the words of `text`, without case and punctuation."""
    return _WORD.findall(text.casefold())


class Words:
    """Gives each word a character of its own."""

    def __init__(self) -> None:
        self._codes: dict[str, str] = {}

    def coded(self, text: str) -> str:
        """Return `text` with one character a word; case and punctuation are gone."""
        return "".join([word if len(word) == 1 else self._code(word) for word in words_of(text)])

    def _code(self, word: str) -> str:
        code = self._codes.get(word)
        if code is None:
            code = self._codes[word] = chr(_FREE + len(self._codes) % _FREE_COUNT)
        return code


def shingles(coded: str) -> set[str]:
    """Return the shingles of a coded text; a shorter text is one shingle."""
    last = len(coded) - WORDS_PER_SHINGLE
    return {coded[at : at + WORDS_PER_SHINGLE] for at in range(max(0, last) + 1)} if coded else set()


def similar_pairs(sets: Sequence[set[str]], similarity: float, groups: Groups) -> Iterator[tuple[int, int]]:
    """Yield each set with an earlier one whose Jaccard similarity is high enough, and join them; exact.

    Two sets that are similar share many shingles, and among them one of the rarest of each, so only those are looked
    up; a pair that other pairs have joined already is not compared again.
    Source: prefix filtering, Bayardo, Ma, Srikant 2007 (All-Pairs).
    """
    frequency = Counter(chain.from_iterable(sets))
    holders: dict[str, list[int]] = {}
    for number, one in enumerate(sets):
        common = [shingle for shingle in one if frequency[shingle] > 1]
        least = _least_shared(len(one), similarity)
        if len(common) < least:
            continue
        rarest = sorted(common, key=lambda shingle: (frequency[shingle], shingle))[: len(common) - least + 1]
        for earlier in sorted({other for shingle in rarest for other in holders.get(shingle, ())}):
            if groups.find(earlier) != groups.find(number) and _jaccard(sets[earlier], one) >= similarity:
                groups.join(earlier, number)
                yield earlier, number
        for shingle in rarest:
            holders.setdefault(shingle, []).append(number)


def _least_shared(size: int, similarity: float) -> int:
    """Return how many shingles a set of `size` shares with any similar one, at least."""
    return int(-(-size * similarity // 1))


def _jaccard(one: set[str], other: set[str]) -> float:
    shared = len(one & other)
    union = len(one) + len(other) - shared
    return shared / union if union else 0.0
