"""Ids of a byte-level vocabulary -> the bytes they stand for, a million at a time. Pure.

Such a vocabulary spells every byte as one printable character, so what a row of ids says can be compared with a text
byte by byte, without a decoder and without a step per token.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from threading import Lock

import numpy as np
from numpy.typing import NDArray

#: Two bytes that UTF-8 never holds: the stop token, and what no byte-level token is.
STOP, NO_TEXT = 0xFF, 0xFE
_UNSPELLED = "\uffff"
_WORD = 8  # bytes that are compared at once
_MASKS = np.array([(1 << 8 * size) - 1 for size in range(_WORD + 1)], dtype="<u8")
_ZERO = "\u0100"  # how the alphabet spells the byte 0


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Source: GPT-2's encoder.py, bytes_to_unicode.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


def spelled_bytes(spelling: str) -> NDArray[np.int16]:
    """Return the byte that each character of `spelling` stands for, -1 for one outside the alphabet."""
    codes = np.frombuffer(spelling.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    found: NDArray[np.int16] = _byte_of_code()[np.minimum(codes, 512)]
    return found


@lru_cache(maxsize=1)
def _byte_of_code() -> NDArray[np.int16]:
    table = np.full(513, -1, dtype=np.int16)  # the alphabet's last character is number 323
    for character, byte in byte_alphabet().items():
        table[ord(character)] = byte
    return table


class TokenBytes:
    """The bytes of ids; each id is looked up once. Several threads may ask at a time.

    Args:
        spell: Id -> how the vocabulary spells it, None where it has no such id.
        stop: The id that stands for the byte `STOP`.
    """

    def __init__(self, spell: Callable[[int], str | None], stop: int) -> None:
        self._spell, self._stop = spell, stop
        self._learning = Lock()
        self._flat = np.empty(0, dtype=np.uint8)  # each token's bytes, filled up with zeros to whole words
        self._starts = np.empty(0, dtype=np.int32)
        self._lengths = np.empty(0, dtype=np.int32)  # -1: not looked up yet

    def reads(self, ids: NDArray[np.int32], text: bytes) -> bool:
        """Whether `ids` (T,) stand for exactly `text`: compared eight bytes at a time, from each token's first on."""
        self._learn(ids)
        rows = ids.astype(np.intp)
        lengths = self._lengths[rows]
        ends = np.cumsum(lengths, dtype=np.intp)
        if (int(ends[-1]) if len(ends) else 0) != len(text):
            return False
        there = np.ndarray(len(text) + 1, dtype="<u8", buffer=text + bytes(_WORD), strides=(1,))  # from every byte on
        words = self._flat.view("<u8")
        at, word, left = ends - lengths, self._starts[rows] // _WORD, lengths
        while len(left):
            if ((there[at] & _MASKS[np.minimum(left, _WORD)]) != words[word]).any():
                return False
            longer = np.flatnonzero(left > _WORD)
            at, word, left = at[longer] + _WORD, word[longer] + 1, left[longer] - _WORD
        return True

    def decode(self, ids: NDArray[np.int32]) -> tuple[NDArray[np.uint8], NDArray[np.int32]]:
        """Return the bytes (B,) of `ids` (T,) one after another, and where those of each id end (T,); B < 2**31."""
        self._learn(ids)
        lengths = self._lengths[ids]
        ends = np.cumsum(lengths, dtype=np.int32)
        at = np.repeat(self._starts[ids] - (ends - lengths), lengths)
        at += np.arange(len(at), dtype=np.int32)
        return self._flat[at], ends

    def _learn(self, ids: NDArray[np.int32]) -> None:
        with self._learning:
            self._look_up(ids)

    def _look_up(self, ids: NDArray[np.int32]) -> None:
        unknown = max(0, int(ids.max(initial=-1)) + 1 - len(self._lengths))
        self._lengths = np.append(self._lengths, np.full(unknown, -1, dtype=np.int32))
        self._starts = np.append(self._starts, np.zeros(unknown, dtype=np.int32))
        is_met = np.zeros(len(self._lengths), dtype=np.bool_)
        is_met[ids] = True
        new = np.flatnonzero(is_met & (self._lengths < 0))
        spellings = [_UNSPELLED if token == self._stop else self._spell(token) or _UNSPELLED for token in new.tolist()]
        lengths = np.fromiter(map(len, spellings), dtype=np.int32, count=len(spellings))
        room = -(-lengths // _WORD) * _WORD
        self._lengths[new] = lengths
        self._starts[new] = len(self._flat) + np.cumsum(room) - room
        found = spelled_bytes(
            "".join([text.ljust(size, _ZERO) for text, size in zip(spellings, room.tolist(), strict=True)])
        )
        self._flat = np.append(self._flat, np.where(found < 0, NO_TEXT, found).astype(np.uint8))
        if self._stop in new:
            self._flat[self._starts[self._stop]] = STOP
