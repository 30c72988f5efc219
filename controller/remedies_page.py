"""Known failures as a page for people: `python -m controller.remedies_page` writes docs/remedies.md from the table.

Side effects: `main` writes that file; a test fails when it is not what the table and the catalogues say.
"""

from __future__ import annotations

from pathlib import Path

from corpus_builder.say import say
from trainer.remedies import REMEDIES

PAGE = Path(__file__).parents[1] / "docs" / "remedies.md"
HEAD = """# Known failures

Made from `trainer/remedies.py` and the catalogues by `python -m controller.remedies_page`; edit those, not this page.

When a setup or a run fails, its supervisor reads the end of the log and names the first row that is found there; the
summary says it in your language, and `status --json` carries its code as `remedy`. Causes stand above what they bring
about: when one process dies, the others lose it, and the log is full of timeouts that explain nothing. Each row is
proven by an excerpt in `tests/trainer/log_excerpts/`, beside a harmless one that looks like it.
"""


def remedies_page() -> str:
    """Return the page."""
    rows = [
        f"| `{row.code}` | {_cell(say(f'remedy.{row.code}', 'en'))} | {_cell(say(f'remedy.{row.code}', 'zh'))} "
        f"| {_cell(row.source)} |"
        for row in REMEDIES
    ]
    return "\n".join(
        [HEAD, "| code | cause: what helps | 原因：解决办法 | known from |", "|---|---|---|---|", *rows, ""]
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<")


def main() -> None:
    """Write docs/remedies.md."""
    PAGE.write_text(remedies_page(), "utf-8")


if __name__ == "__main__":
    main()
