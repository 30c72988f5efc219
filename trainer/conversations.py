"""Samples as flat arrays: every content once, every turn as numbers. Pure.

A corpus says the same thing many times (system prompts, replicas). So contents are kept once, and a turn is the number
of its content; the samples themselves need not stay in memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from corpus_builder.sample import CLASSES, ROLES, SPLITS, Message, Sample, sample_id


@dataclass(frozen=True, slots=True, eq=False)
class Conversations:
    """N samples with M turns in all.

    Attributes:
        contents: Every content once, in the order in which they were met.
        turns: (N + 1,) where each sample's turns begin in the next three; the last entry is M.
        content_at: (M,) index in `contents`.
        roles: (M,) index in ROLES.
        trains: (M,) the turn's `train`.
        weights: (N,).
        class_indices, splits: (N,) index in CLASSES, in SPLITS.
        sources, replicas: N of each; an id follows from them.
    """

    contents: list[str]
    turns: NDArray[np.int64]
    content_at: NDArray[np.int64]
    roles: NDArray[np.int8]
    trains: NDArray[np.bool_]
    weights: NDArray[np.float32]
    class_indices: NDArray[np.int8]
    splits: NDArray[np.int8]
    sources: list[str]
    replicas: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.weights)

    @property
    def is_answer(self) -> NDArray[np.bool_]:
        """(M,) whether a turn is the assistant's."""
        found: NDArray[np.bool_] = self.roles == ROLES.index("assistant")
        return found

    @property
    def is_trained(self) -> NDArray[np.bool_]:
        """(M,) whether the model learns to say a turn."""
        return self.is_answer & self.trains

    def turns_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the turns of `samples`, one sample after another."""
        return spans(self.turns[samples], self.turns[samples + 1] - self.turns[samples])

    def messages(self, sample: int) -> tuple[Message, ...]:
        """Return the messages of a sample."""
        here = slice(int(self.turns[sample]), int(self.turns[sample + 1]))
        columns = (self.roles[here].tolist(), self.content_at[here].tolist(), self.trains[here].tolist())
        return tuple(Message(ROLES[role], self.contents[at], train) for role, at, train in zip(*columns, strict=True))

    def trained_texts(self, sample: int) -> list[str]:
        """Return what the model learns to say in a sample, turn by turn."""
        return [message.content for message in self.messages(sample) if message.is_trained]

    def id_of(self, sample: int) -> str:
        """Return the id of a sample."""
        name = CLASSES[int(self.class_indices[sample])]
        return sample_id(name, self.sources[sample], int(self.replicas[sample]), self.messages(sample))


class _Numbers(dict[str, int]):
    """Numbers texts in the order in which they are first met."""

    def __missing__(self, text: str) -> int:
        number = self[text] = len(self)
        return number


def gather(samples: Iterable[Sample]) -> Conversations:
    """Return the samples as flat arrays; they are read once and not kept."""
    number_of = _Numbers()
    role_of = {role: at for at, role in enumerate(ROLES)}
    same: dict[str, str] = {}  # sources repeat, and one copy of each is enough
    content_at: list[int] = []
    roles: list[int] = []
    trains: list[bool] = []
    turns, weights, classes, splits, replicas = array("q", [0]), array("f"), array("b"), array("b"), array("q")
    sources: list[str] = []
    for sample in samples:
        messages = sample.messages
        content_at += [number_of[message.content] for message in messages]
        roles += [role_of[message.role] for message in messages]
        trains += [message.train for message in messages]
        turns.append(len(roles))
        weights.append(sample.weight)
        classes.append(CLASSES.index(sample.sample_class))
        splits.append(SPLITS.index(sample.split))
        sources.append(same.setdefault(sample.source, sample.source))
        replicas.append(sample.replica)
    return Conversations(
        contents=list(number_of),
        turns=np.frombuffer(turns, dtype=np.int64),
        content_at=np.array(content_at, dtype=np.int64),
        roles=np.array(roles, dtype=np.int8),
        trains=np.array(trains, dtype=np.bool_),
        weights=np.frombuffer(weights, dtype=np.float32),
        class_indices=np.frombuffer(classes, dtype=np.int8),
        splits=np.frombuffer(splits, dtype=np.int8),
        sources=sources,
        replicas=np.frombuffer(replicas, dtype=np.int64),
    )


def spans(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return `starts[0], starts[0] + 1, …` for `lengths[0]` numbers, then the same of the next, joined.

    >>> spans(np.array([5, 9]), np.array([3, 2]))
    array([ 5,  6,  7,  9, 10])
    """
    found: NDArray[np.int64] = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    found += np.arange(len(found))
    return found
