"""The dialog parser against `decode + splitlines` of the same bytes (target 0.2), and on hostile texts of two sizes."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.generated import ASSISTANT, USER, Writer
from benchmarks.measure import Claim, best_of, report
from corpus_builder.dialog import parse_dialog_md
from corpus_builder.plan import Speakers

SPEAKERS = Speakers(user=USER, assistant=ASSISTANT)
SIZE_BYTES = 8_000_000
#: Each makes a text of about `size` characters that a careless pattern would take quadratic time for.
HOSTILE: dict[str, Callable[[int], str]] = {
    "spaces before no name": lambda size: " " * size + "x",
    "a time, spaces, no colon": lambda size: "10:22" + " " * size + "Keeper x",
    "a name, spaces, no colon": lambda size: "Keeper" + " " * size + "x",
    "a name, stars": lambda size: ("Keeper" + "*" * 30 + "\n") * (size // 37),
    "stars": lambda size: "*" * size,
    "quote marks": lambda size: ">" * size,
    "fences": lambda size: "```\n" * (size // 4),
    "fences of growing length": lambda size: "\n".join("`" * (3 + at % 50) for at in range(size // 29)),
    "fences on speakers' lines": lambda size: "Keeper: ```\n" * (size // 12),
    "one line of backticks": lambda size: "` " * (size // 2),
    "turns of one side": lambda size: "Keeper: a\n" * (size // 10),
    "rules": lambda size: "Keeper: a\n" + "\n\n---" * (size // 5),
    "headings": lambda size: "Keeper: a\n" + "\n\n# b" * (size // 5),
    "unknown speakers": lambda size: "\n".join(f"Person {at}: a" for at in range(size // 16)),
    "front matter without an end": lambda size: "---\n" + "--- \n" * (size // 5),
    "empty lines": lambda size: "\n" * size,
    "brackets": lambda size: "Keeper" + "(" * size,
}


def compare(language: str) -> tuple[float, list[tuple[str, str]]]:
    """Return the ratio for dialogs of one language, and the numbers behind it."""
    texts = list(Writer(1, language).dialogs(SIZE_BYTES))
    encoded = [text.encode() for text in texts]
    size_mb = sum(map(len, encoded)) / 1e6
    found = best_of(
        {
            "floor": lambda: [data.decode().splitlines() for data in encoded],
            "parser": lambda: [parse_dialog_md(text, SPEAKERS) for text in texts],
        },
        rounds=5,
    )
    turns = sum(len(parse_dialog_md(text, SPEAKERS).turns) for text in texts)
    numbers = [
        (f"{language}: {len(texts)} dialogs, {turns} turns", f"{size_mb:.1f} MB"),
        (f"{language}: decode + splitlines", f"{size_mb / found['floor']:.0f} MB/s"),
        (f"{language}: parser", f"{size_mb / found['parser']:.0f} MB/s, {found['parser'] / turns * 1e6:.1f} µs a turn"),
    ]
    return found["floor"] / found["parser"], numbers


def growth(make: Callable[[int], str]) -> float:
    """Return how much longer the parser takes for four times the text: 4 if it is linear, 16 if quadratic."""
    small, large = make(250_000), make(1_000_000)
    found = best_of(
        {"small": lambda: parse_dialog_md(small, SPEAKERS), "large": lambda: parse_dialog_md(large, SPEAKERS)}, rounds=3
    )
    return found["large"] / max(found["small"], 1e-3)  # below a millisecond nothing can be told


def main() -> int:
    claims, numbers = [], []
    for language in ("mixed", "zh", "en"):
        ratio, more = compare(language)
        if language == "mixed":
            claims.append(Claim("parser, of decode + splitlines", ratio, 0.2))
        numbers += [*more, (f"{language}: ratio", f"{ratio:.3f}")]
    growths = {name: growth(make) for name, make in HOSTILE.items()}
    claims.append(Claim("hostile texts: 1 MB, of the time for 0.25 MB (4 is linear)", max(growths.values()), 7, True))
    numbers += [(f"hostile, {name}: 1 MB of 0.25 MB", f"{value:.1f}") for name, value in growths.items()]
    return report(
        "dialog_parser",
        about="Text -> turns. Three quarters of the sentences of `mixed` are Chinese.",
        packages=("pydantic",),
        claims=claims,
        numbers=numbers,
    )


if __name__ == "__main__":
    raise SystemExit(main())
