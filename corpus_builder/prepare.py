"""One file's reading -> its samples, screened, split and counted, and the account of them.

What is done here depends on nothing but the file, the plan, the suite and the tokenizer, so that it can be kept
(`cache.py`). What depends on the other files comes later (`assemble.py`). Side effects: writes to the entry given.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from corpus_builder.checks import SuiteQuestions, count_controls, missing_text, normalised
from corpus_builder.entries import EntryWriter, Mark, Piece, Summary
from corpus_builder.errors import ProjectError
from corpus_builder.frame import Frame
from corpus_builder.plan import Plan
from corpus_builder.reading import InputFile, Reading, ReadingStream
from corpus_builder.sample import Message, Sample
from corpus_builder.screen import Screen
from corpus_builder.split import LeftOut, Split, Splitter, has_own_system
from corpus_builder.suite import Suite

_BLOCK_CHARACTERS = 1_000_000


class _Tally:
    """What is counted while a file's drafts go by."""

    def __init__(self) -> None:
        self.drops: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.questions: set[int] = set()
        self.samples = self.lost_tokens = self.refused = self.not_rendered = 0


def is_compared(plan: Plan) -> bool:
    """Whether it matters which units say the same."""
    return plan.checks.duplicates or plan.validation_share > 0


class Preparer:
    """Prepares files, one after another, for one plan."""

    def __init__(self, plan: Plan, frame: Frame, *, max_seq_len: int, suite: Suite | None) -> None:
        self._policies = plan.checks.policies
        self._is_compared = is_compared(plan)
        self._frame = frame
        self._controls = sorted(frame.controls)
        self._splitter = Splitter(frame, max_seq_len=max_seq_len, system_prompt=plan.system_prompt)
        self._counts = self._splitter.counts
        self._questions = SuiteQuestions(suite)

    def prepare(self, file: InputFile, reading: Reading | ReadingStream, text: str, entry: EntryWriter) -> Summary:
        """Write the samples of `reading` to `entry` and return the account.

        Args:
            text: The decoded file, to tell the lines of what is found in it; empty where it is not at hand.
        """
        tally = _Tally()
        screen = Screen(self._policies, text)
        marks: list[Mark] = []
        cleaned = ((place, [screen.clean(draft) for draft in unit]) for place, unit in _units(reading.samples))
        for units in _blocks(cleaned):
            self._counts.learn(turn.content for _, drafts in units for draft in drafts for turn in draft.messages)
            for place, drafts in units:
                held = [kept for draft in drafts if (kept := self._held(draft, tally)) is not None]
                pieces = tuple(piece for draft in held for piece in self._pieces(draft, tally))
                entry.add(pieces)
                tally.samples += len(pieces)
                marks.append(_mark(place, drafts, is_compared=self._is_compared))
        return self._summary(file, reading, tally, screen, marks)

    def _held(self, draft: Sample, tally: _Tally) -> Sample | None:
        """Return the draft if the model's template takes it, else from its first question on, else None."""
        if self._frame.refusal(draft.messages) is None:
            return draft
        is_own = has_own_system(draft.messages)
        system, turns = draft.messages[:is_own], draft.messages[is_own:]
        first = next((at for at, turn in enumerate(turns) if turn.role == "user"), len(turns))
        kept = replace(draft, messages=(*system, *turns[first:]))
        if not any(turn.is_trained for turn in kept.messages) or self._frame.refusal(kept.messages) is not None:
            tally.not_rendered += len(turns) if draft.sample_class == "relation" else 1
            return None
        tally.not_rendered += first
        return kept

    def _pieces(self, draft: Sample, tally: _Tally) -> Iterator[Piece]:
        try:
            split = self._splitter.split(draft)
        except ProjectError:
            if not has_own_system(draft.messages):
                raise
            tally.refused += 1  # its own system prompt fills the window: this line's fault, not the plan's
            return
        self._notice(draft, split, tally)
        for sample in split.samples:
            yield Piece(sample, self._counts.whole(sample.messages), self._counts.trained(sample.messages))

    def _notice(self, draft: Sample, split: Split, tally: _Tally) -> None:
        """Check one draft against its samples and count what is worth a note."""
        tally.questions |= self._questions.found_in(draft.messages)
        lost = missing_text(draft, split)
        tally.lost_tokens += self._counts.fresh(lost) if lost else 0
        tally.drops.update(one.reason for one in split.left_out)
        tally.notes.update(
            template_tokens=count_controls(draft.messages, self._controls),
            split_units=int(len(split.samples) > 1),
            left_out_characters=_characters(split.left_out),
        )

    def _summary(
        self, file: InputFile, reading: Reading | ReadingStream, tally: _Tally, screen: Screen, marks: Sequence[Mark]
    ) -> Summary:
        beyond = tally.drops.total()  # a turn that is kept in part counts as two
        refused = Counter(window_too_small=tally.refused, template_refused=tally.not_rendered)
        drops = +(Counter(reading.drops) + tally.drops + refused)
        receipts = screen.receipts()
        redacted = sum(one.count for kind, one in receipts.items() if self._policies[kind] == "redact")
        decoded = Counter(guessed_encoding=int(file.is_guessed), broken_bytes=file.broken_bytes, redacted=redacted)
        return Summary(
            file=file,
            units_read=reading.units_read + beyond,
            units_kept=reading.units_kept - refused.total(),
            samples=tally.samples,
            lost_tokens=tally.lost_tokens,
            rounds=reading.rounds if tally.samples else 0,
            drops=dict(sorted(drops.items())),
            notes=dict(sorted((+(Counter(reading.notes) + tally.notes + decoded)).items())),
            unknown_speakers=reading.unknown_speakers,
            suite_questions=tuple(sorted(tally.questions)),
            receipts=receipts,
            marks=tuple(marks),
        )


def _characters(left_out: Iterable[LeftOut]) -> int:
    return sum(len(one.text) for one in left_out)


def _units(drafts: Iterable[Sample]) -> Iterator[tuple[str, list[Sample]]]:
    """Yield the place of each unit and its replicas, which follow each other and count from 0."""
    unit: list[Sample] = []
    for draft in drafts:
        if unit and (draft.replica == 0 or _place(draft) != _place(unit[0])):
            yield _place(unit[0]), unit
            unit = []
        unit.append(draft)
    if unit:
        yield _place(unit[0]), unit


def _blocks(units: Iterable[tuple[str, list[Sample]]]) -> Iterator[list[tuple[str, list[Sample]]]]:
    """Yield the units in blocks of about a million characters: their contents are encoded in one call."""
    block, characters = [], 0
    for place, drafts in units:
        block.append((place, drafts))
        characters += sum(len(turn.content) for turn in drafts[0].messages)
        if characters >= _BLOCK_CHARACTERS:
            yield block
            block, characters = [], 0
    if block:
        yield block


def _place(draft: Sample) -> str:
    return f"{draft.source}\0{draft.origin}"


def _mark(place: str, drafts: Sequence[Sample], *, is_compared: bool) -> Mark:
    first = drafts[0]
    said = said_by(first.messages, first.sample_class) if is_compared else ""
    conversations = tuple(_conversation(draft.messages) for draft in drafts)
    return Mark(
        place=short_digest(place),
        document=short_digest(_document(first)),
        said=short_digest(said),
        characters=len(said),
        line=first.origin.start_line if first.origin is not None else 0,
        conversations=conversations,
        answers=tuple(number for draft in drafts for number in _answers(draft.messages)),
    )


def _document(draft: Sample) -> str:
    """Return the name of what a draft is part of: a document, a dialog; a line of JSONL stands for itself."""
    if draft.sample_class == "soul" and draft.origin is not None:
        return f"soul\0{draft.origin.path}"
    if draft.sample_class == "relation":
        return draft.source
    return "\0".join(f"{turn.role}\0{turn.content}" for turn in draft.messages)


def said_by(messages: Iterable[Message], sample_class: str) -> str:
    """Return what a unit says, normalised, to be compared: of a document the text alone, else all the turns."""
    turns = [turn.content for turn in messages if turn.role != "system"]
    if sample_class == "soul":
        turns = [turn.content for turn in messages if turn.is_trained]
    return _normalised("\n".join(dict.fromkeys(turns)))


_normalised = lru_cache(maxsize=8)(normalised)


@lru_cache(maxsize=64)
def short_digest(text: str) -> int:
    """Return 64 bits of the sha256 of `text`."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")


def _conversation(messages: Sequence[Message]) -> int:
    return short_digest("\0".join(f"{turn.role}\0{turn.content}" for turn in messages))


def _answers(messages: Sequence[Message]) -> Iterator[int]:
    """Yield the prompt and the target of each trained turn; a prompt is all that is said before."""
    before = hashlib.sha256()
    for turn in messages:
        if turn.is_trained:
            yield int.from_bytes(before.digest()[:8], "big")
            yield short_digest(turn.content)
        before.update(f"{turn.role}\0{turn.content}\0".encode("utf-8", "surrogatepass"))
