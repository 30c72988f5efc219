"""A corpus that was built, shown in a terminal, or its report said again in another language.

Run as `python -m corpus_builder.preview REQUEST.json`. Side effects: reads samples and manifest, writes to stdout;
`report` writes the page. With rich where it is installed, plain lines where it is not or nobody watches.

    {"what": "preview", "samples": "…/coding-sft.jsonl", "manifest": "….manifest.json", "see": "text",
     "class": "soul" | null, "rows": 3, "lang": "zh"}
    {"what": "report", "manifest": "….manifest.json", "report": "….report.html", "lang": "en"}
"""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from corpus_builder.errors import ProjectError, format_error_line
from corpus_builder.manifest import Manifest, load_manifest
from corpus_builder.private_file import save_private
from corpus_builder.report import format_report
from corpus_builder.sample import Message, Sample, parse_sample
from corpus_builder.say import LANGUAGES, SEE_ALL, SEE_NAMES, SEE_PUBLIC, say

SEES = {"text": SEE_ALL, "named": SEE_NAMES, "public": SEE_PUBLIC}
_COUNTS = ("samples", "unique", "validation_samples", "tokens", "trained_tokens", "lost_tokens")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_RULE = "─" * 60


def preview(request: Mapping[str, Any], out: TextIO) -> None:
    """Print the counts of each class and, to who may see texts, a few samples with the trained turns marked."""
    lang = request["lang"] if request["lang"] in LANGUAGES else LANGUAGES[0]
    manifest = load_manifest(Path(request["manifest"]))
    console = _console(out)
    _print_counts(manifest, lang, console, out)
    if request["see"] != "text":
        return
    shown = list(pick(Path(request["samples"]), manifest, request["class"], int(request["rows"])))
    for sample in shown:
        _print_sample(sample, console, out)
    total = sum(account.samples for name, account in manifest.classes.items() if request["class"] in (None, name))
    out.write(say("preview.shown", lang, shown=len(shown), total=total) + "\n")


def pick(path: Path, manifest: Manifest, wanted: str | None, rows: int) -> Iterator[Sample]:
    """Yield `rows` samples of each class (or of the one wanted), evenly spread, in the file's order.

    Raises:
        ProjectError: `corpus_missing`, when there is no samples file; `sample_invalid`.
    """
    places = {
        name: {at * account.samples // rows for at in range(rows)}
        for name, account in manifest.classes.items()
        if wanted in (None, name) and rows > 0
    }
    counts = dict.fromkeys(places, 0)
    try:
        file = path.open(encoding="utf-8", newline="\n")
    except OSError as error:
        raise ProjectError("corpus_missing", path=str(path)) from error
    with file:
        for number, line in enumerate(file, start=1):
            sample = parse_sample(line, path=path.name, line_number=number)
            at = counts.get(sample.sample_class, 0)
            counts[sample.sample_class] = at + 1
            if at in places.get(sample.sample_class, ()):
                yield sample


def _console(out: TextIO) -> Any:
    """Return rich's console where a person watches and rich is installed, else None."""
    if not out.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=out, highlight=False)


def _print_counts(manifest: Manifest, lang: str, console: Any, out: TextIO) -> None:
    head = [say(f"report.{key}", lang) for key in ("class", *_COUNTS)]
    rows = [
        [say(f"class.{name}", lang), *(f"{getattr(account, key):,}" for key in _COUNTS)]
        for name, account in manifest.classes.items()
    ]
    if console is not None:
        from rich.table import Table

        table = Table(title=say("report.title", lang, plan=manifest.plan_name))
        for at, name in enumerate(head):
            table.add_column(name, justify="right" if at else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    out.write(say("report.title", lang, plan=manifest.plan_name) + "\n")
    for row in rows:
        counts = ", ".join(f"{name} {count}" for name, count in zip(head[1:], row[1:], strict=True))
        out.write(f"{row[0]}: {counts}\n")


def _print_sample(sample: Sample, console: Any, out: TextIO) -> None:
    origin = f"{sample.origin.path}:{sample.origin.start_line}" if sample.origin is not None else ""
    head = _visible(f"{sample.sample_class} · {sample.source} · {origin} · {sample.weight:g} · {sample.split}")
    if console is None:
        out.write(f"{_RULE}\n{head}\n" + "".join(_plain(turn) for turn in sample.messages))
        return
    from rich.text import Text

    console.print(Text(f"{_RULE}\n{head}", style="dim"))
    for turn in sample.messages:
        console.print(Text(turn.role, style="bold"))
        console.print(Text(_visible(turn.content), style="green" if turn.is_trained else ""))


def _plain(turn: Message) -> str:
    """Return one turn: a trained one has a bar in front of each line."""
    mark = "┃ " if turn.is_trained else "  "
    lines = "".join(f"{mark}{line}\n" for line in _visible(turn.content).split("\n"))
    return f"[{turn.role}]\n{lines}"


def _visible(text: str) -> str:
    """Return `text` without what a terminal would obey: control characters are shown as `\\x1b`."""
    return _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def make_report(request: Mapping[str, Any], out: TextIO) -> None:
    """Write the public report of a manifest and print where it lies."""
    manifest = load_manifest(Path(request["manifest"]))
    path = Path(request["report"])
    save_private(format_report(manifest, request["lang"]), path)
    out.write(f"{path}\n")


def main(argv: Sequence[str]) -> int:
    """Do what the request in `argv[0]` asks for and return the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
    try:
        request = json.loads(Path(argv[0]).read_text("utf-8"))
        {"preview": preview, "report": make_report}[request["what"]](request, sys.stdout)
    except ProjectError as error:
        print(format_error_line(error), file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
