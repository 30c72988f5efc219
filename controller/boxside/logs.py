"""Logs as somebody may read them: a byte cursor, whole characters, no colours, and the reader's privacy class.

Runs on the box: standard library and Python 3.8 only. Asks only. A log of 10 GB costs what one of 10 KB costs.
On the public side only our own whole lines are shown, names replaced; the rest is counted in `hidden_lines`.
"""

import os
import re
from dataclasses import asdict, dataclass
from typing import Any, Dict, List, Optional, Tuple

from controller.boxside.arguments import NAME, SEES, Arguments
from controller.boxside.work import (
    KINDS,
    SESSIONS,
    SETUP,
    TRAIN,
    Work,
    count_rows,
    find_newest,
    look_at,
    require_work,
)
from corpus_builder.errors import ERROR_PREFIX
from corpus_builder.log_lines import public_line
from trainer.run_paths import DataPaths
from trainer.run_state import has_ended

DEFAULT_TAIL_BYTES = 12_000
MAX_WINDOW_BYTES = 4 << 20
PUBLIC = "public"
_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True)
class Window:
    """Part of a log. `start` and `end` are offsets in the file; `rest` is its last line, which has no end yet."""

    start: int
    end: int
    size: int
    lines: List[str]
    rest: Optional[str] = None


def read_window(
    path: str, start: Optional[int], max_bytes: int, *, floor: int = 0, ceiling: Optional[int] = None
) -> Window:
    """Return the lines in `max_bytes` from `start`, or the last ones where `start` is None.

    Args:
        start: An offset that an earlier answer gave. Beyond the file's end, the log was made anew: from `floor`.
        floor: No byte before it is read; `ceiling`: none from it on.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115 (closed below)
    except FileNotFoundError:
        return Window(0, 0, 0, [])
    with file:
        size = file.seek(0, os.SEEK_END)
        size = size if ceiling is None else min(size, ceiling)
        floor = floor if floor <= size else 0
        begin = max(floor, size - max_bytes) if start is None else max(floor, start if start <= size else floor)
        file.seek(max(0, begin - 1))
        is_inside_line = begin > 0 and begin > floor and file.read(1) != b"\n"
        file.seek(begin)
        data = file.read(min(max_bytes, size - begin))
    if start is None and is_inside_line and b"\n" in data:
        head = data.index(b"\n") + 1
        begin, data = begin + head, data[head:]
    return _split(begin, size, data)


def _split(begin: int, size: int, data: bytes) -> Window:
    """Return the whole lines of `data`. One longer than the window is cut at a character, so that reading goes on."""
    whole, newline, rest = data.rpartition(b"\n")
    is_at_end = begin + len(data) >= size
    if not newline and not is_at_end:
        cut = _character_border(data)
        return Window(begin, begin + cut, size, [clean_line(data[:cut])])
    end = begin + len(whole) + len(newline)
    lines = [clean_line(line) for line in whole.split(b"\n")] if newline else []
    return Window(begin, end, size, lines, clean_line(rest) if rest and is_at_end else None)


def _character_border(data: bytes) -> int:
    """Return the length of `data` without a UTF-8 character that its end cuts."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:  # the head of a character, or ASCII
            needed = 1 if byte < 0x80 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) - back if needed > back and len(data) > back else len(data)
    return len(data)


def clean_line(line: bytes) -> str:
    """Return a line as a terminal would show it at last: `\\r` folded, colours and control characters gone."""
    text = _ANSI.sub("", line.decode("utf-8", "replace"))
    segments = [segment for segment in text.split("\r") if segment]
    return _CONTROL.sub("", segments[-1]) if segments else ""


def filter_lines(lines: List[str], see: str) -> Tuple[List[str], int]:
    """Return the lines that a reader with `see` may have, and how many are hidden. ZY_ERROR is never shown raw."""
    if see == PUBLIC:
        shown = [public_line(line) for line in lines]
        kept = [line for line in shown if line is not None and "⟦" not in line and "⟧" not in line]
        return kept, sum(1 for line in lines if line) - sum(1 for line in kept if line)
    kept = [line for line in lines if ERROR_PREFIX not in line]
    return kept, len(lines) - len(kept)


def tail_log(args: Arguments) -> Dict[str, Any]:
    """Operation `tail_log`: the end of a log, or what follows `from_offset`."""
    data, see = args.path("data"), args.word("see", SEES, PUBLIC)
    which = args.word("which", ("auto", "train", "setup", "build"), "auto")
    max_bytes = max(1, args.count("bytes", DEFAULT_TAIL_BYTES, MAX_WINDOW_BYTES))
    work = _choose(data, which)
    path = DataPaths(data).build_log if which == "build" else work.paths.log
    start = args.count("from_offset", 0, 1 << 62) if args.values.get("from_offset") is not None else None
    window = read_window(path, start, max_bytes)
    rest = [window.rest] if window.rest and see != PUBLIC else []
    lines, hidden = filter_lines(window.lines + rest, see)
    return {
        "id": work.id,
        "kind": work.kind,
        "text": "\n".join(lines) + ("\n" if lines else ""),
        "from_offset": window.start,
        "next_offset": window.end,
        "size": window.size,
        "hidden_lines": hidden,
    }


def _choose(data: str, which: str) -> Work:
    """Return the work whose log is meant: what is at work, else what began last."""
    if which != "auto":
        return require_work(data, TRAIN if which == "train" else SETUP, None)
    found = [work for work in (find_newest(data, kind) for kind in (TRAIN, SETUP)) if work is not None]
    live = [work for work in found if look_at(work).is_live]
    return max(live or found, key=lambda work: work.id) if found else require_work(data, TRAIN, None)


def follow(args: Arguments) -> Dict[str, Any]:
    """Operation `follow`: what is new since `offset`, and how the work stands."""
    data, kind = args.path("data"), args.word("kind", KINDS)
    work = require_work(data, kind, args.optional_text("id", NAME))
    see = args.word("see", SEES, PUBLIC)
    standing = look_at(work)  # before the log is read: lines that come after the end are then never missed
    window = read_window(
        work.paths.log,
        args.count("offset", 0, 1 << 62),
        max(1, args.count("max_bytes", 256 * 1024, MAX_WINDOW_BYTES)),
        floor=work.log_start,
        ceiling=work.log_end,
    )
    lines, end = window.lines, window.end
    if has_ended(standing.state) and window.rest is not None:
        lines, end = lines + [window.rest], window.size
    shown, hidden = filter_lines(lines, see)
    return {
        "id": work.id,
        "state": standing.state,
        "outcome": None if work.outcome is None else asdict(work.outcome),
        "error": (work.outcome.error if work.outcome else None) or work.error,
        "lines": shown,
        "hidden_lines": hidden,
        "next_offset": end,
        "progress": standing.progress,
        "progress_count": count_rows(work.paths.progress),
        "eta_s": standing.eta_s,
        "session": SESSIONS[kind],
    }
