"""Prepared files -> the samples as they are trained, and the accounts of files and classes.

Puts the plan's system prompt in front of its share, gives each sample its side of the split and an id of its own.
Side effects: reads the entries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from math import floor

from corpus_builder.checks import Seen, trained_key
from corpus_builder.entries import Piece, read_pieces
from corpus_builder.manifest import HISTOGRAM_BUCKETS, ClassAccount, FileAccount
from corpus_builder.plan import Plan
from corpus_builder.process import Prepared
from corpus_builder.sample import Message, Sample
from corpus_builder.split import has_own_system


def gets_system_prompt(index: int, share: Fraction) -> bool:
    """Whether the sample at `index` (from 0) is one of the share; after n samples floor(n * share) have it."""
    return floor((index + 1) * share) > floor(index * share)


class _ClassTotals:
    """Running counts of one class."""

    def __init__(self) -> None:
        self.samples = self.characters = self.tokens = self.trained_tokens = self.lost_tokens = 0
        self.validation_samples = 0
        self.unique: set[str] = set()
        self.buckets = [0] * HISTOGRAM_BUCKETS

    def account(self) -> ClassAccount:
        return ClassAccount(
            samples=self.samples,
            unique=len(self.unique),
            characters=self.characters,
            tokens=self.tokens,
            trained_tokens=self.trained_tokens,
            lost_tokens=self.lost_tokens,
            validation_samples=self.validation_samples,
            token_histogram=tuple(self.buckets),
        )


class Assembler:
    """Takes all prepared files in order and gives the corpus.

    Attributes:
        files: One account per file, in the order they came.
    """

    def __init__(self, plan: Plan, *, max_seq_len: int, system_tokens: int) -> None:
        """`system_tokens`: what the plan's system prompt costs in front of a sample."""
        self.files: list[FileAccount] = []
        self._system = Message("system", plan.system_prompt) if plan.system_prompt else None
        self._system_tokens = system_tokens
        self._share = Fraction(str(plan.system_prompt_share))
        self._max_seq_len = max_seq_len
        self._seen = Seen()
        self._without_own_system = 0
        self._totals: dict[str, _ClassTotals] = {}

    def add(self, prepared: Prepared, *, copies: int, sides: Iterator[int]) -> Iterator[Sample]:
        """Yield the samples of one file and enter it into the accounts.

        Args:
            copies: Its conversations that another unit has had before.
            sides: The side of each unit, in order: 1 is held out.
        """
        summary = prepared.summary
        self.expect(summary.file.sample_class)
        self._totals[summary.file.sample_class].lost_tokens += summary.lost_tokens
        for pieces in read_pieces(prepared.entry) if prepared.entry is not None else ():
            split = "validation" if next(sides) else "train"
            for piece in pieces:
                yield self._finished(piece, split)
        notes = {**summary.notes, "copies": copies} if copies else summary.notes
        self.files.append(
            FileAccount(
                path=summary.file.name,
                sample_class=summary.file.sample_class,
                bytes=summary.file.bytes,
                encoding=summary.file.encoding,
                units_read=summary.units_read,
                units_kept=summary.units_kept,
                samples=summary.samples,
                drops=summary.drops,
                notes=dict(sorted(notes.items())),
            )
        )

    def classes(self) -> dict[str, ClassAccount]:
        """Return the account of every class that had a file."""
        return {name: totals.account() for name, totals in self._totals.items()}

    def expect(self, sample_class: str) -> None:
        """Make sure that the class has an account, even if no file of it turns up."""
        self._totals.setdefault(sample_class, _ClassTotals())

    def _finished(self, piece: Piece, split: str) -> Sample:
        """Return the sample with its system prompt, side and a unique id, counted in its class."""
        sample, tokens = piece.sample, piece.tokens
        unique = trained_key(sample)
        if not has_own_system(sample.messages) and self._takes_system_prompt():
            assert self._system is not None
            sample = replace(sample, messages=(self._system, *sample.messages))
            tokens += self._system_tokens
        sample = self._seen.with_unique_id(replace(sample, split=split))
        totals = self._totals[sample.sample_class]
        totals.samples += 1
        totals.validation_samples += split == "validation"
        totals.unique.add(unique)
        totals.characters += sum(len(message.content) for message in sample.messages)
        totals.tokens += tokens
        totals.trained_tokens += piece.trained_tokens
        totals.buckets[min((tokens - 1) * HISTOGRAM_BUCKETS // self._max_seq_len, HISTOGRAM_BUCKETS - 1)] += 1
        return sample

    def _takes_system_prompt(self) -> bool:
        index = self._without_own_system
        self._without_own_system += 1
        return self._system is not None and gets_system_prompt(index, self._share)
