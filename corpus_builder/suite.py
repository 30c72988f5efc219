"""The suite: what the model must answer (`configs/accept/*.yaml`), and how an answer is judged. A contract. Pure."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from corpus_builder.config import Resolved, Section, load_config
from corpus_builder.plan import Count, CountOrNone, Words


class Question(Section):
    """One question. Comparisons ignore case; an answer is right if every given rule holds."""

    ask: str = Field(min_length=1)
    any_of: Words = Field((), description="at least one of these occurs in the answer")
    all_of: Words = Field((), description="each of these occurs in the answer")
    none_of: Words = Field((), description="none of these occurs in the answer")


class Suite(Section):
    """Questions that are not in the corpus. `pass_at_least` right answers make the model ready."""

    name: str
    system_prompt: str | None = None
    max_new_tokens: Count = 48
    pass_at_least: Count
    before_at_most: CountOrNone | None = Field(
        None, description="right answers of the base model that leave training something to teach"
    )
    questions: tuple[Question, ...] = Field(min_length=1)


def load_suite(path: Path) -> Resolved[Suite]:
    """Return the suite in `path`; raise `config_invalid` naming every wrong key."""
    return load_config(Suite, path, environment_keys={}, environment={})


def is_right(question: Question, answer: str) -> bool:
    """Whether `answer` meets every rule of `question`; an empty answer never does."""
    said = answer.casefold()
    return (
        bool(said.strip())
        and (not question.any_of or any(word.casefold() in said for word in question.any_of))
        and all(word.casefold() in said for word in question.all_of)
        and not any(word.casefold() in said for word in question.none_of)
    )
