"""The recipe's keys as a page for people: `python -m controller.recipes_page` writes docs/recipes.md from the model.

Side effects: `main` writes that file; a test fails when it is not what the model says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from corpus_builder.config import Section
from trainer.recipe import ENVIRONMENT_KEYS, Lora, Recipe

PAGE = Path(__file__).parents[1] / "docs" / "recipes.md"
HEAD = """# Recipes

Made from the model in the code (`trainer/recipe.py`) by `python -m controller.recipes_page`; edit that, not this page.

A recipe is one YAML file: `configs/recipes/<name>.yaml`, or one of your own (`--recipe path/to/it.yaml`). Keys bear
Hugging Face's names where Hugging Face has one. The file counts least, a variable more, `--set key=value` most. An
unknown key is an error that names the nearest known one. `zy train RECIPE --dry-run` shows what a recipe comes to.
"""
#: What Hugging Face's, PEFT's and DeepSpeed's own names mean, where the name does not say it.
MEANINGS: Mapping[str, str] = {
    "name": "of the recipe, for people",
    "num_train_epochs": "how often each sample is seen",
    "learning_rate": "the highest of the run",
    "lr_scheduler_type": "how the rate falls; it has no other owner",
    "warmup_ratio": "share of the steps in which the rate rises",
    "weight_decay": "AdamW's",
    "max_grad_norm": "gradients longer than this are shortened to it",
    "seed": "of the order of samples, of dropout and of new adapters",
    "per_device_train_batch_size": "rows per micro-batch and rank",
    "gradient_checkpointing": "recompute activations: less memory, a third more work",
    "lora": "a section; see below",
    "device": "auto: GPUs where there is nvidia-smi, else the CPU",
    "save_steps": "a checkpoint every this many steps",
    "logging_steps": "to trackers and the log, every this many steps",
    "r": "rank of the adapters",
    "lora_alpha": "adapters are scaled by lora_alpha / r",
    "lora_dropout": "of the adapters' inputs",
}


def recipes_page() -> str:
    """Return the page."""
    variables = {key: name for name, key in ENVIRONMENT_KEYS.items()}
    return "\n".join(
        [
            HEAD,
            *table(Recipe, variables),
            "",
            "# LoRA",
            "",
            "With a section `lora:` adapters are trained and the base stays frozen; without it, all weights are.",
            "`lora: {}` takes every default; `--set lora.r=8` walks into the section.",
            "",
            *table(Lora, {}),
            "",
        ]
    )


def table(model: type[Section], variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the rows of one section: key, type, default, variable, meaning."""
    yield "| key | values | default | variable | meaning |"
    yield "|---|---|---|---|---|"
    for key, field in model.model_fields.items():
        variable = f"`{variables[key]}`" if key in variables else ""
        meaning = (field.description or MEANINGS.get(key, "")).replace("|", "/")
        yield f"| `{key}` | {values_of(field)} | {default_of(field)} | {variable} | {meaning} |"


def default_of(field: FieldInfo) -> str:
    """Return the default as YAML spells it; a key without one must be given."""
    if field.is_required():
        return "must be given"
    default = list(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


def values_of(field: FieldInfo) -> str:
    """Return what may stand at a key, limits included, in few words."""
    words = list(dict.fromkeys(_words(field.annotation)))
    limits = [f"{sign} {getattr(one, name)}" for one in field.metadata for name, sign in _SIGNS if hasattr(one, name)]
    return ", ".join(words + limits)


_SIGNS = (("gt", "&gt;"), ("ge", "≥"), ("lt", "&lt;"), ("le", "≤"))
_TYPES = {int: "whole number", float: "number", str: "text", bool: "`true`, `false`", type(None): "`null`"}


def _words(annotation: Any) -> Iterator[str]:
    if annotation in _TYPES:
        yield _TYPES[annotation]
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "section" if annotation is Lora else "questions"
    elif re.search("Literal", str(get_origin(annotation))):
        yield from (f"`{choice}`" for choice in get_args(annotation))
    elif get_origin(annotation) is tuple:
        inner = dict.fromkeys(word for part in get_args(annotation)[:1] for word in _words(part))
        yield "list of " + ", ".join(inner)
    else:  # Annotated and unions
        parts = get_args(annotation)
        yield from (word for part in parts if _is_type(part) for word in _words(part))


def _is_type(part: Any) -> bool:
    return isinstance(part, type) or get_origin(part) is not None


def main() -> None:
    """Write docs/recipes.md."""
    PAGE.write_text(recipes_page(), "utf-8")


if __name__ == "__main__":
    main()
