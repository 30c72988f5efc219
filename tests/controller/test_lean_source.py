"""The agent's sources without words for people: the same code, on the same lines."""

import ast

import pytest

from controller.lean_source import lean
from tests.test_architecture import box_files

TRICKY = '''"""Module."""
X = "# no comment"  # a comment
Y = """a
# no comment either
"""


class A:
    """Doc."""


def f(a,  # first
      b):
    """Doc
    over lines. 中文
    """
    # alone
    return (a +  # one
            b)
'''


def code_of(source: str) -> str:
    """Return what Python understands, docstrings taken out, lines included."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Expr(ast.Constant(""), lineno=node.body[0].lineno, col_offset=0, end_lineno=0)
    lines = [getattr(node, "lineno", None) for node in ast.walk(tree) if not isinstance(node, ast.Constant)]
    return ast.dump(tree) + str(lines)


@pytest.mark.parametrize("path", [path for path in box_files() if path.read_text()], ids=lambda path: path.stem)
def test_what_runs_is_the_same(path):
    source = path.read_text("utf-8")
    lean_source = lean(source)
    assert code_of(lean_source) == code_of(source)
    assert lean_source.count("\n") == source.count("\n")
    assert len(lean_source) < len(source)


def test_strings_that_look_like_comments_stay():
    shown = lean(TRICKY)
    assert code_of(shown) == code_of(TRICKY)
    scope: dict = {}
    exec(shown, scope)
    assert (scope["X"], scope["Y"], scope["f"](1, 2)) == ("# no comment", "a\n# no comment either\n", 3)
    assert "alone" not in shown
    assert "Doc" not in shown
