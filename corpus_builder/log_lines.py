"""Lines of our own logs: a tag, a sentence, and values that carry their privacy class. Pure.

Runs on the box too: standard library and Python 3.8 only. The log on the box keeps names; whoever shows a log to
people who may not see them takes `public_line`. Anything that is not one of our lines is not public.

    [dialog] ⟦2025-05 lighthouse.md⟧: 12 turns, 1 sample          as written
    [dialog] #a3f2: 12 turns, 1 sample                            as shown in public
"""

import hashlib
import re
from typing import Optional

from corpus_builder.errors import ERROR_PREFIX, NAMED, PUBLIC, Value, privacy_class

TAGS = ("soul", "dialog", "tool", "corpus", "fetch", "setup", "train", "check", "environment")
_OURS = re.compile(r"(ZY_PROGRESS |ZY_EVENT |\[(?:%s)\] )" % "|".join(TAGS))
_NAMED = re.compile(r"⟦([^⟧]*)⟧")


def log_line(tag: str, sentence: str, **values: Value) -> str:
    """Return one line: `sentence` with its `{values}`; named values are marked, text values only counted."""
    if tag not in TAGS:
        raise ValueError("no such tag: %s" % tag)
    return "[%s] %s" % (tag, sentence.format(**{key: _marked(value) for key, value in values.items()}))


def _marked(value: Value) -> str:
    kind = privacy_class(value)
    one_line = re.sub(r"[\x00-\x1f\x7f\u2028\u2029]", " ", str(value))
    if kind == PUBLIC:
        return one_line
    if kind == NAMED:
        return "⟦%s⟧" % one_line.replace("⟧", "]]")
    return "<%d characters>" % len(str(value))


def short_hash(value: str) -> str:
    """Return the four hex digits by which a name is told from another in public."""
    return hashlib.sha256(value.encode("utf-8", "surrogatepass")).hexdigest()[:4]


def public_line(line: str) -> Optional[str]:
    """Return what everybody may see of one log line: our own line with names replaced, or None."""
    match = _OURS.search(line)
    if match is None or line.startswith(ERROR_PREFIX) or line[: match.start()].strip(" \r[]:0123456789rank"):
        return None
    return _NAMED.sub(lambda named: "#" + short_hash(named.group(1)), line[match.start() :]).rstrip()
