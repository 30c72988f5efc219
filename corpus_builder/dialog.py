"""A Markdown dialog -> turns -> one sample, before it is split. Pure.

Who speaks is decided by the plan's names alone, the longest first, so an id inside a name never decides:

    **冰朔**：早      ## 冰朔      > 铸渊：早      - 冰朔: 早      冰朔 2026-05-03 10:22：早
    [2026-05-03 10:22] 铸渊(ICE-GL-ZY001)：早      [冰朔]：早      冰朔 (alone on its line)

A speaker's line inside a code fence is text. A name alone on its line is text where lines with a colon or a time
already give both sides: there it is something that is said.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from corpus_builder.markdown import Fences, Span, is_inside, line_numbers
from corpus_builder.plan import DialogSource, Speakers
from corpus_builder.reading import Reading, dropped
from corpus_builder.sample import Message, Origin, Sample

_DATE = r"\d{4}(?:[-/.]\d{1,2}[-/.]\d{1,2}|年\d{1,2}月\d{1,2}日)"
#: The lookahead keeps a clock whole: `10:22:33` is never `10:22`, a colon and `33`.
_CLOCK = r"(?:上午|下午)?\d{1,2}:\d{2}(?::\d{2}(?:\.\d{1,6})?)?(?!:?\d)(?:[ ]?[AaPp][Mm])?"
_TIME = rf"[\[(（【]?(?:{_DATE}(?:[ T,，]{{1,3}}{_CLOCK})?|{_CLOCK})[\])）】]?"
_EMPHASIS = r"\*{1,3}|_{1,3}|`"
_LEAD = r"^(?P<lead>[ \t\u3000>]*(?:(?:[-*+•]|\d{1,3}[.)])[ \t]+|\#{1,6}[ \t]+)?)"
_TAIL = rf"(?P<tail>(?:[ \t]*(?:{_TIME}|[(（][^()（）\n]{{1,60}}[)）]|{_EMPHASIS}|[\]】」』>])){{0,5}})"
#: A colon before `//` belongs to an address.
_COLON = r"(?:[ \t]*(?P<colon>[:：])(?!//)[ \t]*|[ \t]*$)"
_UNKNOWN = re.compile(
    r"^[ \t>]*(?:[-*+][ \t]+|\#{1,6}[ \t]+)?\*{0,3}"
    r"(?P<name>[^\W\d_][^\n:：*，。,.!?！？;；(（\[/]{0,19})\*{0,3}(?:：|:(?=\s))",
    re.MULTILINE,
)
_FRONT_MATTER = re.compile(r"\A---[ \t]*\n.*?^(?:---|\.\.\.)[ \t]*$", re.MULTILINE | re.DOTALL)
_LAST_RULE = re.compile(r"(?<=\n)[ \t]*\n[ \t]{0,3}(?:-{3,}|\*{3,}|_{3,})[ \t]*\Z")


@dataclass(frozen=True, slots=True)
class Turn:
    """What one side says before the other speaks. `merged`: how many turns in a row it is made of."""

    role: str
    content: str
    start_line: int
    end_line: int
    merged: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialog:
    """One parsed file; `turns` alternate. Everything that is not in them is counted."""

    turns: tuple[Turn, ...]
    has_text_before: bool = False
    empty_turns: int = 0
    rules_left_out: int = 0  # lines like `---` between two turns
    names_as_text: int = 0
    unknown_speakers: tuple[str, ...] = ()

    @property
    def merged_turns(self) -> int:
        """Turns that went into the turn before them."""
        return sum(turn.merged - 1 for turn in self.turns)

    @property
    def rounds(self) -> int:
        """Questions with an answer."""
        return sum(turn.role == "assistant" for turn in self.turns[1:])


@dataclass(frozen=True, slots=True)
class _Header:
    """A speaker's line: where it starts, where what is said starts, and how sure we are that it is one."""

    role: str
    start: int
    content: int
    is_sure: bool
    is_quoted: bool
    prefix: str  # emphasis that the line opens before the name and closes after what is said


@lru_cache(maxsize=16)
def _names(speakers: Speakers) -> tuple[re.Pattern[str], dict[str, str]]:
    roles = dict.fromkeys(speakers.assistant, "assistant") | dict.fromkeys(speakers.user, "user")
    longest_first = "|".join(re.escape(name) for name in sorted(roles, key=len, reverse=True))
    name = rf"(?P<open>{_EMPHASIS})?[\[【「『<]?(?P<name>{longest_first})"
    before = rf"(?P<time>{_TIME}[ \t]*[-–—|,，]?[ \t]*)?"
    return re.compile(_LEAD + before + name + _TAIL + _COLON, re.MULTILINE), roles


@dataclass(frozen=True, slots=True)
class _Scan:
    """The speakers' lines and the closed fences of a text, in order."""

    headers: list[_Header]
    fences: list[Span]


def parse_dialog_md(text: str, speakers: Speakers) -> Dialog:
    """Return the turns of a dialog in Markdown; consecutive turns of one side are merged and counted."""
    scan = _scan(text, speakers)
    headers = [header for header in scan.headers if header.is_sure]
    if {header.role for header in headers} != {"user", "assistant"}:
        headers = scan.headers
    turns, rules = _turns(text, headers)
    return Dialog(
        turns=tuple(_merge(turn for turn in turns if turn.content)),
        has_text_before=bool(text[: headers[0].start].strip()) if headers else False,
        empty_turns=sum(not turn.content for turn in turns),
        rules_left_out=rules,
        names_as_text=len(scan.headers) - len(headers),
        unknown_speakers=_unknown_speakers(text, scan.fences, speakers),
    )


def _scan(text: str, speakers: Speakers) -> _Scan:
    """Read the text once, line by line that matters; what a closed fence or the front matter holds is text."""
    pattern, roles = _names(speakers)
    front = _FRONT_MATTER.match(text)
    fences = Fences(text)
    scan = _Scan([], [])
    until = front.end() if front else 0
    matches = {found.start(): found for found in pattern.finditer(text)}
    for start in sorted({*matches, *fences.starts}):
        if start < until:
            continue
        found = matches.get(start)
        if found is not None:
            scan.headers.append(_header(found, roles))
        end = fences.find_end(start if found is None else found.end())
        if end is not None:
            scan.fences.append((start, end))
            until = end
    return scan


def _header(found: re.Match[str], roles: dict[str, str]) -> _Header:
    opened = found["open"] or ""
    has_time = found["time"] is not None or re.search(_TIME, found["tail"]) is not None
    return _Header(
        role=roles[found["name"]],
        start=found.start(),
        content=found.end(),
        is_sure=found["colon"] is not None or has_time,
        is_quoted=">" in found["lead"],
        prefix="" if opened in found["tail"] else opened,
    )


def _turns(text: str, headers: Sequence[_Header]) -> tuple[list[Turn], int]:
    """Return one turn a header, the empty ones too, and how many rules were cut from their ends."""
    if not headers:
        return [], 0
    ends = [header.start for header in headers[1:]] + [len(text)]
    slices = [text[header.content : end] for header, end in zip(headers, ends, strict=True)]
    places = [(header.start, header.content + len(said.rstrip())) for header, said in zip(headers, slices, strict=True)]
    lines = line_numbers(text, [position for place in places for position in place])
    turns, rules = [], 0
    for at, (header, said) in enumerate(zip(headers, slices, strict=True)):
        spoken = _said(said, header)
        content = _LAST_RULE.sub("", spoken).rstrip()
        rules += content != spoken
        turns.append(Turn(header.role, content, lines[2 * at], lines[2 * at + 1]))
    return turns, rules


def _said(text: str, header: _Header) -> str:
    """Return what is said, without the layout around it."""
    if header.prefix:
        after = text.removeprefix(header.prefix)  # `**冰朔：**早`; else the emphasis spans what is said
        text = after.lstrip(" \t") if after != text else header.prefix + text
    if header.is_quoted:
        text = re.sub(r"(?m)^[ \t]*>[ \t]?", "", text)
    return re.sub(r"\A(?:[ \t]*\n)+", "", text).rstrip()


def _merge(turns: Iterable[Turn]) -> list[Turn]:
    merged: list[Turn] = []
    for turn in turns:
        last = merged[-1] if merged else None
        if last is not None and last.role == turn.role:
            content = f"{last.content}\n{turn.content}"
            merged[-1] = replace(last, content=content, end_line=turn.end_line, merged=last.merged + 1)
        else:
            merged.append(turn)
    return merged


def _unknown_speakers(text: str, fences: list[Span], speakers: Speakers) -> tuple[str, ...]:
    """Return what looks like a speaker's name at least twice, outside of fences, and is not in the plan."""
    found = Counter(line["name"].strip() for line in _UNKNOWN.finditer(text) if not is_inside(line.start(), fences))
    known = {*speakers.user, *speakers.assistant}
    return tuple(sorted(name for name, count in found.items() if count > 1 and not _begins_with(name, known)))


def _begins_with(name: str, known: set[str]) -> bool:
    return any(name == one or name.startswith((one + " ", one + "(", one + "（")) for one in known)


def read_dialog(text: str, path: str, source: DialogSource, speakers: Speakers) -> Reading:
    """Return the sample of one dialog. Its units are the turns as they stand in the file."""
    if not text.strip():
        return dropped("empty_file")
    dialog = parse_dialog_md(text, speakers)
    turns, drops = _answered(dialog)
    if not turns and not drops and not dialog.empty_turns:
        return dropped("no_turns")
    drops |= {"before_first_turn": int(dialog.has_text_before), "empty_turn": dialog.empty_turns}
    drops = {reason: count for reason, count in drops.items() if count}
    kept = sum(turn.merged for turn in turns)
    return Reading(
        samples=(_sample(turns, path, source),) if turns else (),
        units_read=kept + sum(drops.values()),
        units_kept=kept,
        drops=drops,
        notes=_notes(dialog),
        rounds=dialog.rounds,
        unknown_speakers=dialog.unknown_speakers,
    )


def _answered(dialog: Dialog) -> tuple[tuple[Turn, ...], dict[str, int]]:
    """Return the turns that a sample is made of, and the others by reason."""
    turns = dialog.turns
    last = max((at for at, turn in enumerate(turns) if turn.role == "assistant"), default=-1)
    drops = {"no_answer": sum(turn.merged for turn in turns[last + 1 :])}
    turns = turns[: last + 1]
    if all(turn.role == "assistant" for turn in turns):
        drops["no_question"] = sum(turn.merged for turn in turns)
        turns = ()
    return turns, {reason: count for reason, count in drops.items() if count}


def _notes(dialog: Dialog) -> dict[str, int]:
    notes = {
        "merged_turns": dialog.merged_turns,
        "rules_left_out": dialog.rules_left_out,
        "names_as_text": dialog.names_as_text,
        "unknown_speakers": len(dialog.unknown_speakers),
        "starts_with_assistant": int(bool(dialog.turns) and dialog.turns[0].role == "assistant"),
    }
    return {note: count for note, count in notes.items() if count}


def _sample(turns: Sequence[Turn], path: str, source: DialogSource) -> Sample:
    return Sample(
        messages=tuple(Message(turn.role, turn.content) for turn in turns),
        source=f"dialog:{path}",
        sample_class="relation",
        weight=source.weight,
        origin=Origin(path, turns[0].start_line, turns[-1].end_line),
    )
