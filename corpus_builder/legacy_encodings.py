"""Bytes in an encoding older than Unicode -> which one it most likely is. Pure.

Runs on the box too: standard library and Python 3.8 only. Chinese and Japanese encodings overlap: most bytes are text
in several of them. What tells them apart is which characters come out. Each of the standards keeps its common
characters in a first level and the rare ones behind it, so text read in its own encoding is nearly all first level,
and text read in another one is not:

    rank_encodings(b"\\xb1\\xf9\\xcb\\xb7")[0] == ("gb18030", 1.0)      冰朔; as Big5: a common and a rare character

Source: GB/T 2312 rows 16-55, Big5 A440-C67E, JIS X 0208 rows 16-47 are those levels; cp437 is PKWARE's APPNOTE D.1.
"""

import re
from collections import Counter
from typing import Dict, List, Optional, Sequence, Tuple

#: Most likely first, where two are equally good.
EAST_ASIAN = ("gb18030", "big5", "shift_jis")
#: Scores from here on are text in that encoding. Measured on babel's names of countries, languages and currencies,
#: 30 at a time: 0.96 to 1.0 in their own encoding, traditional characters in GBK 0.7 to 0.9; of five names at a time
#: none was taken for another encoding.
LIKELY = 0.4
#: Characters that are looked at; all of them must be text in the encoding.
_SCORED_CHARACTERS = 65536
_COMMON, _SYMBOL, _RARE, _ODD = 1.0, 0.8, 0.25, 0.05
#: A character of these encodings that touches a Latin letter may as well be an accented letter of another one.
_TOUCHES_LATIN = 0.9
_LATIN = re.compile(r"[A-Za-z]")
_DOS_LETTERS = frozenset("ÇüéâäàåçêëèïîìÄÅÉæÆôöòûùÿÖÜáíóúñÑß")
_FULL_WIDTH = re.compile(r"[\u3000-\u303f\uff01-\uff5e·—‘’“”…]")
_KANA = re.compile(r"[\u3040-\u30ff]")


def rank_encodings(data: bytes, encodings: Sequence[str] = EAST_ASIAN) -> List[Tuple[str, float]]:
    """Return each encoding in which `data` is text with its score from 0 to 1, the best first."""
    ranked = [(encoding, score) for encoding in encodings for score in [_score(data, encoding)] if score is not None]
    return sorted(ranked, key=lambda one: -one[1])  # stable: the order of `encodings` decides between equals


def score_text(text: str, encoding: str) -> float:
    """Return how common the characters of `text` are in `encoding`, from 0 to 1; 1 where all of them are ASCII."""
    total, count = 0.0, 0
    known: Dict[str, float] = {}
    text = text[:_SCORED_CHARACTERS]
    for (before, character, after), times in Counter(zip(" " + text, text, text[1:] + " ")).items():
        if character < "\x80":
            continue
        if character not in known:
            known[character] = _commonness(character, encoding)
        touches = _LATIN.match(before) is not None or _LATIN.match(after) is not None
        total += times * _in_place(known[character], touches, encoding)
        count += times
    return total / count if count else 1.0


def _score(data: bytes, encoding: str) -> Optional[float]:
    try:
        return score_text(data.decode(encoding), encoding)
    except UnicodeDecodeError:
        return None


def _in_place(commonness: float, touches_latin: bool, encoding: str) -> float:
    if encoding == "cp437":
        return commonness if touches_latin else commonness / 2
    return commonness * _TOUCHES_LATIN if touches_latin else commonness


def _commonness(character: str, encoding: str) -> float:
    if encoding == "cp437":
        return _COMMON if character in _DOS_LETTERS else _ODD
    try:
        code = character.encode(encoding)
    except UnicodeEncodeError:
        return _ODD
    if _FULL_WIDTH.match(character):
        return _SYMBOL
    if len(code) != 2:
        return _ODD  # a half-width katakana, or four bytes of GB18030
    return _LEVELS[encoding](code[0], code[1], character)


def _gb_level(lead: int, trail: int, character: str) -> float:
    if trail < 0xA1 or lead < 0xA1:
        return _RARE if "\u4e00" <= character <= "\u9fff" else _ODD  # GBK's additions: traditional characters
    return _COMMON if 0xB0 <= lead <= 0xD7 else _RARE if 0xD8 <= lead <= 0xF7 else _ODD


def _big5_level(lead: int, trail: int, character: str) -> float:
    return _COMMON if 0xA4 <= lead <= 0xC6 else _RARE if 0xC9 <= lead <= 0xF9 else _ODD


def _jis_level(lead: int, trail: int, character: str) -> float:
    if _KANA.match(character):
        return _COMMON
    return _COMMON if 0x88 <= lead <= 0x98 else _RARE if 0x99 <= lead <= 0xEA else _ODD


_LEVELS = {"gb18030": _gb_level, "big5": _big5_level, "shift_jis": _jis_level}
