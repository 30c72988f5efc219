"""Compiles `locale/*/LC_MESSAGES/zyforge.po` to `.mo`: run `python -m corpus_builder.catalogues` after an edit.

Side effects: writes the `.mo` files. Needs Babel (a development tool); the compiled files are in the repository.
"""

from __future__ import annotations

from datetime import datetime, timezone
from io import BytesIO
from pathlib import Path

from corpus_builder.say import DOMAIN, LANGUAGES, LOCALE_DIR


def po_path(lang: str) -> Path:
    """Return the file that people edit."""
    return LOCALE_DIR / lang / "LC_MESSAGES" / f"{DOMAIN}.po"


def compiled(lang: str) -> bytes:
    """Return the `.mo` bytes of a language."""
    from babel.messages.mofile import write_mo
    from babel.messages.pofile import read_po

    with po_path(lang).open("rb") as file:
        catalogue = read_po(file, locale=lang, abort_invalid=True)
    fixed = datetime(2000, 1, 1, tzinfo=timezone.utc)  # else the bytes would change with the clock
    catalogue.creation_date = catalogue.revision_date = fixed
    out = BytesIO()
    write_mo(out, catalogue)
    return out.getvalue()


def main() -> None:
    """Write the compiled catalogue of every language."""
    for lang in LANGUAGES:
        po_path(lang).with_suffix(".mo").write_bytes(compiled(lang))


if __name__ == "__main__":
    main()
