"""The arguments of an operation, checked before anything uses them: whatever arrives is data, never words of a shell.

Runs on the box: standard library and Python 3.8 only. Pure but for `~`, which is the box's own.
"""

import os
import posixpath
import re
from typing import Any, Dict, List, Mapping, Optional, Pattern

from corpus_builder.errors import ProjectError

DIGEST = re.compile(r"[0-9a-f]{8,64}\Z")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{0,63}\Z")
HOST = re.compile(r"[\w.:\[\]-]{1,255}\Z")
SEES = ("public", "named", "text")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


class Arguments:
    """Typed access; every refusal is `input_invalid` and names the argument."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        if not isinstance(values, dict):
            raise _refused("args", "must be an object")
        self.values = values

    def optional_text(self, name: str, pattern: Optional[Pattern[str]] = None) -> Optional[str]:
        """Return a text that matches `pattern` as a whole, None when it is not given."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or "\0" in value:
            raise _refused(name, "must be a text")
        if pattern is not None and not pattern.match(value):
            raise _refused(name, "has a form that is not taken")
        return value

    def text(self, name: str, pattern: Optional[Pattern[str]] = None) -> str:
        """Return a text that must be given."""
        value = self.optional_text(name, pattern)
        if value is None:
            raise _refused(name, "is missing")
        return value

    def word(self, name: str, choices: Any, default: Optional[str] = None) -> str:
        """Return one of `choices`."""
        value = self.values.get(name, default)
        if value not in choices:
            raise _refused(name, "must be one of %s" % ", ".join(choices))
        return str(value)

    def optional_path(self, name: str) -> Optional[str]:
        """Return an absolute path, `~` expanded, None when it is not given."""
        value = self.optional_text(name)
        if value is None:
            return None
        return absolute_path(name, value)

    def path(self, name: str) -> str:
        """Return an absolute path that must be given."""
        return absolute_path(name, self.text(name))

    def count(self, name: str, default: int, most: int) -> int:
        """Return a whole number from 0 to `most`."""
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise _refused(name, "must be a whole number from 0 on")
        return min(value, most)

    def mapping(self, name: str) -> Dict[str, Any]:
        """Return an object; empty when it is not given."""
        value = self.values.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise _refused(name, "must be an object")
        return value

    def variables(self, name: str) -> Dict[str, str]:
        """Return environment variables."""
        values = self.mapping(name)
        if not all(
            VARIABLE.match(key) and isinstance(value, str) and "\0" not in value for key, value in values.items()
        ):
            raise _refused(name, "must hold texts under names of variables")
        return dict(values)

    def texts(self, name: str, pattern: Pattern[str]) -> List[str]:
        """Return a list of texts that match `pattern`; empty when it is not given."""
        values = self.values.get(name) or []
        if not isinstance(values, list) or not all(isinstance(item, str) and pattern.match(item) for item in values):
            raise _refused(name, "must be a list of names")
        return list(values)


def absolute_path(name: str, value: str) -> str:
    """Return `value` with `~` expanded; raise unless it is an absolute path in its plainest form."""
    path = os.path.expanduser(value)
    if _CONTROL.search(path) or not path.startswith("/") or path.startswith("//"):
        raise _refused(name, "must be an absolute path")
    if posixpath.normpath(path) != path.rstrip("/") or path.strip("/") == "":
        raise _refused(name, "must not hold `..`, `.` or doubled slashes, nor be the root folder")
    return path.rstrip("/")


def _refused(name: str, reason: str) -> ProjectError:
    return ProjectError("input_invalid", name=name, reason=reason)
