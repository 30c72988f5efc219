"""A Markdown dialog -> turns -> one sample, before it is split. Pure.

A speaker's line (`speaker_lines.py`) inside a code fence is text. A name alone on its line is text where lines with a
colon or a time already give both sides: there it is something that is said. Rules and headings between two turns
belong to the page, not to who spoke before them; they are left out and counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter, eq
from typing import NamedTuple

from corpus_builder.markdown import line_numbers
from corpus_builder.plan import DialogSource, Speakers
from corpus_builder.reading import Reading, dropped
from corpus_builder.sample import Message, Origin, Sample
from corpus_builder.speaker_lines import Header, Shape, scan_lines

_QUOTE_MARK = re.compile(r"^[ \t]*>[ \t]?", re.MULTILINE)
_BLANK_LINES = re.compile(r"(?:[ \t]*\n)+")
_RULE_OR_HEADING = re.compile(r"[ \t]{0,3}(?:(?P<rule>-{3,}|\*{3,}|_{3,})|#{1,6}(?:[ \t][^\n]*)?)[ \t]*")
_LAYOUT_BEGINS, _BLANK = tuple("-#*_ \t"), tuple("\n \t")


class Turn(NamedTuple):
    """What one side says before the other speaks; `merged`: how many turns in a row it is made of.

    `start` and `end` are offsets of its speaker's line and of the end of what is said.
    """

    role: str
    content: str
    start: int
    end: int
    merged: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialog:
    """One parsed file; `turns` alternate. Everything that is not in them is counted."""

    turns: tuple[Turn, ...]
    has_text_before: bool = False
    empty_turns: int = 0
    rules_left_out: int = 0  # lines like `---` between two turns
    headings_left_out: int = 0
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


def parse_dialog_md(text: str, speakers: Speakers) -> Dialog:
    """Return the turns of a dialog in Markdown; consecutive turns of one side are merged and counted."""
    scan = scan_lines(text, speakers)
    headers = [header for header in scan.headers if header[2].is_sure]
    if {shape.role for _, _, shape in headers} != {"user", "assistant"}:
        headers = scan.headers
    said = _said(text, headers)
    spoken = [turn for turn in said.turns if turn.content]
    return Dialog(
        turns=tuple(_merged(spoken)),
        has_text_before=bool(text[: headers[0][0]].strip()) if headers else False,
        empty_turns=len(said.turns) - len(spoken),
        rules_left_out=said.rules,
        headings_left_out=said.headings,
        names_as_text=len(scan.headers) - len(headers),
        unknown_speakers=scan.unknown_speakers,
    )


class _Said(NamedTuple):
    """One turn a header, the empty ones too, and the rules and headings that stood at their ends."""

    turns: list[Turn]
    rules: int
    headings: int


def _said(text: str, headers: Sequence[Header]) -> _Said:
    turns, layout = [], []
    ends = [*(start for start, _, _ in headers[1:]), len(text)]
    for (start, begin, shape), end in zip(headers, ends, strict=False):  # no header: one end, no turn
        said = text[begin:end].rstrip()
        end = begin + len(said)
        if said.startswith(_LAYOUT_BEGINS, said.rfind("\n") + 1):
            said, left_out = _without_layout(said)
            layout += left_out
        if shape.prefix or shape.is_quoted or said.startswith(_BLANK):
            said = _content(said, shape)
        turns.append(Turn(shape.role, said, start, end))
    return _Said(turns, layout.count(True), layout.count(False))


def _without_layout(said: str) -> tuple[str, list[bool]]:
    """Return `said` without the rules and headings at its end, and whether each was a rule.

    A blank line sets them apart. A heading that is all that is said stays.
    """
    end, left_out = len(said), []
    while end and said[start := said.rfind("\n", 0, end) + 1] in _LAYOUT_BEGINS:
        found = _RULE_OR_HEADING.fullmatch(said, start, end)
        before = _end_of_text(said, start)
        is_apart = said.count("\n", before, start) > 1
        if found is None or not is_apart or not (before or found["rule"]):
            break
        left_out.append(found["rule"] is not None)
        end = before
    return said[:end], left_out


def _end_of_text(text: str, position: int) -> int:
    """Return where the text before `position` ends, blank lines left out."""
    while position and text[position - 1] in " \t\n":
        position -= 1
    return position


def _content(said: str, shape: Shape) -> str:
    """Return what is said, without the layout around it."""
    if shape.prefix:
        after = said.removeprefix(shape.prefix)  # `**冰朔：**早`; else the emphasis spans what is said
        said = after.lstrip(" \t") if after != said else shape.prefix + said
    if shape.is_quoted:
        said = _QUOTE_MARK.sub("", said)
    blank = _BLANK_LINES.match(said)
    return said[blank.end() :] if blank else said


def _merged(turns: Sequence[Turn]) -> Iterator[Turn]:
    """Yield the turns, those of one side in a row as one."""
    roles = [turn.role for turn in turns]
    if not any(map(eq, roles, roles[1:])):
        yield from turns
        return
    for _, run in groupby(turns, key=attrgetter("role")):
        first, *others = run
        content = "\n".join(turn.content for turn in (first, *others))
        yield Turn(first.role, content, first.start, (others or [first])[-1].end, 1 + len(others))


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
        samples=(_sample(turns, path, source, line_numbers(text, (turns[0].start, turns[-1].end))),) if turns else (),
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
        "headings_left_out": dialog.headings_left_out,
        "names_as_text": dialog.names_as_text,
        "unknown_speakers": len(dialog.unknown_speakers),
        "starts_with_assistant": int(bool(dialog.turns) and dialog.turns[0].role == "assistant"),
    }
    return {note: count for note, count in notes.items() if count}


def _sample(turns: Sequence[Turn], path: str, source: DialogSource, lines: Sequence[int]) -> Sample:
    return Sample(
        messages=tuple(Message(turn.role, turn.content) for turn in turns),
        source=f"dialog:{path}",
        sample_class="relation",
        weight=source.weight,
        origin=Origin(path, *lines),
    )
