"""The report with texts in it: a few samples of each class, every token that is trained marked. Pure.

Text-class: it stays where the samples are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape

from corpus_builder.frame import Frame
from corpus_builder.manifest import Manifest
from corpus_builder.page import Page
from corpus_builder.report import format_report
from corpus_builder.sample import Message, Sample
from corpus_builder.say import SEE_ALL

#: Samples shown of each class, evenly spread: a page of at most some megabytes.
SHOWN_PER_CLASS = 8


class Showcase:
    """Picks the samples to show while all of them go by.

    Attributes:
        shown: What was picked, in order.
    """

    def __init__(self, totals: Mapping[str, int]) -> None:
        """`totals`: how many samples of each class will come."""
        self._wanted = {
            name: {at * total // SHOWN_PER_CLASS for at in range(SHOWN_PER_CLASS)} for name, total in totals.items()
        }
        self._count = dict.fromkeys(totals, 0)
        self.shown: list[Sample] = []

    def passing(self, samples: Iterable[Sample]) -> Iterator[Sample]:
        """Yield the samples as they come."""
        for sample in samples:
            at = self._count.get(sample.sample_class, 0)
            self._count[sample.sample_class] = at + 1
            if at in self._wanted.get(sample.sample_class, ()):
                self.shown.append(sample)
            yield sample


def format_full_report(manifest: Manifest, lang: str, shown: Sequence[Sample], frame: Frame) -> str:
    """Return the page: the report with names, then the samples."""
    page = Page(lang, SEE_ALL)
    said = page.word("report.shown", shown=len(shown), total=manifest.total_samples)
    rows = "\n".join(_row(page, sample, frame) for sample in shown)
    return format_report(
        manifest, lang, see=SEE_ALL, more=[*page.section("report.texts", f'<p class="soft">{said}</p>\n{rows}')]
    )


def _row(page: Page, sample: Sample, frame: Frame) -> str:
    segments = frame.segments(sample.messages)
    tokens = sum(len(segment.ids) for segment in segments)
    trained = sum(len(segment.ids) for segment in segments if segment.is_trained)
    head = page.word(
        "report.sample", source=sample.source, tokens=tokens, trained=trained, weight=sample.weight, split=sample.split
    )
    turns = "".join(_turn(turn, frame) for turn in sample.messages)
    title = page.word_or_code("class", sample.sample_class)
    return f'<article><h3>{title}</h3><p class="soft">{head}</p>{turns}</article>'


def _turn(turn: Message, frame: Frame) -> str:
    content = _taught(frame.cut_at_tokens(turn.content)) if turn.is_trained else escape(turn.content)
    return f'<div class="soft">{escape(turn.role)}</div><div class="turn">{content}</div>'


def _taught(pieces: Sequence[str]) -> str:
    """Return the tokens of a trained turn, two shades in turn, and its stop token."""
    return "".join(
        f'<span class="{"taught-too" if at % 2 else "taught"}">{escape(piece)}</span>'
        for at, piece in enumerate([*pieces, "■"])
    )
