"""What the person asked for, checked: no input reaches a box, a path or a log before it has passed here. Pure.

Neither `act` nor `workflow_call` nor the REST interface checks choices, types or required inputs, so nothing is
trusted because a form promised it.

    check_inputs({"action": "setup-only", "watch_minutes": "30"}) -> Inputs(action="setup-only", watch_minutes=30, …)
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from controller.cursor import Cursor, parse_cursor
from corpus_builder.config import BOOLEANS
from corpus_builder.errors import ProjectError

ACTIONS = ("setup-only", "setup-and-train", "tail-log", "status", "kill", "doctor")
DEFAULT_RECIPE = "coding_v1"
MAX_WATCH_MINUTES = 340  # a job ends at 355, GitHub's own limit is 360
RECIPE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
RECIPE_PATH = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./ -]{0,250}\.ya?ml\Z")
DIALOG_SCHEMES = ("https", "s3", "cos")
MAX_CHARS = 2000
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """One wish, checked. `base_model_dir` and `dialog_zip` are None where nothing was given."""

    action: str
    recipe: str = DEFAULT_RECIPE
    base_model_dir: str | None = None
    dialog_zip: str | None = None
    is_zip_fresh: bool = False  # fetch, or send, the ZIP again although the box has it
    is_confirmed: bool = False
    watch_minutes: int = MAX_WATCH_MINUTES
    cursor: Cursor | None = None  # tail-log: where to read on; None: the end
    is_following: bool = False  # tail-log
    recipe_sets: tuple[tuple[str, str], ...] = ()
    plan_sets: tuple[tuple[str, str], ...] = ()
    repo_root: Path = Path(".")


def check_inputs(given: Mapping[str, str], *, sets: Sequence[str] = (), repo_root: Path = Path(".")) -> Inputs:
    """Return the checked inputs; what is not given has its default.

    Args:
        given: Texts by the names of `github.INPUT_NAMES`; empty means not given.
        sets: `key=value` of the recipe, `plan.key=value` of the plan.

    Raises:
        ProjectError: `action_unknown`, `input_invalid`, `url_with_query` or `override_invalid`.
    """
    texts = {name: text for name, text in given.items() if text != ""}
    pairs = [parse_set(text) for text in sets]
    return Inputs(
        action=check_action(texts.get("action", "")),
        recipe=_check_recipe(texts.get("recipe", DEFAULT_RECIPE)),
        base_model_dir=_check_model_dir(texts.get("base_model_dir")),
        dialog_zip=_check_dialog_zip(texts.get("dialog_zip")),
        is_zip_fresh=_check_boolean("fresh_zip", texts.get("fresh_zip", "false")),
        is_confirmed=_check_boolean("confirm_override", texts.get("confirm_override", "false")),
        watch_minutes=_check_minutes(texts.get("watch_minutes", str(MAX_WATCH_MINUTES))),
        cursor=parse_cursor(texts["from_offset"]) if "from_offset" in texts else None,
        is_following=_check_boolean("follow", texts.get("follow", "false")),
        recipe_sets=tuple(pair for pair in pairs if not pair[0].startswith("plan.")),
        plan_sets=tuple((key[len("plan.") :], text) for key, text in pairs if key.startswith("plan.")),
        repo_root=repo_root,
    )


def check_action(action: str) -> str:
    """Return `action` if there is one of that name."""
    if action not in ACTIONS:
        raise ProjectError("action_unknown", action=_quoted(action), known=", ".join(ACTIONS))
    return action


def carries_a_key(address: str) -> bool:
    """Whether an address holds what opens it: a query (a signed link), or a user's name and password."""
    scheme, _, rest = address.strip().partition("://")
    return scheme.lower() in ("http", "https") and ("?" in rest or "@" in rest.partition("/")[0])


def parse_set(text: str) -> tuple[str, str]:
    """Return key and value of one `--set`."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ProjectError("override_invalid", key="--set", reason="reason.key_value")
    return key.strip(), value


def _check_recipe(text: str) -> str:
    """Return the name of a shipped recipe, or a path to one's own inside the repository."""
    _check_text("recipe", text)
    if RECIPE_NAME.match(text) and not text.endswith((".yaml", ".yml")):
        return text
    if not RECIPE_PATH.match(text) or ".." in text.split("/"):
        raise _invalid("recipe", "reason.recipe_name")
    return text


def _check_model_dir(text: str | None) -> str | None:
    if text is None:
        return None
    _check_text("base_model_dir", text)
    if not text.startswith("/"):
        raise _invalid("base_model_dir", "reason.absolute_path")
    return text


def _check_dialog_zip(text: str | None) -> str | None:
    """Return an address, a path on the box or a file here; what carries its own key is refused, never repeated."""
    if text is None:
        return None
    if carries_a_key(text):
        raise ProjectError("url_with_query", name="dialog_zip")
    _check_text("dialog_zip", text)
    if text.startswith(("/", "~/", "./", "../", "file:")):
        return text
    try:
        parts = urlsplit(text)
    except ValueError:
        raise _invalid("dialog_zip", "reason.dialog_address") from None
    if parts.scheme not in DIALOG_SCHEMES or not parts.netloc or parts.path in ("", "/"):
        raise _invalid("dialog_zip", "reason.dialog_address")
    return text


def _check_boolean(name: str, text: str) -> bool:
    try:
        return BOOLEANS[text.strip().lower()]
    except KeyError:
        raise _invalid(name, "reason.true_or_false") from None


def _check_minutes(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,4}", text) or int(text) > MAX_WATCH_MINUTES:
        raise _invalid("watch_minutes", "reason.watch_minutes")
    return int(text)


def _check_text(name: str, text: str) -> None:
    """Refuse what no honest value holds: control characters, a leading dash, blanks around it, excess length."""
    if _CONTROL.search(text):
        raise _invalid(name, "reason.line_break")
    if text.startswith("-") or text != text.strip() or len(text) > MAX_CHARS:
        raise _invalid(name, "reason.dash_or_blanks")


def _invalid(name: str, reason: str) -> ProjectError:
    return ProjectError("input_invalid", name=name, reason=reason)


def _quoted(text: str) -> str:
    """Return a short, one-line form of what was typed."""
    return json.dumps(text[:60], ensure_ascii=False)
