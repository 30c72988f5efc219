"""The plan: which sources become which samples (`configs/corpus/*.yaml`). A contract; pydantic at the file. Pure.

A person writes this file, so every key is checked and all problems appear at once (`corpus_builder.config`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator

from corpus_builder.archive_limits import Limits
from corpus_builder.config import Resolved, Section, load_config
from corpus_builder.json_paths import parse_path

Count = Annotated[int, Field(strict=True, gt=0)]  # strict: `true` and "3" are not counts
CountOrNone = Annotated[int, Field(strict=True, ge=0)]
Weight = Annotated[float, Field(gt=0, le=100)]
Words = tuple[str, ...]
Policy = Literal["redact", "report", "off"]
POLICIES: tuple[str, ...] = get_args(Policy)

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


class Exported(Section):
    """Files of chat data: where they lie, and what their samples count for."""

    files: Words = Field(min_length=1, description="patterns such as `**/conversations*.json`")
    place: Literal["dialogs", "repo"] = Field(
        "dialogs", description="where the patterns start: at `dialog_dir`, or at `repo_root`"
    )
    sample_class: Literal["relation", "data"] = "relation"
    weight: Weight = 1.0


class ExportSource(Exported):
    """Conversations as ChatGPT, Claude or VS Code (GitHub Copilot Chat) export them."""

    kind: Literal["chatgpt", "claude", "copilot"]


class ChatSource(Exported):
    """JSONL, or a list in JSON: ShareGPT's `conversations`, or OpenAI's `messages`."""

    kind: Literal["sharegpt", "messages"]
    sample_class: Literal["relation", "data"] = "data"


class JsonDialogSource(Exported):
    """Dialogs in JSON of any shape, by paths such as `conversation.session_#[]` (`corpus_builder/json_paths.py`)."""

    kind: Literal["json-dialog"]
    dialogs: str = Field("[]", description="from the top of the file to each dialog; empty: the file is one")
    turns: str = Field("turns[]", description="from a dialog to each turn")
    speaker: str = Field("speaker", description="in a turn: who speaks")
    text: str = Field("text", description="in a turn: what is said")
    user: Words = Field(("user", "human"), description="speakers beside the plan's")
    assistant: Words = Field(("assistant", "gpt", "bot", "model"), description="speakers beside the plan's")
    user_field: str | None = Field(None, description="in a dialog: the name of its user")
    assistant_field: str | None = Field(None, description="in a dialog: the name of its assistant")

    @field_validator("dialogs", "turns", "speaker", "text", "user_field", "assistant_field")
    @classmethod
    def _is_path(cls, path: str | None) -> str | None:
        parse_path(path or "")
        return path

    @field_validator("dialogs")
    @classmethod
    def _has_patterns_last(cls, path: str) -> str:
        if any(step.is_pattern for step in parse_path(path)[:-1]):
            raise ValueError("`#` and `*` may stand in its last key only")
        return path


#: Sources whose files are read item by item, however large they are.
EXPORTS = (ExportSource, ChatSource, JsonDialogSource)
Source = Annotated[
    SoulSource | DialogSource | ToolSource | ExportSource | ChatSource | JsonDialogSource, Field(discriminator="kind")
]


class Archive(Section):
    """How much the dialogs' ZIP may hold, with the ZIPs in it; a member that goes over a limit is left out by name."""

    max_members: Count = Limits().members
    max_gib: float = Field(Limits().total_bytes / 1024**3, gt=0, description="all members, unpacked")
    max_ratio: Count = Field(Limits().ratio, description="unpacked bytes per packed byte; more is a bomb")
    max_depth: CountOrNone = Field(Limits().depth, description="ZIPs in ZIPs in the ZIP")


class Gates(Section):
    """What must hold before a training may start (`stop`), and what is worth saying (`warn`). Counts of samples."""

    soul_files_found_share: float = Field(2 / 3, ge=0, le=1)
    relation_stop_below: CountOrNone = 1
    relation_warn_below: CountOrNone = 100
    dialog_rounds_warn_below: CountOrNone = 2
    total_stop_below: CountOrNone = 100
    total_warn_below: CountOrNone = 300


class Checks(Section):
    """What is looked for: `redact` puts the kind where the value stood, `report` counts it, `off` does not look."""

    private_key: Policy = "redact"
    access_key: Policy = "redact"
    token: Policy = "redact"
    url_password: Policy = "redact"
    phone: Policy = Field("report", description="mobile numbers of mainland China")
    id_card: Policy = Field("report", description="resident identity numbers, by date and check digit")
    bank_card: Policy = Field("report", description="by scheme and Luhn's check digit")
    email: Policy = "report"
    ip_address: Policy = Field("report", description="addresses of the open internet")
    duplicates: bool = Field(True, description="copies and near-copies are counted and named, none is dropped")
    near_duplicate_similarity: float = Field(0.8, ge=0.5, le=1, description="shared five-word shingles, of all")

    @property
    def policies(self) -> dict[str, str]:
        """The policy of each kind of finding."""
        return {kind: policy for kind, policy in self.model_dump().items() if policy in POLICIES}


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
    validation_share: float = Field(0.0, ge=0, lt=1, description="of the dialogs and documents; held out, whole")
    checks: Checks = Field(default_factory=lambda: Checks.model_validate({}))
    archive: Archive = Field(default_factory=lambda: Archive.model_validate({}))
    gates: Gates = Field(default_factory=lambda: Gates.model_validate({}))


def load_plan(path: Path, *, environment: Mapping[str, str], sets: Sequence[tuple[str, str]] = ()) -> Resolved[Plan]:
    """Return the plan in `path` with overrides applied; raise `config_invalid` naming every wrong key."""
    return load_config(Plan, path, environment_keys=ENVIRONMENT_KEYS, environment=environment, sets=sets)
