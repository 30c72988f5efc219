"""Secrets and personal data in a text: where they stand and of which kind. Pure.

Cheap signs come first (an `@`, eleven digits in a row), so that a text without any costs little.

    find_sensitive("mail a@b.org") -> (Span(5, 12, "email"),)
"""

from __future__ import annotations

import ipaddress
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from functools import lru_cache

SECRETS = ("private_key", "url_password", "access_key", "token")
PERSONAL = ("email", "id_card", "bank_card", "phone", "ip_address")

_KEY_BLOCK = re.compile(
    r"-----BEGIN (?P<kind>(?:[A-Z0-9]+ ){0,3})PRIVATE KEY(?: BLOCK)?-----"
    r"(?:[\s\S]{0,20000}?-----END (?P=kind)PRIVATE KEY(?: BLOCK)?-----|(?:(?:\s|\\n)*[A-Za-z0-9+/=]{12,100}){0,500})"
)
_URL_PASSWORD = re.compile(
    r"[A-Za-z][A-Za-z0-9+.-]{0,19}://[^\s/:@\"'<>]{0,100}:(?P<value>[^\s/@\"'<>]{1,200})@(?=[^\s@])"
)
#: AWS, Tencent Cloud, Aliyun: documented prefixes of access key ids; Google's API keys.
_ACCESS_KEY = re.compile(
    r"(?<![A-Za-z0-9_+/-])(?:(?:AKIA|ASIA)[A-Z2-7]{16}|AKID[A-Za-z0-9]{13,40}|LTAI[A-Za-z0-9]{12,30}|AIza[A-Za-z0-9_-]{35})"
    r"(?![A-Za-z0-9_-])"
)
_ACCESS_KEY_SIGNS = ("AKIA", "ASIA", "AKID", "LTAI", "AIza")
#: GitHub, GitLab, Hugging Face, OpenAI and its like, Slack, npm, PyPI, and JSON web tokens.
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9_-])(?:gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_[A-Za-z0-9_]{50,255}|glpat-[A-Za-z0-9_-]{20,64}"
    r"|hf_[A-Za-z0-9]{30,64}|sk-[A-Za-z0-9_-]{20,200}|xox[abeoprs]-[A-Za-z0-9-]{10,200}|npm_[A-Za-z0-9]{36}"
    r"|pypi-[A-Za-z0-9_-]{50,255}|eyJ[A-Za-z0-9_-]{8,2000}\.eyJ[A-Za-z0-9_-]{8,4000}\.[A-Za-z0-9_-]{8,2000})"
)
_TOKEN_SIGNS = ("gh", "glpat-", "hf_", "sk-", "xox", "npm_", "pypi-", "eyJ")
_BEARER = re.compile(r"(?i)\bbearer[ \t]+(?P<value>[A-Za-z0-9._~+/-]{20,2000}=*)")
#: A name that promises a secret, then its value: `SecretKey: …`, `"access_key_secret": "…"`, `api-key=…`.
_ASSIGNED = re.compile(
    r"(?i)(?P<name>secret[_-]?(?:access[_-]?)?(?:key|id)|access[_-]?key(?:[_-]?(?:secret|id))?|api[_-]?key|app[_-]?secret"
    r"|client[_-]?secret|(?:auth|access|private|refresh)[_-]?token)[\"'`]?[ \t]*(?:[:=：]|=>)[ \t]*[\"'`]?"
    r"(?P<value>[A-Za-z0-9+/_.~-]{16,200}=*)"
)
_ASSIGNED_SIGNS = ("key", "secret", "token")
_EMAIL = re.compile(
    r"(?<![A-Za-z0-9._%+-])[A-Za-z0-9._%+-]{1,64}@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,62})\.){1,8}[A-Za-z]{2,24}(?![A-Za-z0-9])"
)
#: Eleven digits or more, with the blanks and dashes that people put between them. It begins with what it searches for,
#: and looks back from there: Python is then fast at passing over everything else.
_DIGITS = re.compile(
    r"[+0-9](?<![0-9A-Za-z_.][+0-9])(?:(?<=[0-9])|(?<=\+)[0-9])(?:[ -]?[0-9]){10,24}[Xx]?(?![0-9A-Za-z_])"
)
_PHONE = re.compile(r"(?:\+?86|0086)?1[3-9][0-9]{9}")  # MIIT's mobile segments: 13x to 19x
_ID_CARD = re.compile(r"[1-9][0-9]{5}(?P<year>(?:18|19|20)[0-9]{2})(?P<month>[0-9]{2})(?P<day>[0-9]{2})[0-9]{3}[0-9Xx]")
#: UnionPay, Visa, Mastercard, American Express, Discover, JCB: their first digits and lengths.
_BANK_CARD = re.compile(
    r"62[0-9]{14,17}|4[0-9]{15}|5[1-5][0-9]{14}|3[47][0-9]{13}|6(?:011|5[0-9]{2})[0-9]{12}|35[0-9]{14}"
)
_ID_WEIGHTS = (7, 9, 10, 5, 8, 4, 2, 1, 6, 3, 7, 9, 10, 5, 8, 4, 2)  # GB 11643-1999
_IPV4 = re.compile(r"[0-9](?<![0-9A-Za-z_.-][0-9])[0-9]{0,2}(?:\.[0-9]{1,3}){3}(?![0-9A-Za-z_-]|\.[0-9])")
_IPV6 = re.compile(r"(?<![0-9A-Za-z_:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![0-9A-Za-z_:]|\.[0-9])")
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")  # what IANA gives out; `a::b` in code is none of it


@dataclass(frozen=True, slots=True)
class Span:
    """One finding in a text, by character offsets."""

    start: int
    end: int
    kind: str


@lru_cache(maxsize=256)
def find_sensitive(text: str) -> tuple[Span, ...]:
    """Return the findings of `text` in order, none over another; the kinds of `SECRETS` win over the others."""
    starts: list[int] = []
    taken: list[Span] = []
    for find in (_private_keys, _url_passwords, _access_keys, _tokens, _emails, _numbers, _addresses):
        for span in find(text):
            at = bisect_left(starts, span.start)
            is_free = (at == 0 or taken[at - 1].end <= span.start) and (at == len(taken) or span.end <= starts[at])
            if is_free:
                starts.insert(at, span.start)
                taken.insert(at, span)
    return tuple(taken)


def _private_keys(text: str) -> Iterator[Span]:
    if "PRIVATE KEY" in text:
        for found in _KEY_BLOCK.finditer(text):
            yield Span(found.start(), found.start() + len(found[0].rstrip()), "private_key")


def _url_passwords(text: str) -> Iterator[Span]:
    if "://" in text:
        yield from (Span(*found.span("value"), "url_password") for found in _URL_PASSWORD.finditer(text))


def _access_keys(text: str) -> Iterator[Span]:
    if any(sign in text for sign in _ACCESS_KEY_SIGNS):
        yield from (Span(*found.span(), "access_key") for found in _ACCESS_KEY.finditer(text))
    lowered = text.lower()
    if any(sign in lowered for sign in _ASSIGNED_SIGNS):
        for found in _ASSIGNED.finditer(text):
            if _looks_random(found["value"]):
                kind = "token" if found["name"].lower().endswith("token") else "access_key"
                yield Span(*found.span("value"), kind)


def _looks_random(value: str) -> bool:
    """Whether a value may be a secret: letters and digits mixed, not a word, a path or a stand-in like `xxxx`."""
    letters = sum(character.isalpha() for character in value)
    digits = sum(character.isdigit() for character in value)
    return letters >= 4 and digits >= 3 and len(set(value)) >= 8


def _tokens(text: str) -> Iterator[Span]:
    if any(sign in text for sign in _TOKEN_SIGNS):
        yield from (Span(*found.span(), "token") for found in _TOKEN.finditer(text))
    if "earer" in text or "EARER" in text:
        for found in _BEARER.finditer(text):
            if _looks_random(found["value"]):
                yield Span(*found.span("value"), "token")


def _emails(text: str) -> Iterator[Span]:
    if "@" in text:
        yield from (Span(*found.span(), "email") for found in _EMAIL.finditer(text))


def _numbers(text: str) -> Iterator[Span]:
    for found in _DIGITS.finditer(text):
        digits = re.sub(r"[ -]", "", found[0])
        for kind, holds in _NUMBER_KINDS:
            if holds(digits):
                yield Span(*found.span(), kind)
                break


def is_id_card(digits: str) -> bool:
    """Whether `digits` is a resident identity number: a date that exists, and the check digit of GB 11643."""
    found = _ID_CARD.fullmatch(digits)
    if found is None:
        return False
    try:
        date(int(found["year"]), int(found["month"]), int(found["day"]))
    except ValueError:
        return False
    total = sum(weight * int(digit) for weight, digit in zip(_ID_WEIGHTS, digits, strict=False))
    return "10X98765432"[total % 11] == digits[-1].upper()


def is_bank_card(digits: str) -> bool:
    """Whether `digits` is a card number: a known scheme's first digits and length, and Luhn's check digit."""
    if not _BANK_CARD.fullmatch(digits):
        return False
    doubled = [int(digit) * (1 + at % 2) for at, digit in enumerate(reversed(digits))]
    return sum(value - 9 if value > 9 else value for value in doubled) % 10 == 0


def is_phone(digits: str) -> bool:
    """Whether `digits` is a mobile number of mainland China, with or without the country's code."""
    return _PHONE.fullmatch(digits) is not None


_NUMBER_KINDS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("id_card", is_id_card),
    ("bank_card", is_bank_card),
    ("phone", is_phone),
)


def _addresses(text: str) -> Iterator[Span]:
    """Yield addresses of the open internet; those of a home network or an example belong to nobody."""
    for pattern, sign in ((_IPV4, "."), (_IPV6, ":")):
        if sign in text:
            for found in pattern.finditer(text):
                if _is_global(found[0]):
                    yield Span(*found.span(), "ip_address")


def _is_global(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return address.is_global and (address.version == 4 or address in _GLOBAL_UNICAST)
