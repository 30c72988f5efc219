"""Lines of a Markdown dialog that say who speaks, found in one pass over the text. Pure.

Who speaks is decided by the plan's names alone, the longest first, so an id inside a name never decides:

    **冰朔**：早      ## 冰朔      > 铸渊：早      - 冰朔: 早      冰朔 2026-05-03 10:22：早
    [2026-05-03 10:22] 铸渊(ICE-GL-ZY001)：早      [冰朔]：早      冰朔 (alone on its line)

Most lines are text, and cost one look at their first characters. No line takes more time than its length calls for:
what may repeat without a limit never stands beside something that can begin with the same character. (What may be
missing is written `(?:x|)`: Python is faster at that than at `(?:x)?`.)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from corpus_builder.markdown import Fences, outside
from corpus_builder.plan import Speakers

_DATE = r"\d{4}(?:[-/.]\d{1,2}[-/.]\d{1,2}|年\d{1,2}月\d{1,2}日)(?: ?(?:周|星期)[一二三四五六日天])?"
#: The lookahead keeps a clock whole: `10:22:33` is never `10:22`, a colon and `33`.
_CLOCK = r"(?:上午|下午)?\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d{1,6})?)?(?:Z|[+-]\d{2}:\d{2})?(?!:?\d)(?: ?[AaPp][Mm])?"
_TIME = rf"[\[(（【]?(?:{_DATE}(?:[ T,，]{{1,3}}{_CLOCK})?|{_CLOCK}(?:[ ,，]{{1,3}}{_DATE})?)[\])）】]?"
_HAS_TIME = re.compile(_TIME)
_EMPHASIS = r"\*{1,3}|_{1,3}|`"
_PICTURE = r"[\u2600-\u27bf\U0001f300-\U0001faff][\u2600-\u27bf\U0001f300-\U0001faff\ufe0f\u200d]{0,4} ?"
_LEAD = rf"(?P<lead>[ \t\u3000\xa0\u200b>]*(?:(?:[-*+•]|\d{{1,3}}[.)])[ \t]+|\#{{1,6}}[ \t]+|))(?:{_PICTURE}|)"
_BESIDE = rf"(?:[·|,，–—-][ \t]*)?{_TIME}|[(（][^()（）\n]{{1,60}}[)）]|{_EMPHASIS}|[\]】」』>]"
_TAIL = rf"(?P<tail>(?:[ \t]*(?:{_BESIDE})){{0,5}})"
#: A colon before `//` belongs to an address.
_COLON = r"[:：︰﹕∶](?!//)[ \t]*"
_END = rf"(?:(?P<plain>{_COLON})|(?=[^\w\n]|[\d_上下]|$){_TAIL}[ \t]*(?:(?P<colon>{_COLON})|$))"
#: Whatever may stand before a name on its line. Two classes, because one with pictures in it is slow.
_BEFORE_NAME = (
    r" \t\u3000\xa0\u200b>\-*+•\d.)#\u2600-\u27bf\ufe0f\u200d\[(（【\]）】「『<|–—_`:,，/"
    r"年月日周星期一二三四五六天上午下TZAaPpMm"
)
_BEFORE = rf"[{_BEFORE_NAME}]*(?:[\U0001f300-\U0001faff][\U0001f300-\U0001faff{_BEFORE_NAME}]*)?"
_STOPS = r"\n:：，。,.!?！？;；(（\[/"
#: Cheap, and true of every line that `_UNKNOWN` is true of, but for odd indentation. A group in a lookahead, repeated:
#: once it has matched, nothing shorter is tried.
_STRANGER = rf"(?=(?P<stranger>[^{_STOPS}]{{1,36}}))(?P=stranger)(?:：|:(?=\s))"
_UNKNOWN = re.compile(
    rf"[ \t>]*(?:[-*+][ \t]+|\#{{1,6}}[ \t]+)?\*{{0,3}}(?P<name>[^\W\d_][^*{_STOPS}]{{0,19}})\*{{0,3}}(?:：|:(?=\s))"
)
_FRONT_MATTER = re.compile(r"---[ \t]*\n.*?^(?:---|\.\.\.)[ \t]*$", re.MULTILINE | re.DOTALL)


class Shape(NamedTuple):
    """What a speaker's line says beside what is said; alike lines of a file share one."""

    role: str
    is_sure: bool
    is_quoted: bool
    prefix: str  # emphasis that the line opens before the name and closes after what is said


#: A speaker's line: where it starts, where what is said starts, and its shape. A plain tuple: there are many.
Header = tuple[int, int, Shape]


class Scan(NamedTuple):
    """The speakers' lines of a text, in order, and the names that the plan does not know."""

    headers: list[Header]
    unknown_speakers: tuple[str, ...]


@lru_cache(maxsize=16)
def _line_pattern(speakers: Speakers) -> tuple[re.Pattern[str], dict[str, str]]:
    """Return what matches a newline and the line after it, if that line is worth a look; and the role of each name."""
    roles = dict.fromkeys(speakers.assistant, "assistant") | dict.fromkeys(speakers.user, "user")
    names = "|".join(re.escape(name) for name in sorted(roles, key=len, reverse=True))
    time = rf"(?:(?=[\d\[(（【上下])(?P<time>{_TIME}[ \t]*(?:[-–—|,，][ \t]*)?)|)"
    name = rf"(?:(?P<open>{_EMPHASIS})|)(?:{_PICTURE}|)[\[【「『<]?(?P<name>{names})"
    header = rf"(?={_BEFORE}(?:{names})){_LEAD}{time}{name}{_END}"
    return re.compile(rf"\n(?=[^\n])(?:{header}|{_STRANGER})", re.MULTILINE), roles


def scan_lines(text: str, speakers: Speakers) -> Scan:
    """Return who speaks where; what a closed fence or the front matter holds is text."""
    pattern, roles = _line_pattern(speakers)
    front = _FRONT_MATTER.match(text)
    shapes: dict[str, Shape] = {}
    headers: list[Header] = []
    strangers: list[int] = []
    for found in pattern.finditer("\n" + text, front.end() if front else 0):  # starts at the newline before its line
        start, end = found.span()
        if found.lastgroup == "stranger":
            strangers.append(start)
            continue
        line = found[0]
        shape = shapes.get(line) or shapes.setdefault(line, _shape(found, roles))
        headers.append((start, end - 1, shape))
    fences = Fences(text)
    if fences:
        spans = fences.spans({start: at for start, at, _ in headers if text.startswith(("```", "~~~"), at)})
        headers = outside(spans, headers, [start for start, _, _ in headers])
        strangers = outside(spans, strangers, strangers)
    return Scan(headers, _unknown_speakers(text, strangers, speakers))


def _shape(found: re.Match[str], roles: dict[str, str]) -> Shape:
    opened, tail = found["open"] or "", found["tail"] or ""
    has_colon = found["plain"] is not None or found["colon"] is not None
    return Shape(
        role=roles[found["name"]],
        is_sure=has_colon or found["time"] is not None or _HAS_TIME.search(tail) is not None,
        is_quoted=">" in found["lead"],
        prefix="" if opened in tail else opened,
    )


def _unknown_speakers(text: str, starts: Iterable[int], speakers: Speakers) -> tuple[str, ...]:
    """Return what looks like a speaker's name at least twice and is not in the plan."""
    found = (_UNKNOWN.match(text, start) for start in starts)
    counts = Counter(line["name"].strip() for line in found if line)
    known = {*speakers.user, *speakers.assistant}
    return tuple(sorted(name for name, count in counts.items() if count > 1 and not _begins_with(name, known)))


def _begins_with(name: str, known: set[str]) -> bool:
    return any(name == one or name.startswith((one + " ", one + "(", one + "（")) for one in known)
