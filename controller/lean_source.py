"""Source without its words for people: what a machine runs needs no comments and docstrings. Pure.

Every statement stays on its line, so that a traceback names the right one. Read by its lines, not by a parser: that
would take a tenth of a second of every action. It knows our own sources, each of which is proved to run the same
(tests/controller/test_lean_source.py), and leaves what it does not know.

>>> lean('def f():\\n    "Short."\\n    # alone\\n    return 1  # one\\n')
'def f():\\n    "Short."\\n\\n    return 1  # one\\n'
"""

from __future__ import annotations

_QUOTES = '"""'


def lean(source: str) -> str:
    """Return Python source that does the same, line by line, without docstrings and lines of comment."""
    lines: list[str] = []
    before = ":"  # the line of code above; a module's docstring stands as if below a colon
    is_inside = is_docstring = False
    for line in source.splitlines():
        text = line.strip()
        if is_inside:
            is_inside = _QUOTES not in text
            lines.append("" if is_docstring else line)
            continue
        if text.startswith("#"):
            lines.append("")
            continue
        is_docstring = text.startswith(_QUOTES) and before.endswith(":")
        is_inside = text.count(_QUOTES) % 2 == 1
        lines.append(line[: len(line) - len(line.lstrip())] + '""' if is_docstring else line)
        before = text or before
    return "\n".join(lines) + "\n"
