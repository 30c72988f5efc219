"""What everybody may read of a log: our own lines, the levels of other lines, excerpts of known failures. Pure.

Runs on the box: standard library and Python 3.8 only. A line that is not ours may hold anything that a person wrote.
Of it only words are shown that stand in this code: a level, or the words of a pattern of `trainer/remedies.py` that
it matches, what stood between them as `…`.

    [dialog] #a3f2: 12 turns, 1 sample                                   our line
    WARNING …                                                            a level
    known failure shard_missing: No such file or directory: … .safetensors    an excerpt
"""

import re
from typing import List, Match, Optional, Set, Tuple

from corpus_builder.log_lines import public_line

MAX_LINE_CHARS = 4096  # of a line that is searched for a known failure
_LEVELS = {"WARN": "WARNING", "FATAL": "CRITICAL", "W": "WARNING", "E": "ERROR", "F": "CRITICAL", "I": "INFO"}
#: At its start, after a time, a rank, brackets: `[rank0]: 2026-05-03 10:15:00,123 - WARNING`, `W0503 10:15:00`.
_LEVEL = re.compile(
    r"(?:\[?rank\d{1,4}\]?:?|[\d\[\]:,. TZ|/-])*"
    r"(?:(DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)(?![A-Za-z0-9_])|([IWEF])(?=\d{4} \d\d:\d\d:\d\d))"
)
#: A word, or a sign of no programming language.
_TOKEN = re.compile(r"\w+|[^\x20-\x7e]")
_GAPS = re.compile(r"…[^\w]*…")
_LONGEST_NUMBER = 5
_COMPOSABLE = 3  # a class of letters in a pattern, [Oo], is no word to build others of


def public_lines(lines: List[str]) -> Tuple[List[str], int]:
    """Return what everybody may see of `lines`, in order, and how many of them are not shown whole."""
    shown: List[str] = []
    repeats = hidden = 0
    for line in lines:
        ours = public_line(line)
        if ours is not None and "⟦" not in ours and "⟧" not in ours:
            shown.append(ours)
            repeats = 0
            continue
        if not line:
            continue
        hidden += 1
        hint = excerpt(line) or level(line)
        if hint is None:
            continue
        if repeats and shown[-1].startswith(hint):
            repeats += 1
            shown[-1] = "%s (%d lines)" % (hint, repeats)
        else:
            shown.append(hint)
            repeats = 1
    return shown, hidden


def level(line: str) -> Optional[str]:
    """Return `WARNING …` for a line that begins with a level, else None."""
    match = _LEVEL.match(line[:200])
    if match is None:
        return None
    word = match.group(1) or match.group(2)
    return "%s …" % _LEVELS.get(word, word)


def excerpt(line: str) -> Optional[str]:
    """Return the words of the first known failure that a line shows, else None; no word is one of the line's own."""
    from trainer.remedies import REMEDIES  # its patterns take as long as the rest of an answer

    for remedy in REMEDIES:
        match = None if remedy.frames else remedy.pattern.search(line[:MAX_LINE_CHARS])
        if match is not None:
            return "known failure %s: %s" % (remedy.code, _without_text(match.group(0), remedy.pattern.pattern))
    return None


def _without_text(matched: str, pattern: str) -> str:
    """Return what a pattern matched, `…` for everything that a wildcard may have let in."""
    words, has_numbers = _words_of(pattern), r"\d" in pattern

    def shown(token: "Match[str]") -> str:
        word = token.group(0)
        is_number = has_numbers and word.isdigit() and len(word) <= _LONGEST_NUMBER
        return word if is_number or word.lower() in words or _is_composed(word.lower(), words) else "…"

    return _GAPS.sub("…", _TOKEN.sub(shown, matched))


def _is_composed(word: str, words: Set[str]) -> bool:
    """Whether a word is made of words of the pattern, as `nccl(?:System|Remote)Error` makes `ncclSystemError`."""
    parts = sorted((part for part in words if len(part) >= _COMPOSABLE), key=len, reverse=True)
    return bool(parts) and re.fullmatch("(?:%s)+" % "|".join(parts), word) is not None


def _words_of(pattern: str) -> Set[str]:
    """Return the words that stand in a pattern, small; what `\\w` and its like mean is none."""
    bare = re.sub(r"\\[A-Za-z]|\{\d*,?\d*\}", " ", pattern)
    return {word.lower() for word in re.findall(r"\w+", bare)}
