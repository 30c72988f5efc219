"""What people read is true: links lead somewhere, both READMEs tell the same, the quickstart is what a test runs."""

import re
from pathlib import Path

import pytest

from controller.recipes_page import recipes_page
from controller.remedies_page import remedies_page
from controller.settings_page import settings_page
from trainer.recipe import Lora, Recipe

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def quickstart(readme: Path) -> list[str]:
    """Return the commands of the first shell block, without their comments."""
    block = re.search(r"```sh\n(.*?)```", readme.read_text("utf-8"), re.S).group(1)
    return [line.split("#")[0].strip() for line in block.splitlines() if line.strip()]


def test_there_are_pages():
    assert len(PAGES) >= 7


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_relative_link_leads_to_a_file(page):
    links = [link for link in LINK.findall(page.read_text("utf-8")) if not link.startswith("http")]
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("name", ["README.md", "README.zh-CN.md"])
def test_readme_is_short_and_starts_with_the_two_commands(name):
    readme = ROOT / name
    assert len(readme.read_text("utf-8").splitlines()) < 150
    assert quickstart(readme) == ["make demo", "make test"]


def test_the_two_readmes_name_the_same_things():
    english, chinese = ((ROOT / name).read_text("utf-8") for name in ("README.md", "README.zh-CN.md"))
    code = re.compile(r"`([^`\n]+)`")
    assert set(code.findall(english)) == set(code.findall(chinese))


def test_settings_page_is_what_the_tables_say():
    assert (ROOT / "docs/settings.md").read_text("utf-8") == settings_page()


def test_remedies_page_is_what_the_table_says():
    assert (ROOT / "docs/remedies.md").read_text("utf-8") == remedies_page()


def test_recipes_page_is_what_the_model_says():
    assert (ROOT / "docs/recipes.md").read_text("utf-8") == recipes_page()


def test_every_key_of_a_recipe_has_values_a_default_and_a_meaning():
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in recipes_page().splitlines()
        if line.startswith("| `")
    ]
    assert [row[0].strip("`") for row in rows] == [*Recipe.model_fields, *Lora.model_fields]
    assert [row[0] for row in rows if not (row[1] and row[2] and row[4])] == []
