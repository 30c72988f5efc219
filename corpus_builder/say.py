"""Codes and values -> sentences in Chinese or English, from the gettext catalogues beside this file.

The only place where a code becomes words. Side effects: reads the catalogues, once per language.
"""

from __future__ import annotations

import gettext
import re
from functools import cache
from pathlib import Path

from corpus_builder.errors import NAMED, PUBLIC, TEXT, ProjectError, Value, privacy_class
from corpus_builder.log_lines import short_hash

LANGUAGES = ("zh", "en")
LOCALE_DIR = Path(__file__).parent / "locale"
DOMAIN = "zyforge"
#: Keys of the catalogue in a value of an error, so that reasons are said in the language: "reason.in_line 3: reason.x".
REASON = re.compile(r"\breason\.[a-z0-9_]+")
#: Which classes a reader may see: everything, names but no text, or numbers and our own words only.
SEE_ALL = frozenset({PUBLIC, NAMED, TEXT})
SEE_NAMES = frozenset({PUBLIC, NAMED})
SEE_PUBLIC = frozenset({PUBLIC})


@cache
def _catalogue(lang: str) -> gettext.NullTranslations:
    return gettext.translation(DOMAIN, LOCALE_DIR, languages=[lang])


def say(key: str, lang: str, /, *, see: frozenset[str] = SEE_NAMES, **values: Value) -> str:
    """Return the sentence `key` in `lang` with its values; those that `see` does not allow become a short hash.

    Raises:
        KeyError: the catalogue has no such sentence.
    """
    sentence = _catalogue(lang).gettext(key)
    if sentence == key:
        raise KeyError(f"no sentence {key!r} in {lang}")
    return sentence.format_map({name: shown(value, see) for name, value in values.items()})


def shown(value: Value, see: frozenset[str]) -> str:
    """Return `value` as a reader with `see` may have it: itself, or `#a3f2` for what is not theirs to see."""
    if privacy_class(value) in see:
        return f"{value:g}" if isinstance(value, float) else str(value)
    return "#" + short_hash(str(value))


def error_lines(error: ProjectError, lang: str, *, see: frozenset[str] = SEE_NAMES) -> tuple[str, str, str]:
    """Return what happened, where, and what to do next."""
    values = {name: spoken(value, lang) for name, value in error.values.items()}
    what, where, following = (
        say(f"{error.code}.{part}", lang, see=see, **values) for part in ("what", "where", "next")
    )
    return what, where, following


def spoken(value: Value, lang: str) -> Value:
    """Return a value with every sentence that it names (`reason.line_break`) said, any other as it is."""
    if privacy_class(value) != PUBLIC or not isinstance(value, str):
        return value
    return REASON.sub(lambda key: _catalogue(lang).gettext(key[0]), value)


def format_error(error: ProjectError, lang: str, *, see: frozenset[str] = SEE_NAMES) -> str:
    """Return the three lines that a person reads."""
    what, where, following = error_lines(error, lang, see=see)
    labels = {"zh": ("错误", "位置", "下一步"), "en": ("error", "where", "next")}[lang]
    return "\n".join(f"{label}: {line}" for label, line in zip(labels, (what, where, following), strict=True))
