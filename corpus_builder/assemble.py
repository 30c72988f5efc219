"""Readings -> samples ready to be trained, and the accounts of files and classes.

Splits, puts the plan's system prompt in front of its share, keeps ids unique, looks for the suite's questions.
Pure but for what the assembler remembers of the files it was given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from math import floor

from corpus_builder.checks import Seen, SuiteQuestions, count_controls, missing_text, trained_key
from corpus_builder.errors import ProjectError
from corpus_builder.frame import Frame
from corpus_builder.manifest import ClassAccount, FileAccount
from corpus_builder.plan import Plan
from corpus_builder.reading import Reading
from corpus_builder.sample import Message, Sample
from corpus_builder.split import LeftOut, Split, Splitter, has_own_system
from corpus_builder.suite import Suite


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One file as it was found: its name, class and size, and how it was decoded."""

    name: str
    sample_class: str
    bytes: int
    encoding: str
    is_guessed: bool = False
    broken_bytes: int = 0


def gets_system_prompt(index: int, share: Fraction) -> bool:
    """Whether the sample at `index` (from 0) is one of the share; after n samples floor(n * share) have it."""
    return floor((index + 1) * share) > floor(index * share)


class _ClassTotals:
    """Running counts of one class."""

    def __init__(self) -> None:
        self.samples = self.characters = self.tokens = self.trained_tokens = self.lost_tokens = 0
        self.unique: set[str] = set()

    def account(self) -> ClassAccount:
        return ClassAccount(
            samples=self.samples,
            unique=len(self.unique),
            characters=self.characters,
            tokens=self.tokens,
            trained_tokens=self.trained_tokens,
            lost_tokens=self.lost_tokens,
        )


class Assembler:
    """Takes the readings of all files in order and gives the corpus.

    Attributes:
        files: One account per file, in the order they came.
        questions_found: Numbers of the suite's questions that the corpus asks.
    """

    def __init__(self, plan: Plan, frame: Frame, *, max_seq_len: int, suite: Suite | None) -> None:
        self.files: list[FileAccount] = []
        self.questions_found: set[int] = set()
        self._system = Message("system", plan.system_prompt) if plan.system_prompt else None
        self._share = Fraction(str(plan.system_prompt_share))
        self._controls = sorted(frame.controls)
        self._splitter = Splitter(frame, max_seq_len=max_seq_len, system_prompt=plan.system_prompt)
        self._counts = self._splitter.counts
        self._seen = Seen()
        self._questions = SuiteQuestions(suite)
        self._without_own_system = 0
        self._totals: dict[str, _ClassTotals] = {}

    def add(self, file: InputFile, reading: Reading) -> list[Sample]:
        """Return the samples of one file and enter it into the accounts."""
        drops, notes = Counter(reading.drops), Counter(reading.notes)
        samples: list[Sample] = []
        refused = 0
        for draft in reading.samples:
            try:
                split = self._splitter.split(draft)
            except ProjectError:
                if not has_own_system(draft.messages):
                    raise
                refused += 1  # its own system prompt fills the window: this line's fault, not the plan's
                continue
            notes += self._noticed(draft, split)
            drops.update(one.reason for one in split.left_out)
            samples += [self._finished(sample) for sample in split.samples]
        drops["window_too_small"] += refused
        self._add_account(file, reading, kept=reading.units_kept - refused, drops=drops, notes=notes, samples=samples)
        return samples

    def classes(self) -> dict[str, ClassAccount]:
        """Return the account of every class that had a file."""
        return {name: totals.account() for name, totals in self._totals.items()}

    def expect(self, sample_class: str) -> None:
        """Make sure that the class has an account, even if no file of it turns up."""
        self._totals.setdefault(sample_class, _ClassTotals())

    def _noticed(self, draft: Sample, split: Split) -> Counter[str]:
        """Check one draft against its samples and return what is worth a note."""
        self.questions_found |= self._questions.found_in(draft.messages)
        lost = missing_text(draft, split)
        self.expect(draft.sample_class)
        self._totals[draft.sample_class].lost_tokens += self._counts.fresh(lost) if lost else 0
        notes = Counter(
            copies=int(self._seen.is_copy(draft)),
            template_tokens=count_controls(draft.messages, self._controls),
            split_units=int(len(split.samples) > 1),
            left_out_characters=_characters(split.left_out),
        )
        return +notes

    def _finished(self, sample: Sample) -> Sample:
        """Return the sample with its system prompt and a unique id, counted in its class."""
        unique = trained_key(sample)
        if not has_own_system(sample.messages):
            sample = self._with_system(sample)
        sample = self._seen.with_unique_id(sample)
        totals = self._totals[sample.sample_class]
        totals.samples += 1
        totals.unique.add(unique)
        totals.characters += sum(len(message.content) for message in sample.messages)
        totals.tokens += self._counts.messages(sample.messages)
        totals.trained_tokens += self._counts.trained(sample.messages)
        return sample

    def _with_system(self, sample: Sample) -> Sample:
        index = self._without_own_system
        self._without_own_system += 1
        if self._system is None or not gets_system_prompt(index, self._share):
            return sample
        return replace(sample, messages=(self._system, *sample.messages))

    def _add_account(
        self,
        file: InputFile,
        reading: Reading,
        *,
        kept: int,
        drops: Counter[str],
        notes: Counter[str],
        samples: list[Sample],
    ) -> None:
        self.expect(file.sample_class)
        drops = +drops
        notes = +(notes + Counter(guessed_encoding=int(file.is_guessed), broken_bytes=file.broken_bytes))
        beyond = drops.total() - sum(reading.drops.values()) - (reading.units_kept - kept)
        self.files.append(
            FileAccount(
                path=file.name,
                sample_class=file.sample_class,
                bytes=file.bytes,
                encoding=file.encoding,
                units_read=reading.units_read + beyond,  # a turn that is kept in part counts as two
                units_kept=kept,
                samples=len(samples),
                drops=dict(sorted(drops.items())),
                notes=dict(sorted(notes.items())),
            )
        )


def _characters(left_out: Iterator[LeftOut] | tuple[LeftOut, ...]) -> int:
    return sum(len(one.text) for one in left_out)
