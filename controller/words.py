"""The catalogue's sentences for one reader: a language, and the privacy classes they may see. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from corpus_builder.errors import Value
from corpus_builder.say import say, shown


@dataclass(frozen=True, slots=True)
class Words:
    """Says catalogue keys to one reader."""

    lang: str
    see: frozenset[str]

    def __call__(self, key: str, /, **values: Value) -> str:
        """Return the sentence `key`."""
        return say(key, self.lang, see=self.see, **values)

    def shown(self, value: Value) -> str:
        """Return a value as this reader may have it."""
        return shown(value, self.see)

    def or_itself(self, prefix: str, name: str) -> str:
        """Return the word for `name`, or `name` where a newer box knows one that we don't."""
        try:
            return self(f"{prefix}.{name}")
        except KeyError:
            return name

    def state(self, name: str) -> str:
        """Return the word for a state of a run."""
        return self.or_itself("state", name)

    def sample_class(self, name: str) -> str:
        """Return the word for a class of samples."""
        return self.or_itself("class", name)

    def gate(self, name: str) -> str:
        """Return the word for a gate."""
        return self.or_itself("gate", name)

    def kind(self, name: str) -> str:
        """Return the word for a run or a setup."""
        return self.or_itself("kind", name)
