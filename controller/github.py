"""Every convention of GitHub Actions: inputs, who may read what, masks, annotations, outputs, the step summary.

Side effects: reads the event file; writes workflow commands to `out` and text to the runner's command files. Away
from GitHub (no `GITHUB_ACTIONS=true`) it reads nothing and prints no command.

    Runner(os.environ, sys.stdout).annotate("warning", "deadline_passed", "still running after 340 minutes")
    ::warning title=deadline_passed::still running after 340 minutes
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from controller.settings import is_maskable
from corpus_builder.errors import ProjectError

#: The inputs of the workflow's form and of the composite action, one name in both (`controller/inputs.py`).
INPUT_NAMES = ("action", "base_model_dir", "dialog_zip", "confirm_override", "recipe", "watch_minutes", "fresh_zip")
WITH_PREFIX = "ZY_INPUT_"  # how `action.yml` hands over its `with:` values
_BREAKS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f\x85\u2028\u2029]")


@dataclass(frozen=True)
class Runner:
    """The machine the controller runs on, as far as GitHub tells about it."""

    environ: Mapping[str, str]
    out: TextIO

    @property
    def is_github(self) -> bool:
        """Whether this is a job of GitHub Actions."""
        return self.environ.get("GITHUB_ACTIONS") == "true"

    @property
    def is_composite(self) -> bool:
        """Whether our composite action calls: then a passed deadline is a warning and the step stays green."""
        return self.is_github and f"{WITH_PREFIX}ACTION" in self.environ

    @property
    def run_url(self) -> str:
        """The page of this run, empty away from GitHub."""
        env = self.environ
        if not self.is_github or not env.get("GITHUB_RUN_ID"):
            return ""
        server, repository = env.get("GITHUB_SERVER_URL", "https://github.com"), env.get("GITHUB_REPOSITORY", "")
        return f"{server}/{repository}/actions/runs/{env['GITHUB_RUN_ID']}"

    @property
    def commit(self) -> str:
        """The commit of the job, empty away from GitHub."""
        return self.environ.get("GITHUB_SHA", "") if self.is_github else ""

    def read_inputs(self) -> dict[str, str]:
        """Return what the person or the calling workflow gave, as text; empty values are left out.

        The form's values come from the event file, never through a step's environment; a `with:` value of the
        composite action wins over a form field of the same name.
        """
        if not self.is_github:
            return {}
        given = {**self._dispatch_inputs(), **self._with_values()}
        return {name: text for name, text in given.items() if text != ""}

    def _dispatch_inputs(self) -> dict[str, str]:
        if self.environ.get("GITHUB_EVENT_NAME") != "workflow_dispatch":
            return {}
        inputs = self._event().get("inputs")
        if not isinstance(inputs, dict):
            return {}
        return {name: _input_text(name, inputs[name]) for name in INPUT_NAMES if inputs.get(name) is not None}

    def _with_values(self) -> dict[str, str]:
        values = {name: self.environ.get(WITH_PREFIX + name.upper(), "") for name in INPUT_NAMES}
        return {name: text for name, text in values.items() if text != ""}

    def _event(self) -> dict[str, Any]:
        """Return the event, `{}` when there is no file; a broken file is an error, not an empty form."""
        path = self.environ.get("GITHUB_EVENT_PATH", "")
        if not path:
            return {}
        try:
            event = json.loads(Path(path).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise ProjectError("input_invalid", name="GITHUB_EVENT_PATH", reason="reason.event_file") from error
        return event if isinstance(event, dict) else {}

    def sees(self) -> str:
        """Return the highest privacy class that readers of this job's log may see (design 4.9).

        A public repository, or one of unknown visibility: `public`. A private one: `named`. A terminal of one's
        own: `text`.
        """
        if not self.is_github:
            return "text"
        try:
            repository = self._event().get("repository")
        except ProjectError:
            return "public"
        is_private = isinstance(repository, dict) and repository.get("private") is True
        return "named" if is_private else "public"

    def mask(self, value: str) -> None:
        """Tell the runner never to print `value`, which is one line; too short a value would garble every number."""
        if self.is_github and is_maskable(value):
            self._say(f"::add-mask::{escape_data(value)}")

    def annotate(self, level: str, title: str, message: str) -> None:
        """Put `message` on the run's page: `error`, `warning` or `notice`. Public words only."""
        if self.is_github:
            self._say(f"::{level} title={escape_property(title)}::{escape_data(message)}")

    def _say(self, command: str) -> None:
        self.out.write(command + "\n")
        self.out.flush()

    def write_output(self, name: str, value: str) -> None:
        """Set the step's output `name`; the delimiter is random, so that no value can end it early."""
        delimiter = f"zy_{secrets.token_hex(16)}"
        self._append("GITHUB_OUTPUT", f"{name}<<{delimiter}\n{value}\n{delimiter}\n")

    def write_summary(self, markdown: str) -> None:
        """Add `markdown` to the step's summary; away from GitHub, to the file of that name if one is given."""
        self._append("GITHUB_STEP_SUMMARY", markdown.rstrip("\n") + "\n")

    def _append(self, variable: str, text: str) -> None:
        path = self.environ.get(variable, "")
        if path:
            with open(path, "a", encoding="utf-8") as file:
                file.write(text)


def _input_text(name: str, value: Any) -> str:
    """Return a form's value as text: GitHub sends booleans and numbers as JSON or as strings."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return str(value)
    raise ProjectError("input_invalid", name=name, reason="reason.one_value")


def escape_data(text: str) -> str:
    """Return `text` for the message of a workflow command. Source: actions/toolkit, command.ts."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def escape_property(text: str) -> str:
    """Return `text` for a property (`title=`) of a workflow command."""
    return escape_data(text).replace(":", "%3A").replace(",", "%2C")


def defuse(line: str) -> str:
    """Return one line of foreign output that the runner cannot take for a workflow command.

    The runner reads `::name::` at the start of a line and `##[name]` anywhere in it; a carriage return starts a
    line too.
    """
    flat = _BREAKS.sub(" ", line)
    if flat.lstrip().startswith("::"):
        flat = flat.replace("::", ": :", 1)
    return flat.replace("##[", "## [")
