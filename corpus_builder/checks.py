"""What is looked for in the samples: copies, the suite's questions, control tokens as text, text that went missing.

Pure; `Seen` remembers the ids that it was shown.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from corpus_builder.sample import Message, Sample
from corpus_builder.split import Split, has_own_system
from corpus_builder.suite import Suite

_SILENT = re.compile(r"[\W_]+")
_SENTENCE_ENDS = str.maketrans(dict.fromkeys("。！？!?\n", "\n"))


class Seen:
    """The samples so far: keeps ids unique."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._next_replica: dict[str, int] = {}  # by the id that was taken: ten thousand copies are no million tries

    def with_unique_id(self, sample: Sample) -> Sample:
        """Return `sample`, its replica counted up where its id is taken: only exact copies share one."""
        first = number = sample.id
        while number in self._ids:
            sample = replace(sample, replica=max(sample.replica + 1, self._next_replica.get(first, 0)))
            number = sample.id
        self._ids.add(number)
        if number != first:
            self._next_replica[first] = sample.replica + 1
        return sample


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()


def trained_key(sample: Sample) -> str:
    """Return what makes a sample unique in its class: replicas of a unit share it."""
    if sample.sample_class == "soul":
        return _digest(message.content for message in sample.messages if message.is_trained)
    turns = sample.messages[1:] if has_own_system(sample.messages) else sample.messages
    return _digest(f"{turn.role}\0{turn.content}" for turn in turns)


def normalised(text: str) -> str:
    """Return the letters and digits of `text`, without case, width, spaces and punctuation."""
    loud = _SILENT.sub("", text)  # first: what is left is as a rule in its normal form
    folded = unicodedata.normalize("NFKC", loud).casefold()
    return folded if folded == loud else _SILENT.sub("", folded)


class SuiteQuestions:
    """The suite's questions, to be found among the things that users say in the corpus."""

    def __init__(self, suite: Suite | None) -> None:
        questions = suite.questions if suite is not None else ()
        self._numbers = {normalised(question.ask): number for number, question in enumerate(questions, start=1)}
        self._numbers.pop("", None)

    def found_in(self, messages: Sequence[Message]) -> set[int]:
        """Return the numbers of the questions that are asked in `messages`: as a whole turn, or a sentence of one."""
        if not self._numbers:
            return set()
        said = {normalised(part) for message in messages if message.role == "user" for part in _sentences(message)}
        return {self._numbers[text] for text in said & self._numbers.keys()}


def _sentences(message: Message) -> Iterator[str]:
    yield message.content
    yield from message.content.translate(_SENTENCE_ENDS).split("\n")


def count_controls(messages: Sequence[Message], controls: Iterable[str]) -> int:
    """Return how often the template's control tokens stand in the texts, where they are text and nothing else."""
    known = tuple(controls)
    firsts = {control[0] for control in known}
    texts = (message.content for message in messages)
    return sum(text.count(control) for text in texts if any(one in text for one in firsts) for control in known)


def missing_text(draft: Sample, split: Split) -> str:
    """Return what of `draft` is neither in its samples nor handed back as left out; empty, or a fault of the splitter.

    The text is put together again from the samples: trained turns joined in order, other turns one by one.
    """
    if split.samples == (draft,):
        return ""
    wanted = "".join(message.content for message in draft.messages if message.is_trained)
    got = "".join(message.content for sample in split.samples for message in sample.messages if message.is_trained)
    missing = _difference(wanted, got)
    left_out = Counter(one.text for one in split.left_out)
    present = {(message.role, message.content) for sample in split.samples for message in sample.messages}
    for message in draft.messages:
        if message.is_trained or (message.role, message.content) in present:
            continue
        missing += _unseen(message, present, left_out)
    return missing


def _difference(wanted: str, got: str) -> str:
    if wanted == got:
        return ""
    start = next((at for at, (a, b) in enumerate(zip(wanted, got, strict=False)) if a != b), min(len(wanted), len(got)))
    return wanted[start:] or got[start:]


def _unseen(message: Message, present: set[tuple[str, str]], left_out: Counter[str]) -> str:
    """Return the part of a turn that no sample shows: it may be numbered, shortened, or left out whole."""
    for text in left_out:
        rest = message.content[len(text) :]
        if left_out[text] and message.content.startswith(text) and (not rest or _is_shown(message.role, rest, present)):
            left_out[text] -= 1
            return ""
    return "" if _is_shown(message.role, message.content, present) else message.content


def _is_shown(role: str, text: str, present: set[tuple[str, str]]) -> bool:
    return any(
        shown_role == role and (shown == text or (shown.startswith(text) and shown[len(text) :].startswith(" (1/")))
        for shown_role, shown in present
    )
