"""How many tokens a text or a conversation has, by the frame: each text is encoded once, many in one call. Pure.

Whoever counts a file's conversations learns their contents first; counting is then arithmetic. What is asked for
and was not learnt is encoded by itself and remembered for a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from corpus_builder.fast_tokens import FastTokens
from corpus_builder.frame import Frame
from corpus_builder.sample import ROLES, Message

#: Texts kept that were asked for one by one: questions, system prompts, parts.
_REMEMBERED = 512
#: Characters from which on a text may have to be cut.
_LONG = 2048


class TokenCounts:
    """Token counts over one frame."""

    def __init__(self, frame: Frame) -> None:
        self._tokens = FastTokens(frame)
        self._known: dict[str, int] = {}
        self._around = {role: frame.cost([Message(role, "")]) for role in ROLES}
        self._stop = sum(len(part.ids) for part in frame.segments([Message("assistant", "")]) if part.is_trained)
        self._asked = lru_cache(maxsize=_REMEMBERED)(self.fresh)
        self.ends = lru_cache(maxsize=2)(self._tokens.ends)

    def learn(self, texts: Iterable[str]) -> None:
        """Count `texts` in one call of the tokenizer; what was learnt before is forgotten."""
        new = dict.fromkeys(texts)
        known = {text: self._known[text] for text in new if text in self._known}
        unknown = [text for text in new if text not in known]
        counts = self._tokens.count_texts(unknown, keep_from=_LONG)
        self._known = known | dict(zip(unknown, counts, strict=True))

    def fresh(self, text: str) -> int:
        """Return the tokens of `text` as content, without remembering it."""
        return self._tokens.count_texts([text])[0]

    def text(self, text: str) -> int:
        """Return the tokens of `text` as content."""
        known = self._known.get(text)
        return self._asked(text) if known is None else known

    def texts(self, texts: Sequence[str]) -> list[int]:
        """Return the tokens of each text; those not known yet are counted in one call and kept with what was learnt."""
        unknown = [text for text in dict.fromkeys(texts) if text not in self._known]
        self._known.update(zip(unknown, self._tokens.count_texts(unknown), strict=True))
        return [self._known[text] for text in texts]

    def messages(self, messages: Sequence[Message]) -> int:
        """Return the tokens of a conversation: `Frame.cost`."""
        return sum(self._around[message.role] + self.text(message.content) for message in messages)

    def trained(self, messages: Sequence[Message]) -> int:
        """Return the tokens that the model learns to say, stop tokens included."""
        return sum(self.text(message.content) + self._stop for message in messages if message.is_trained)
