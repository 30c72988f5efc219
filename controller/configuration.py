"""Recipe, plan and suite of one wish, resolved once on the runner. Side effects: reads the YAML files.

A name stands for a file that ships with our code (`configs/recipes/coding_v1.yaml`), a path ending in `.yaml` for
one of the person's own, relative to their repository.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.inputs import Inputs
from corpus_builder.plan import EXPORTS, DialogSource, Plan, load_plan
from corpus_builder.suite import Suite, load_suite
from trainer.recipe import Recipe, load_recipe

CODE_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What to build and how to train; `origins` names where each overridden key of the recipe came from."""

    recipe: Recipe
    origins: dict[str, str]
    plan: Plan
    suite: Suite | None
    sources_dir: Path  # where the plan's source paths start, on the runner

    @property
    def needs_dialogs(self) -> bool:
        """Whether the plan takes dialogs from the fetched archive."""
        return self.plan.dialog_dir is None and any(
            isinstance(source, DialogSource) or (isinstance(source, EXPORTS) and source.place == "dialogs")
            for source in self.plan.sources
        )

    def recipe_json(self) -> dict[str, Any]:
        """Return the recipe's JSON values."""
        return self.recipe.model_dump(mode="json")

    def plan_json(self) -> dict[str, Any]:
        """Return the plan's JSON values."""
        return self.plan.model_dump(mode="json")

    def suite_json(self) -> dict[str, Any] | None:
        """Return the suite's JSON values, None where the recipe names no suite."""
        return None if self.suite is None else self.suite.model_dump(mode="json")


def load_configuration(inputs: Inputs, environment: Mapping[str, str], *, code_root: Path = CODE_ROOT) -> Configuration:
    """Return the recipe, plan and suite of `inputs`: YAML < environment < form and `--set`.

    Raises:
        ProjectError: `config_unreadable`, `config_invalid`, `override_unknown`, `override_invalid`.
    """

    def find(kind: str, name: str) -> Path:
        if name.endswith((".yaml", ".yml")):
            return inputs.repo_root / name
        return code_root / "configs" / kind / f"{name}.yaml"

    typed = [("base_model_dir", inputs.base_model_dir)] if inputs.base_model_dir else []
    sets = [*((key, str(text)) for key, text in typed), *inputs.recipe_sets]
    recipe = load_recipe(find("recipes", inputs.recipe), environment=environment, sets=sets)
    plan = load_plan(find("corpus", recipe.value.plan), environment=environment, sets=inputs.plan_sets).value
    suite = load_suite(find("accept", recipe.value.suite)).value if recipe.value.suite else None
    set_by_hand = {key for key, _ in inputs.recipe_sets}
    from_form = {key: "input" for key, _ in typed if key not in set_by_hand}
    return Configuration(
        recipe=recipe.value,
        origins={**recipe.origins, **from_form},
        plan=plan,
        suite=suite,
        sources_dir=inputs.repo_root / plan.repo_root,
    )
