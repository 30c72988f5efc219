"""The settings as a page for people: `python -m controller.settings_page` writes docs/settings.md from the tables.

Side effects: `main` writes that file; a test fails when it is not what the tables say.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from controller.settings import SETTINGS
from corpus_builder.config import Section
from corpus_builder.plan import ENVIRONMENT_KEYS as PLAN_VARIABLES
from corpus_builder.plan import Plan
from trainer.recipe import ENVIRONMENT_KEYS as RECIPE_VARIABLES
from trainer.recipe import Recipe

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
HEAD = """# Settings

Made from the tables in the code by `python -m controller.settings_page`; edit those, not this page.

Set these under **Settings → Secrets and variables → Actions**, or as environment variables on a laptop. Empty means
unset. A secret is never printed; values shorter than eight characters, or purely numeric, are not masked, because a
masked `22` would turn `step=122` into `step=1***`.
"""


def settings_page() -> str:
    """Return the page."""
    rows = [f"| `{row.name}` | {'secret' if row.is_secret else 'variable'} | {row.meaning} |" for row in SETTINGS]
    return "\n".join(
        [
            HEAD,
            "| name | kind | meaning |",
            "|---|---|---|",
            *rows,
            "",
            "# Variables that override a recipe or a plan",
            "",
            "The file counts least, a variable more, `--set key=value` most; so does the form's `base_model_dir`.",
            "",
            *override_table("recipe", Recipe, RECIPE_VARIABLES),
            "",
            *override_table("plan", Plan, PLAN_VARIABLES),
            "",
        ]
    )


def override_table(title: str, model: type[Section], variables: Mapping[str, str]) -> list[str]:
    """Return the rows of one configuration: variable, key, type, meaning."""
    rows = [
        f"| `{name}` | `{key}` | {(model.model_fields[key].description or '').replace('|', '/')} |"
        for name, key in variables.items()
    ]
    return [f"| variable | key of the {title} | meaning |", "|---|---|---|", *rows]


def main() -> None:
    """Write docs/settings.md."""
    PAGE.write_text(settings_page(), "utf-8")


if __name__ == "__main__":
    main()
