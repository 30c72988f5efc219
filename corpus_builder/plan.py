"""The plan: which sources become which samples (`configs/corpus/*.yaml`). A contract; pydantic at the file. Pure.

A person writes this file, so every key is checked and all problems appear at once (`corpus_builder.config`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from corpus_builder.config import Resolved, Section, load_config

Count = Annotated[int, Field(strict=True, gt=0)]  # strict: `true` and "3" are not counts
CountOrNone = Annotated[int, Field(strict=True, ge=0)]
Weight = Annotated[float, Field(gt=0, le=100)]
Words = tuple[str, ...]

#: Which variable sets which key of a plan.
ENVIRONMENT_KEYS: Mapping[str, str] = {
    "ZY_SOUL_REPLICA": "soul_replica",
    "ZY_INCLUDE_CORPUS_JSONL": "include_corpus_jsonl",
    "ZY_REPO_ROOT": "repo_root",
    "ZY_BINGSHUO_DIALOG_DIR": "dialog_dir",
}


class Speakers(Section):
    """Names before the colon in a dialog, by role. The longest name wins, so an id inside a name never decides."""

    user: Words = Field(min_length=1)
    assistant: Words = Field(min_length=1)


class SoulQuestions(Section):
    """How a document is asked for. The first of each is the plan's wording; replicas take the next ones in turn."""

    whole: Words = Field(min_length=1, description="`{path}` is the file")
    section: Words = Field(min_length=1, description="`{path}` is the file, `{section}` the heading")


class SoulSource(Section):
    """Markdown documents: the whole file as one sample, each `##` section as one."""

    kind: Literal["soul"]
    paths: Words = Field((), description="files relative to `repo_root`; each missing one is named")
    globs: Words = Field((), description="patterns relative to `repo_root`; sorted")
    questions: SoulQuestions
    weight: Weight = 1.0
    whole_files: bool = True
    min_section_chars: CountOrNone = Field(100, description="shorter sections join their neighbour, none is dropped")


class DialogSource(Section):
    """A folder of Markdown dialogs (`dialog_dir`), one dialog a file."""

    kind: Literal["dialog"]
    weight: Weight = 1.0


class ToolSource(Section):
    """JSONL with `messages`, or `prompt` and `response`."""

    kind: Literal["tool"]
    path: str = Field(description="relative to `repo_root`; a missing file is said and is no error")
    weight: Weight = 0.5


Source = Annotated[SoulSource | DialogSource | ToolSource, Field(discriminator="kind")]


class Gates(Section):
    """What must hold before a training may start (`stop`), and what is worth saying (`warn`). Counts of samples."""

    soul_files_found_share: float = Field(2 / 3, ge=0, le=1)
    relation_stop_below: CountOrNone = 1
    relation_warn_below: CountOrNone = 100
    dialog_rounds_warn_below: CountOrNone = 2
    total_stop_below: CountOrNone = 100
    total_warn_below: CountOrNone = 300


class Plan(Section):
    """One corpus. Text is trained with `system_prompt` in front of `system_prompt_share` of its samples."""

    name: str
    repo_root: str = Field(".", description="where the sources' paths start; on the runner")
    dialog_dir: str | None = Field(None, description="dialogs on the box; default: the fetched archive's folder")
    system_prompt: str | None = None
    system_prompt_share: float = Field(1.0, ge=0, le=1, description="the rest learns to answer without one")
    soul_replica: Count = Field(5, description="lines per document or section, each with its own question")
    include_corpus_jsonl: bool = True
    speakers: Speakers
    sources: tuple[Source, ...] = Field(min_length=1)
    gates: Gates = Field(default_factory=lambda: Gates.model_validate({}))


def load_plan(path: Path, *, environment: Mapping[str, str], sets: Sequence[tuple[str, str]] = ()) -> Resolved[Plan]:
    """Return the plan in `path` with overrides applied; raise `config_invalid` naming every wrong key."""
    return load_config(Plan, path, environment_keys=ENVIRONMENT_KEYS, environment=environment, sets=sets)
