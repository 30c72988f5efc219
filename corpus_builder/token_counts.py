"""How many tokens a text or a conversation has, by the frame: each text is encoded once, many in one call. Pure.

Whoever counts a file's conversations learns their contents first; counting is then arithmetic. What is asked for
and was not learnt is encoded by itself and remembered for a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from corpus_builder.frame import WORTH_IT, Frame
from corpus_builder.sample import Message

if TYPE_CHECKING:
    from corpus_builder.fast_tokens import FastTokens

#: Texts kept that were asked for one by one: questions, system prompts, parts.
_REMEMBERED = 512
#: Characters from which on a text may have to be cut.
_LONG = 2048


class TokenCounts:
    """Token counts over one frame."""

    def __init__(self, frame: Frame) -> None:
        self._fast: FastTokens | None = None
        self._characters = 0
        self._known: dict[str, int] = {}
        self._frame = frame
        self._around = frame.around
        self.opening = frame.opening_cost
        self._asked = lru_cache(maxsize=_REMEMBERED)(self.fresh)
        self.ends = lru_cache(maxsize=2)(self._ends)

    def learn(self, texts: Iterable[str]) -> None:
        """Count `texts` in one call of the tokenizer; what was learnt before is forgotten."""
        new = dict.fromkeys(texts)
        known = {text: self._known[text] for text in new if text in self._known}
        unknown = [text for text in new if text not in known]
        counts = self._count(unknown, keep_from=_LONG)
        self._known = known | dict(zip(unknown, counts, strict=True))

    def fresh(self, text: str) -> int:
        """Return the tokens of `text` as content, without remembering it."""
        return self._count([text])[0]

    def _count(self, texts: Sequence[str], *, keep_from: int | None = None) -> list[int]:
        self._characters += sum(map(len, texts))
        if self._fast is None and self._characters > WORTH_IT:
            from corpus_builder.fast_tokens import FastTokens  # with numpy, which a small corpus never needs

            self._fast = FastTokens(self._frame, worth_it=0)
        if self._fast is None:
            return self._frame.count_texts(texts)
        return self._fast.count_texts(texts, keep_from=keep_from)

    def _ends(self, text: str) -> Sequence[int]:
        return self._frame.token_ends(text) if self._fast is None else self._fast.ends(text)

    def text(self, text: str) -> int:
        """Return the tokens of `text` as content."""
        known = self._known.get(text)
        return self._asked(text) if known is None else known

    def texts(self, texts: Sequence[str]) -> list[int]:
        """Return the tokens of each text; those not known yet are counted in one call and kept with what was learnt."""
        unknown = [text for text in dict.fromkeys(texts) if text not in self._known]
        self._known.update(zip(unknown, self._count(unknown), strict=True))
        return [self._known[text] for text in texts]

    def messages(self, messages: Sequence[Message]) -> int:
        """Return the tokens of turns, at most; in ChatML `Frame.cost`, elsewhere `opening` comes once to them."""
        return sum(self._around[message.role] + self.text(message.content) for message in messages)

    def whole(self, messages: Sequence[Message]) -> int:
        """Return the tokens of a whole conversation: `Frame.cost`."""
        return self.messages(messages) if self._frame.is_chatml else self._frame.cost(messages)

    def trained(self, messages: Sequence[Message]) -> int:
        """Return the tokens that the model learns to say, stop tokens included."""
        if not self._frame.is_chatml:
            return sum(len(part.ids) for part in self._frame.segments(messages) if part.is_trained)
        return sum(self.text(message.content) + 1 for message in messages if message.is_trained)
