"""Pinned host keys: what `ZY_GPU_KNOWN_HOSTS` may hold, and the comparison with the key that a host shows.

Text as `known_hosts` has it (plain or hashed names, `[host]:port`, several names, patterns), or bare `SHA256:`
fingerprints. A line that cannot be used is reported by its number and voids nothing but itself. Nothing is ever
accepted because it is the first one seen. Pure, but for the exceptions.
"""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hashlib
import hmac
import re
from contextlib import suppress
from dataclasses import dataclass

import paramiko

from corpus_builder.errors import ProjectError

_FINGERPRINT = re.compile(r"(?:^|\s)(SHA256:[A-Za-z0-9+/]{43})=?(?:\s|$)")
#: Families of host keys in the order of preference, as the negotiation names them.
FAMILIES: tuple[tuple[str, ...], ...] = (
    ("ssh-ed25519",),
    ("ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521"),
    ("rsa-sha2-512", "rsa-sha2-256"),
)
_NEGOTIATED = {"ssh-rsa": FAMILIES[2]}  # an ssh-rsa key signs by rsa-sha2


@dataclass(frozen=True, slots=True)
class Pin:
    """One key that a host may show; `key_type` is None for a bare fingerprint."""

    fingerprint: str
    key_type: str | None


@dataclass(frozen=True, slots=True)
class PinnedKeys:
    """The pins that apply to one host; `problems` tells which lines could not be used, and why."""

    host: str
    port: int
    pins: tuple[Pin, ...]
    problems: tuple[str, ...]

    def holds(self, key: paramiko.PKey) -> bool:
        """Whether `key` is pinned for this host."""
        return any(hmac.compare_digest(pin.fingerprint, fingerprint(key.asbytes())) for pin in self.pins)

    def check(self, key: paramiko.PKey) -> None:
        """Raise `host_key_unknown` or `host_key_mismatch` unless `key` is pinned for this host."""
        if self.holds(key):
            return
        seen = fingerprint(key.asbytes())
        name = f"{self.host}:{self.port}"
        shown = f"{seen} ({key.get_name()})"
        if not self.pins:
            raise ProjectError("host_key_unknown", host=name, seen=shown, line=pin_line(self.host, self.port, key))
        expected = ", ".join(
            f"{pin.fingerprint} ({pin.key_type})" if pin.key_type else pin.fingerprint for pin in self.pins
        )
        raise ProjectError("host_key_mismatch", host=name, seen=shown, expected=expected)

    def preferences(self) -> tuple[tuple[str, ...], ...]:
        """Return key types to ask for first, one tuple per attempt.

        A server shows one of its keys: the one that the client likes best. For pinned lines one attempt with their
        types first is enough; a bare fingerprint does not tell its type, so each family gets its turn.
        """
        if any(pin.key_type is None for pin in self.pins):
            return FAMILIES
        known = [kind for pin in self.pins if pin.key_type for kind in _NEGOTIATED.get(pin.key_type, (pin.key_type,))]
        return (tuple(dict.fromkeys(known)),)


class PinPolicy(paramiko.MissingHostKeyPolicy):
    """Paramiko asks this about every host key, because its own list stays empty."""

    def __init__(self, pinned: PinnedKeys) -> None:
        self._pinned = pinned

    def missing_host_key(self, client: paramiko.SSHClient, hostname: str, key: paramiko.PKey) -> None:
        """Refuse `key` by an exception unless it is pinned; nothing has been sent or logged in by then."""
        self._pinned.check(key)


def fingerprint(blob: bytes) -> str:
    """Return `SHA256:…` of a public key, as `ssh-keygen -l` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode("ascii").rstrip("=")


def host_label(host: str, port: int) -> str:
    """Return a host as known_hosts writes it."""
    return host if port == 22 else f"[{host}]:{port}"


def pin_line(host: str, port: int, key: paramiko.PKey) -> str:
    """Return the known_hosts line that would pin `key`."""
    return f"{host_label(host, port)} {key.get_name()} {key.get_base64()}"


def parse_pins(text: str, *, host: str, port: int) -> PinnedKeys:
    """Return the keys that `text` pins for `host`.

    Lines for `[host]:port` win; without any, lines for the bare `host` count too, as in OpenSSH.

    Raises:
        ProjectError: `known_hosts_invalid`: there is text, and not one line of it can be used.
    """
    if "\n" not in text.strip() and "\\n" in text:
        text = text.replace("\\r", "").replace("\\n", "\n")
    labels = (host_label(host, port), host)
    found: dict[str, list[Pin]] = {label: [] for label in labels}
    revoked: set[str] = set()
    problems: list[str] = []
    usable = 0
    for number, line in enumerate(text.lstrip("\ufeff").splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        try:
            marker, names, pin = _parse_line(line)
        except ValueError as error:
            problems.append(f"reason.in_line {number}: {error}")
            continue
        usable += 1
        if marker == "@revoked":
            revoked.add(pin.fingerprint)
            continue
        for label in found:
            if names is None or _matches(names, label):
                found[label].append(pin)
    if problems and not usable:
        raise ProjectError("known_hosts_invalid", reason="; ".join(problems))
    pins = next((found[label] for label in labels if found[label]), [])
    kept = tuple(dict.fromkeys(pin for pin in pins if pin.fingerprint not in revoked))
    return PinnedKeys(host, port, kept, tuple(problems))


def usable_lines(text: str) -> str:
    """Return the lines of a `known_hosts` file that can pin a key; a person's own file may hold others."""
    kept = []
    for line in text.splitlines():
        with suppress(ValueError):
            _parse_line(line.strip())
            kept.append(line.strip() + "\n")
    return "".join(kept)


def _parse_line(line: str) -> tuple[str | None, str | None, Pin]:
    """Return marker, names and key of one line; names are None for a bare fingerprint. Raises ValueError."""
    if match := _FINGERPRINT.search(line):
        return None, None, Pin(match[1], None)
    if "SHA256:" in line:
        raise ValueError("reason.fingerprint_length")
    if re.search(r"(MD5:)?([0-9a-f]{2}:){15}[0-9a-f]{2}", line):
        raise ValueError("reason.fingerprint_md5")
    marker, _, rest = line.partition(" ") if line.startswith("@") else ("", "", line)
    if marker and marker != "@revoked":
        raise ValueError("reason.host_key_marker")
    words = rest.split()
    if len(words) < 3:
        raise ValueError("reason.host_key_shape")
    names, key_type, encoded = words[:3]
    try:
        blob = base64.b64decode(encoded, validate=True)
        inside = paramiko.Message(blob).get_text()
    except (binascii.Error, ValueError, IndexError, paramiko.SSHException) as error:
        raise ValueError("reason.host_key_cut") from error
    if inside != key_type:
        raise ValueError("reason.host_key_other_type")
    return marker or None, names, Pin(fingerprint(blob), key_type)


def _matches(names: str, label: str) -> bool:
    """Whether the names of a line (hashed, or patterns with `*`, `?` and `!`) mean `label`."""
    if names.startswith("|1|"):
        try:
            salt, digest = (base64.b64decode(part, validate=True) for part in names[3:].split("|"))
        except (binascii.Error, ValueError):
            return False
        return hmac.compare_digest(hmac.new(salt, label.encode(), hashlib.sha1).digest(), digest)
    is_match = False
    for name in names.lower().split(","):
        pattern = name.lstrip("!").replace("[", "[[]")  # only * and ? are wild in known_hosts
        if fnmatch.fnmatchcase(label.lower(), pattern):
            if name.startswith("!"):
                return False
            is_match = True
    return is_match
