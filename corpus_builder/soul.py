"""A Markdown document -> questions and answers: the whole file as one, each `##` section as one. Pure.

Replicas are repeated lines that ask differently: replica i takes the plan's i-th wording, the first keeps its
first. A short section joins its neighbour, so that nothing is dropped:

    ## A\\nlong text …\\n## B\\nshort   ->   one section "A / B"
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from corpus_builder.markdown import Fences, is_inside, line_of
from corpus_builder.plan import SoulSource
from corpus_builder.reading import Reading, dropped
from corpus_builder.sample import Message, Origin, Sample

_SECTION = re.compile(r"^ {0,3}##(?:[ \t]+(?P<title>[^\n]*))?$", re.MULTILINE)
_TITLE = re.compile(r"^ {0,3}#[ \t]+(?P<title>[^\n]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a document: its heading line and what follows. `joined` counts the sections that it is made of."""

    titles: tuple[str, ...]
    heading: str
    body: str
    start: int
    joined: int = 1

    @property
    def title(self) -> str:
        """The headings, joined."""
        return " / ".join(title for title in self.titles if title)

    @property
    def text(self) -> str:
        """The section as it stands in the file."""
        return self.heading + self.body

    @property
    def answer(self) -> str:
        """What is learnt: the text under the heading; a joined section keeps its headings to tell its parts apart."""
        return (self.body if self.joined == 1 else self.text).strip()

    @property
    def end(self) -> int:
        """Where its text ends in the file, trailing blank lines left out."""
        return self.start + len(self.text.rstrip())


def read_document(text: str, path: str, source: SoulSource, *, replicas: int) -> Reading:
    """Return the samples of one document.

    Args:
        text: The decoded file.
        path: As the plan names it; part of the questions.
        source: Wordings, weight, least size of a section.
        replicas: Lines per unit, each with its own question.
    """
    if not text.strip():
        return dropped("empty_file")
    read = parse_sections(text, path, with_preamble=not source.whole_files)
    sections = [section for section in join_short(read, source.min_section_chars) if section.answer]
    kept = sum(section.joined for section in sections)
    wholes = int(source.whole_files)
    empty = {"empty_section": len(read) - kept} if len(read) > kept else {}
    joined = {"joined_sections": kept - len(sections)} if kept > len(sections) else {}
    return Reading(
        samples=tuple(_samples(text, path, source, sections, replicas)),
        units_read=wholes + len(read),
        units_kept=wholes + kept,
        drops=empty,
        notes=joined,
    )


def parse_sections(text: str, path: str, *, with_preamble: bool) -> list[Section]:
    """Return the `##` sections of `text`, fences respected; joined, they are the text (after the preamble)."""
    fences = Fences(text).spans()
    marks = [mark for mark in _SECTION.finditer(text) if not is_inside(mark.start(), fences)]
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    sections = [
        Section((_clean(mark["title"] or ""),), mark[0], text[mark.end() : end], mark.start())
        for mark, end in zip(marks, ends, strict=False)  # no mark: one end, no section
    ]
    preamble = text[: marks[0].start()] if marks else text
    if with_preamble and preamble.strip():
        found = _TITLE.search(preamble)
        title = _clean(found["title"]) if found else PurePosixPath(path).stem
        sections.insert(0, Section((title,), "", preamble, 0))
    return sections


def _clean(title: str) -> str:
    return re.sub(r"[ \t]+#+[ \t]*$", "", title).strip()


def join_short(sections: Sequence[Section], min_chars: int) -> list[Section]:
    """Return `sections` with each one shorter than `min_chars` joined to the next, the last one to the previous."""
    joined: list[Section] = []
    for section in sections:
        if joined and _is_short(joined[-1], min_chars):
            joined[-1] = _joined(joined[-1], section)
        else:
            joined.append(section)
    if len(joined) > 1 and _is_short(joined[-1], min_chars):
        last = joined.pop()
        joined[-1] = _joined(joined[-1], last)
    return joined


def _is_short(section: Section, min_chars: int) -> bool:
    return len(section.text.strip()) < min_chars or not section.body.strip()


def _joined(first: Section, second: Section) -> Section:
    return Section(
        first.titles + second.titles,
        first.heading,
        first.body + second.text,
        first.start,
        first.joined + second.joined,
    )


def _asked(
    source: SoulSource, path: str, title: str | None, answer: str, origin: Origin, replicas: int
) -> Iterator[Sample]:
    """Yield one unit's replicas; `title` None asks for the whole file."""
    for replica in range(replicas):
        yield Sample(
            messages=(Message("user", question(source, replica, path, title)), Message("assistant", answer)),
            source=f"soul:{path}" if title is None else f"soul-section:{path}#{title}",
            sample_class="soul",
            weight=source.weight,
            replica=replica,
            origin=origin,
        )


def question(source: SoulSource, replica: int, path: str, title: str | None) -> str:
    """Return the wording of one replica: the plan's templates in turn."""
    templates = source.questions.whole if title is None else source.questions.section
    values = {"{path}": path, "{section}": title or ""}
    return re.sub(r"\{path\}|\{section\}", lambda found: values[found[0]], templates[replica % len(templates)])


def _samples(text: str, path: str, source: SoulSource, sections: Sequence[Section], replicas: int) -> Iterator[Sample]:
    whole = text.strip("\n").rstrip()
    if source.whole_files:
        start = len(text) - len(text.lstrip("\n"))
        yield from _asked(source, path, None, whole, _origin(text, path, start, start + len(whole)), replicas)
    for section in sections:
        title = section.title or PurePosixPath(path).stem
        origin = _origin(text, path, section.start, section.end)
        yield from _asked(source, path, title, section.answer, origin, replicas)


def _origin(text: str, path: str, start: int, end: int) -> Origin:
    return Origin(path, line_of(text, start), line_of(text, max(start, end - 1)))
