"""How many tokens a text or a conversation has, by the frame; recent texts are remembered. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from corpus_builder.frame import Frame, Segment
from corpus_builder.sample import Message

#: Texts kept: the replicas of a document follow each other and share their answer.
_REMEMBERED = 512


class TokenCounts:
    """Token counts over one frame."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self.text = lru_cache(maxsize=_REMEMBERED)(self.fresh)

    def fresh(self, text: str) -> int:
        """Return the tokens of `text` as content, without remembering it."""
        return len(self._frame.encode_text(text))

    def messages(self, messages: Sequence[Message]) -> int:
        """Return the tokens of a conversation: `Frame.cost`, with remembered contents."""
        return sum(len(segment.ids) for segment in self._segments(messages))

    def trained(self, messages: Sequence[Message]) -> int:
        """Return the tokens that the model learns to say, stop tokens included."""
        return sum(len(segment.ids) for segment in self._segments(messages) if segment.is_trained)

    def _segments(self, messages: Sequence[Message]) -> list[Segment]:
        """The frame's segments over stand-ins for ids: only their number matters here."""
        return self._frame.segments(messages, encode=lambda text: range(self.text(text)))
