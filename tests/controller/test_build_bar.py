"""The bar of a corpus build, and its lines where nobody watches."""

import io

from controller.build_bar import BuildBar

LINES = [
    "[soul] missing: ⟦docs/none.md⟧",
    "[corpus] 2 file(s) to read",
    "[dialog] ⟦a.md⟧: 4 unit(s) -> 1 sample(s), utf-8",
    "[dialog] ⟦b.md⟧: 4 unit(s) -> 1 sample(s), gb18030, guessed_encoding 1",
    "[corpus] read 2 file(s), 0 unchanged",
]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(stream):
    bar = BuildBar(stream)
    for line in LINES:
        bar.add(line)
    bar.end()
    return stream.getvalue()


def test_lines_are_plain_where_there_is_no_terminal():
    assert shown(io.StringIO()) == "\n".join(LINES) + "\n"


def test_terminal_has_a_bar_and_only_the_lines_worth_reading():
    text = shown(Terminal())
    assert "[--------------------]   0 %  0/2" in text
    assert "[##########----------]  50 %  1/2" in text
    assert "a.md" not in text
    assert "guessed_encoding 1\n" in text
    assert text.endswith("0 unchanged\n\r\x1b[K")
