"""Source without its words for people: what a machine runs needs no comments and docstrings. Pure.

Every statement stays on its line, so that a traceback names the right one.

>>> lean('def f():\\n    "Return 1."\\n    return 1  # one\\n')
'def f():\\n    ""\\n    return 1\\n'
"""

from __future__ import annotations

import ast
import io
import tokenize


def lean(source: str) -> str:
    """Return Python source that does the same, line by line, without comments and docstrings."""
    lines = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            said = node.body[0]
            end = said.end_lineno or said.lineno
            lines[said.lineno - 1 : end] = [" " * said.col_offset + '""', *[""] * (end - said.lineno)]
    return "\n".join(lines) + "\n"
