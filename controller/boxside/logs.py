"""Logs as somebody may read them: a byte cursor, whole characters, no colours, and the reader's privacy class.

Runs on the box: standard library and Python 3.8 only. Asks only. A log of 10 GB costs what one of 10 KB costs.
On the public side only our own whole lines are shown, names replaced, and what public_log.py lets through of others;
what is not shown whole is counted in `hidden_lines`.
"""

import os
import re
from dataclasses import asdict, dataclass, replace
from typing import Any, Dict, List, Optional, Tuple

from controller.boxside.arguments import NAME, SEES, Arguments
from controller.boxside.log_place import KEY, find_place, key_at
from controller.boxside.orphans import find_orphan, require_living
from controller.boxside.public_log import public_lines
from controller.boxside.work import (
    KINDS,
    SESSIONS,
    SETUP,
    TRAIN,
    Work,
    count_rows,
    find_newest,
    load_work,
    look_at,
    require_work,
)
from corpus_builder.errors import ERROR_PREFIX
from trainer.run_paths import DataPaths
from trainer.run_state import has_ended

DEFAULT_TAIL_BYTES = 12_000
MAX_WINDOW_BYTES = 4 << 20
PUBLIC = "public"
_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True)
class Window:
    """Part of a log. `start` and `end` are offsets in the file; `rest` is its last line, which has no end yet.

    `key` tells this log at `end` from another one (log_place.py). `begins_inside`, `ends_inside`: the first line
    lacks its beginning, the last one its end.
    """

    start: int
    end: int
    size: int
    lines: List[str]
    rest: Optional[str] = None
    key: Optional[str] = None
    begins_inside: bool = False
    ends_inside: bool = False


def read_window(
    path: str, start: Optional[int], max_bytes: int, *, floor: int = 0, ceiling: Optional[int] = None
) -> Window:
    """Return the lines in `max_bytes` from `start`, or the last ones where `start` is None.

    Args:
        start: An offset that an earlier answer gave, or any: one within a character begins with that character.
            Beyond the file's end, the log was made anew: from `floor`.
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
        lead = min(4, begin - floor)
        file.seek(begin - lead)
        data = file.read(lead + min(max_bytes, size - begin))
        place = _character_start(data, lead)
        is_inside_line = place > 0 and data[place - 1 : place] != b"\n"
        begin, data = begin - lead + place, data[place:]
        if start is None and is_inside_line and b"\n" in data:
            head = data.index(b"\n") + 1
            begin, data, is_inside_line = begin + head, data[head:], False
        window = _split(begin, size, data)
        return replace(window, key=key_at(file, window.end), begins_inside=is_inside_line)


def _character_start(data: bytes, place: int) -> int:
    """Return where the UTF-8 character begins that holds the byte at `place`; `place` itself where none does."""
    if data[place : place + 1] and data[place] & 0xC0 == 0x80:
        for back in range(1, min(3, place) + 1):
            byte = data[place - back]
            if byte & 0xC0 != 0x80:
                return place - back if _length(byte) > back else place
    return place


def _length(head: int) -> int:
    """Return the bytes of the UTF-8 character that begins with `head`."""
    return 1 if head < 0xC0 else 2 if head < 0xE0 else 3 if head < 0xF0 else 4


def _split(begin: int, size: int, data: bytes) -> Window:
    """Return the whole lines of `data`. One longer than the window is cut at a character, so that reading goes on."""
    whole, newline, rest = data.rpartition(b"\n")
    is_at_end = begin + len(data) >= size
    if not newline and not is_at_end:
        cut = len(data) - _cut_character(data) or len(data)
        return Window(begin, begin + cut, size, [clean_line(data[:cut])], ends_inside=True)
    end = begin + len(whole) + len(newline)
    lines = [clean_line(line) for line in whole.split(b"\n")] if newline else []
    shown = rest[: len(rest) - _cut_character(rest)] if is_at_end else b""
    return Window(begin, end, size, lines, clean_line(shown) if shown else None)


def _cut_character(data: bytes) -> int:
    """Return how many bytes at the end of `data` are a UTF-8 character that its end cuts."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 != 0x80:  # the head of a character, or ASCII
            return back if _length(byte) > back else 0
    return 0


def clean_line(line: bytes) -> str:
    """Return a line as a terminal would show it at last: `\\r` folded, colours and control characters gone."""
    text = _ANSI.sub("", line.decode("utf-8", "replace"))
    segments = [segment for segment in text.split("\r") if segment]
    return _CONTROL.sub("", segments[-1]) if segments else ""


def filter_lines(lines: List[str], see: str) -> Tuple[List[str], int]:
    """Return what a reader with `see` may have of lines, and how many are not shown whole. No ZY_ERROR is shown raw."""
    if see == PUBLIC:
        return public_lines(lines)
    kept = [line for line in lines if ERROR_PREFIX not in line]
    return kept, len(lines) - len(kept)


def _visible(window: Window, see: str) -> Tuple[List[str], int]:
    """Return what a reader with `see` may have; the public reads whole lines, so that no cursor opens the rest."""
    if see != PUBLIC:
        return filter_lines(window.lines, see)
    lines = window.lines[window.begins_inside : len(window.lines) - window.ends_inside]
    shown, hidden = filter_lines(lines, see)
    return shown, hidden + len(window.lines) - len(lines)


def tail_log(args: Arguments) -> Dict[str, Any]:
    """Operation `tail_log`: the end of a log, or what follows `from_offset` of the log that `log_key` tells.

    `log_change`: why that was not read on (log_place.py), else None; then `from_offset` is where it was.
    """
    data, root, see = args.path("data"), args.path("root"), args.word("see", SEES, PUBLIC)
    which = args.word("which", ("auto", "train", "setup", "build"), "auto")
    max_bytes = max(1, args.count("bytes", DEFAULT_TAIL_BYTES, MAX_WINDOW_BYTES))
    start = args.count("from_offset", 0, 1 << 62) if args.values.get("from_offset") is not None else None
    key, work_id = args.optional_text("log_key", KEY), args.optional_text("id", NAME)
    work = (_find(data, work_id) if work_id is not None else None) or _choose(data, root, which)
    path = DataPaths(data).build_log if which == "build" else work.paths.log
    place = None if start is None else find_place(path, start, key)
    standing = look_at(work)  # before the log is read: lines that come after the end are then never missed
    window = read_window(path, None, max_bytes) if place is None else read_window(place.path, place.offset, max_bytes)
    lines, hidden = _visible(window, see)
    rest, _ = filter_lines([window.rest] if window.rest and see != PUBLIC else [], see)
    return {
        "id": work.id,
        "kind": work.kind,
        "state": standing.state,
        "lines": lines,
        "rest": "".join(rest),
        "from_offset": window.start,
        "next_offset": window.end,
        "log_key": window.key,
        "log_change": None if place is None else place.change,
        "size": window.size,
        "hidden_lines": hidden,
    }


def _find(data: str, work_id: str) -> Optional[Work]:
    return load_work(data, TRAIN, work_id) or load_work(data, SETUP, work_id)


def _choose(data: str, root: str, which: str) -> Work:
    """Return the work whose log is meant: what is at work, else what began last."""
    if which != "auto":
        return require_living(data, root, TRAIN if which == "train" else SETUP, None)
    newest = (find_orphan(data, root, kind) or find_newest(data, kind) for kind in (TRAIN, SETUP))
    found = [work for work in newest if work is not None]
    live = [work for work in found if look_at(work).is_live]
    return max(live or found, key=lambda work: (work.number, work.id)) if found else require_work(data, TRAIN, None)


def follow(args: Arguments) -> Dict[str, Any]:
    """Operation `follow`: what is new since `offset` of the log that `log_key` tells, and how the work stands.

    Without a key: since the attempt began.
    """
    data, kind = args.path("data"), args.word("kind", KINDS)
    work = require_living(data, args.path("root"), kind, args.optional_text("id", NAME))
    see, key = args.word("see", SEES, PUBLIC), args.optional_text("log_key", KEY)
    standing = look_at(work)
    place = find_place(work.paths.log, args.count("offset", 0, 1 << 62), key)
    window = read_window(
        place.path,
        place.offset,
        max(1, args.count("max_bytes", 256 * 1024, MAX_WINDOW_BYTES)),
        floor=work.log_start if key is None else 0,
        ceiling=work.log_end if place.path == work.paths.log else None,
    )
    shown, hidden = _visible(window, see)
    end = window.end
    if has_ended(standing.state) and window.rest is not None:
        rest, more = filter_lines([window.rest], see)
        shown, hidden, end = shown + rest, hidden + more, window.size
    return {
        "id": work.id,
        "state": standing.state,
        "outcome": None if work.outcome is None else asdict(work.outcome),
        "error": (work.outcome.error if work.outcome else None) or work.error,
        "lines": shown,
        "hidden_lines": hidden,
        "next_offset": end,
        "log_key": window.key if end == window.end else None,
        "log_change": place.change,
        "progress": standing.progress,
        "progress_count": count_rows(work.paths.progress),
        "eta_s": standing.eta_s,
        "session": SESSIONS[kind],
    }
