"""Where a machine is, how long it has to answer, and who logs in, as people type it. Pure, quick to import.

>>> parse_jump("me@door.example:2200")
('me', 'door.example', 2200)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

CONNECT_TIMEOUT_S = 8  # three attempts and their pauses stay below 30 s
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_HOST = re.compile(r"[\w.:%][\w.:%-]*\Z")
_USER = re.compile(r"[\w.+][\w.+@%\\-]*\Z")


def checked_host(text: str) -> str:
    """Return a host name or address; raise ValueError."""
    if text.startswith("-") or re.search(r"\s", text) or _CONTROL.search(text):
        raise ValueError("reason.host_spaces")
    if "@" in text or "/" in text:
        raise ValueError("reason.host_only")
    if text.count(":") == 1:
        raise ValueError("reason.host_port")
    if not _HOST.match(text):
        raise ValueError("reason.host_unknown_form")
    return text


def checked_user(text: str) -> str:
    """Return a user name; raise ValueError."""
    if not _USER.match(text):
        raise ValueError("reason.user_name")
    return text


def checked_port(text: Any) -> int:
    """Return the port that `text` spells; raise ValueError."""
    if not (isinstance(text, str) and re.fullmatch(r"[0-9]{1,5}", text) and 1 <= int(text) <= 65535):
        raise ValueError("reason.port")
    return int(text)


def parse_jump(text: str) -> tuple[str | None, str, int]:
    """Return user, host and port of `user@host:port`; the user is None when it is the box's. Raises ValueError."""
    match = re.fullmatch(r"(?:([^@]+)@)?(\[[^\]]+\]|[^:@]+)(?::([0-9]+))?", text)
    if match is None:
        raise ValueError("reason.jump")
    user = checked_user(match[1]) if match[1] else None
    return user, checked_host(match[2].strip("[]")), checked_port(match[3] or "22")


def first_hop(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return host and port of the first machine on the way, None where the settings alone don't tell it.

    The settings are not checked here: whoever connects early must be able to let go again.
    """
    given = {name: environ.get(f"ZY_GPU_{name}", "").strip() for name in ("HOST", "PORT", "JUMP", "KEY", "PASSWORD")}
    if not given["HOST"] or not (given["KEY"] or given["PASSWORD"]):
        return None  # without a key it may be a laptop, whose own ssh knows the way
    try:
        host, port = checked_host(given["HOST"]), checked_port(given["PORT"] or "22")
        return parse_jump(given["JUMP"])[1:] if given["JUMP"] else (host, port)
    except ValueError:
        return None
