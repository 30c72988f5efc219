"""Private keys as people paste them: OpenSSH, PEM and PKCS#8; ed25519, ECDSA and RSA. Pure; nothing touches a disk.

A web form takes away last newlines, adds `\\r`, indents lines or turns newlines into the two characters `\\n`. None of
that changes a key, so all of it is undone before the key is read; what is left is reported in words a person can use.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import struct
import textwrap
from collections.abc import Callable
from typing import Any

import paramiko
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization

from corpus_builder.errors import ProjectError

_FRAME = re.compile(r"-----BEGIN ([A-Z0-9 ]+)-----(.*?)-----END \1-----", re.DOTALL)
_HEADER = re.compile(r"^(Proc-Type|DEK-Info): *(.+)$", re.MULTILINE)
_MAGIC = b"openssh-key-v1\0"
_CLASSES: dict[str, type[paramiko.PKey]] = {
    "ssh-ed25519": paramiko.Ed25519Key,
    "ecdsa-sha2-nistp256": paramiko.ECDSAKey,
    "ecdsa-sha2-nistp384": paramiko.ECDSAKey,
    "ecdsa-sha2-nistp521": paramiko.ECDSAKey,
    "ssh-rsa": paramiko.RSAKey,
    "EC PRIVATE KEY": paramiko.ECDSAKey,
    "RSA PRIVATE KEY": paramiko.RSAKey,
}
_UNREADABLE = (paramiko.SSHException, UnsupportedAlgorithm, ValueError, TypeError, IndexError, struct.error)
_PKCS8 = ("PRIVATE KEY", "ENCRYPTED PRIVATE KEY")


def load_private_key(text: str, passphrase: str | None = None) -> paramiko.PKey:
    """Return the private key in `text`.

    Raises:
        ProjectError: `key_invalid` with the reason; neither key nor passphrase is ever part of it.
    """
    label, pem = _straightened(text)
    kind, is_encrypted = _kind(label, pem)
    if is_encrypted and not passphrase:
        raise _invalid("reason.key_locked")
    opened_by = passphrase if is_encrypted else None
    if label not in _PKCS8 and kind not in _CLASSES:
        raise _invalid(f"reason.key_type ({kind})")
    try:
        if label in _PKCS8:
            return _rewritten(serialization.load_pem_private_key, pem, opened_by)
        try:
            return _CLASSES[kind].from_private_key(io.StringIO(pem), opened_by)
        except paramiko.SSHException:
            # paramiko 5.1 reads no key without a comment whose length needs no padding: every second ECDSA key
            return _rewritten(serialization.load_ssh_private_key, pem, opened_by)
    except _UNREADABLE:
        raise _invalid("reason.key_not_opened" if is_encrypted else "reason.key_damaged") from None


def is_locked(text: str) -> bool:
    """Whether the key in `text` asks for a passphrase, told without opening it; raise `key_invalid`."""
    label, pem = _straightened(text)
    return _kind(label, pem)[1]


def _straightened(text: str) -> tuple[str, str]:
    """Return the kind of frame and the key as `ssh-keygen` would have written it."""
    text = text.lstrip("\ufeff")
    if "\\n" in text:
        text = text.replace("\\r", "").replace("\\n", "\n")
    match = _FRAME.search(text)
    if match is None:
        raise _invalid(_why_no_key(text.strip()))
    label, inner = match[1], match[2].replace("\r", "\n")
    inner = "\n".join(line.strip() for line in inner.splitlines())
    if "PUBLIC" in label or "CERTIFICATE" in label:
        raise _invalid("reason.key_is_public")
    headers = "".join(f"{name}: {value}\n" for name, value in _HEADER.findall(inner))
    body = "\n".join(textwrap.wrap("".join(_HEADER.sub("", inner).split()), 64))
    if not body:
        raise _invalid("reason.key_no_body")
    return label, f"-----BEGIN {label}-----\n{headers}{chr(10) if headers else ''}{body}\n-----END {label}-----\n"


def _why_no_key(text: str) -> str:
    if not text:
        return "reason.key_empty"
    if re.match(r"(ssh-|ecdsa-|sk-)\S+ AAAA", text) or "BEGIN SSH2 PUBLIC KEY" in text:
        return "reason.key_is_public"
    if text.startswith("PuTTY-User-Key-File"):
        return "reason.key_putty"
    if "-----BEGIN" in text:
        return "reason.key_no_end"
    if "-----END" in text:
        return "reason.key_no_begin"
    return "reason.key_is_none"


def _kind(label: str, pem: str) -> tuple[str, bool]:
    """Return the type of the key and whether it is encrypted, read without opening it."""
    if label != "OPENSSH PRIVATE KEY":
        return label, label.startswith("ENCRYPTED") or "ENCRYPTED" in "".join(pem.splitlines()[1:2])
    try:
        blob = base64.b64decode("".join(pem.splitlines()[1:-1]), validate=True)
        if not blob.startswith(_MAGIC):
            raise ValueError
        message = paramiko.Message(blob[len(_MAGIC) :])
        cipher, _kdf, _options, _count = (
            message.get_text(),
            message.get_text(),
            message.get_string(),
            message.get_int(),
        )
        kind = paramiko.Message(message.get_string()).get_text()
    except (binascii.Error, ValueError, struct.error, UnicodeDecodeError):
        raise _invalid("reason.key_damaged") from None
    return kind or "unknown", cipher != "none"


def _rewritten(load: Callable[[bytes, bytes | None], Any], pem: str, passphrase: str | None) -> paramiko.PKey:
    """Return a key that paramiko cannot read, rewritten in memory as one that it can."""
    key = load(pem.encode("ascii"), passphrase.encode() if passphrase else None)
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    ).decode("ascii")
    kind, _ = _kind("OPENSSH PRIVATE KEY", text)
    if kind not in _CLASSES:
        raise _invalid(f"reason.key_type ({kind})")
    return _CLASSES[kind].from_private_key(io.StringIO(text))


def _invalid(reason: str) -> ProjectError:
    return ProjectError("key_invalid", reason=reason)
