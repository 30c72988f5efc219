"""Conversations -> token ids with what is learned, by construction. Pure.

In ChatML the ids of a turn are its header's, its content's, the stop token and a newline, whatever stands in it: so a
million tokens are put together by index arithmetic. Any other frame says the segments of each conversation itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from corpus_builder.fast_tokens import FastTokens
from corpus_builder.frame import Frame, Segment
from corpus_builder.sample import ROLES
from corpus_builder.text_ids import flatten
from trainer.conversations import Conversations, spans


@dataclass(frozen=True, slots=True, eq=False)
class Rendered:
    """N samples with T tokens in all.

    Attributes:
        ids: (T,) token ids, sample after sample.
        is_answer: (T,) whether a token is part of an assistant turn, its stop token included.
        is_trained: (T,) whether a token is learned.
        starts: (N + 1,) where each sample begins; the last entry is T.
    """

    ids: NDArray[np.int32]
    is_answer: NDArray[np.bool_]
    is_trained: NDArray[np.bool_]
    starts: NDArray[np.int64]


class Renderer(Protocol):
    """Renders the samples of one corpus.

    Attributes:
        lengths: (N,) tokens of each sample; 0 where the frame refuses it.
        refused: Samples that the frame can't hold.
    """

    lengths: NDArray[np.int64]
    refused: frozenset[int]

    def render(self, samples: NDArray[np.int64]) -> Rendered:
        """Return the ids of `samples`, in this order."""
        ...


def make_renderer(talks: Conversations, frame: Frame, tokens: FastTokens) -> Renderer:
    """Return what renders a corpus; all its contents are encoded now, each once."""
    return ChatmlRenderer(talks, frame, tokens) if frame.is_chatml else SegmentRenderer(talks, frame, tokens)


class ChatmlRenderer:
    """Renders ChatML from a pool that holds the ids of all headers and contents."""

    refused: frozenset[int] = frozenset()

    def __init__(self, talks: Conversations, frame: Frame, tokens: FastTokens) -> None:
        self._talks = talks
        literals = [*(frame.headers[role] for role in ROLES), (frame.im_end,), frame.newline]
        pool = tokens.encode_texts(talks.contents, lead=flatten(literals))
        #: Where each literal, then each content, lies in the pool.
        self._pool, self._starts, self._lengths = pool.ids, np.cumsum(pool.lengths) - pool.lengths, pool.lengths
        self._stop, self._newline, self._first_content = len(ROLES), len(ROLES) + 1, len(literals)
        of_turns = self._lengths[self._pieces(np.arange(len(talks.roles)))].sum(axis=1)
        ends = np.concatenate([[0], np.cumsum(of_turns)])
        self.lengths: NDArray[np.int64] = np.diff(ends[talks.turns])

    def render(self, samples: NDArray[np.int64]) -> Rendered:
        turns = self._talks.turns_of(samples)
        pieces = self._pieces(turns)
        lengths = self._lengths[pieces].ravel()
        says = np.array([False, True, True, False])  # header, content, stop token, newline
        return Rendered(
            ids=self._pool[spans(self._starts[pieces].ravel(), lengths)],
            is_answer=np.repeat((self._talks.is_answer[turns, np.newaxis] & says).ravel(), lengths),
            is_trained=np.repeat((self._talks.is_trained[turns, np.newaxis] & says).ravel(), lengths),
            starts=np.concatenate([[0], np.cumsum(self.lengths[samples])]),
        )

    def _pieces(self, turns: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return which parts of the pool make each turn (turns, 4)."""
        pieces = np.empty((len(turns), 4), dtype=np.int64)
        pieces[:, 0] = self._talks.roles[turns]
        pieces[:, 1] = self._first_content + self._talks.content_at[turns]
        pieces[:, 2], pieces[:, 3] = self._stop, self._newline
        return pieces


class SegmentRenderer:
    """Renders with a frame's own `segments`, conversation by conversation."""

    def __init__(self, talks: Conversations, frame: Frame, tokens: FastTokens) -> None:
        held = [sample for sample in range(len(talks)) if frame.refusal(talks.messages(sample)) is None]
        self.refused: frozenset[int] = frozenset(range(len(talks))) - frozenset(held)
        texts = list(dict.fromkeys(text for sample in held for text in frame.contents(talks.messages(sample))))
        encoded = tokens.encode_texts(texts)
        parts = np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1])
        ids_of = {text: ids.tolist() for text, ids in zip(texts, parts, strict=True)}
        self._parts = {sample: _flat(frame.segments(talks.messages(sample), ids_of.__getitem__)) for sample in held}
        self.lengths: NDArray[np.int64] = np.zeros(len(talks), dtype=np.int64)
        for sample, (ids, _, _) in self._parts.items():
            self.lengths[sample] = len(ids)

    def render(self, samples: NDArray[np.int64]) -> Rendered:
        ids, is_answer, is_trained = zip(*(self._parts[sample] for sample in samples.tolist()), strict=True)
        return Rendered(
            ids=np.concatenate(ids),
            is_answer=np.concatenate(is_answer),
            is_trained=np.concatenate(is_trained),
            starts=np.concatenate([[0], np.cumsum(self.lengths[samples])]),
        )


def _flat(segments: Sequence[Segment]) -> tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.bool_]]:
    """Return ids, `is_answer` and `is_trained` of a conversation, all (t,)."""
    lengths = [len(segment.ids) for segment in segments]
    return (
        np.fromiter(chain.from_iterable(segment.ids for segment in segments), dtype=np.int32, count=sum(lengths)),
        np.repeat(np.array([segment.is_answer for segment in segments], dtype=np.bool_), lengths),
        np.repeat(np.array([segment.is_trained for segment in segments], dtype=np.bool_), lengths),
    )
