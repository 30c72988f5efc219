"""YAML < `ZY_*` environment < `--set key=value`: one file resolved once, on the runner, with every value's origin.

Pure but for `load_config`, which reads the YAML. Used by plan and recipe; the box gets the resolved file and
reads no `ZY_*` again.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from corpus_builder.errors import ProjectError

BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}


class Section(BaseModel):
    """A closed, frozen part of a configuration file."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Config = TypeVar("Config", bound=Section)


class Resolved(Section, Generic[Config]):
    """A configuration and where each overridden key's value came from, e.g. `{"learning_rate": "ZY_LR"}`."""

    value: Config
    origins: dict[str, str]


def parse_boolean(key: str, text: str) -> bool:
    """Return the boolean in `text`; `true/false/1/0/yes/no` in any case, nothing else."""
    try:
        return BOOLEANS[text.strip().lower()]
    except KeyError:
        raise ProjectError("override_invalid", key=key, reason="takes true, false, 1, 0, yes or no") from None


def load_config(
    model: type[Config],
    path: Path,
    *,
    environment_keys: Mapping[str, str],
    environment: Mapping[str, str],
    sets: Sequence[tuple[str, str]] = (),
) -> Resolved[Config]:
    """Return `path` as `model`, overridden by the environment and then by `sets`.

    Args:
        environment_keys: Which variable sets which key, e.g. `{"ZY_LR": "learning_rate"}`. Empty means unset.
        sets: Pairs of `--set key=value`; a dot walks into a section (`lora.r`).

    Raises:
        ProjectError: `config_unreadable`, `config_invalid` (all problems at once, with near misses),
            `override_unknown`.
    """
    tree = _read_yaml(path)
    origins: dict[str, str] = {}
    given = [(environment_keys[name], environment[name], name) for name in environment_keys if environment.get(name)]
    for key, text, origin in [*given, *((key, text, "--set") for key, text in sets)]:
        _put(model, tree, key, text)
        origins[key] = origin
    return Resolved[Any](value=validate(model, tree, where=str(path)), origins=origins)


def validate(model: type[Config], tree: Mapping[str, Any], *, where: str) -> Config:
    """Return `tree` as `model`; raise `config_invalid` naming every wrong key at once."""
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        problems = "\n".join(f"  {_problem(model, detail)}" for detail in error.errors())
        raise ProjectError("config_invalid", path=where, count=error.error_count(), problems=problems) from error


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ProjectError("config_unreadable", path=str(path), reason=str(error).splitlines()[0]) from error
    if not isinstance(tree, dict):
        raise ProjectError("config_unreadable", path=str(path), reason="the file holds no keys")
    return tree


def _put(model: type[Section], tree: dict[str, Any], key: str, text: str) -> None:
    """Set `key` (dots walk into sections) in `tree` to `text`, as YAML reads it."""
    node, owner = tree, model
    *parents, last = key.split(".")
    for parent in parents:
        owner = _section(owner, parent, key)
        child = node.get(parent)
        node[parent] = node = dict(child) if isinstance(child, dict) else {}
    if last not in owner.model_fields:
        raise ProjectError("override_unknown", key=key, near=near_miss(last, owner.model_fields))
    annotation = owner.model_fields[last].annotation
    node[last] = (
        parse_boolean(key, text) if annotation is bool else yaml.safe_load(text) if annotation is not str else text
    )


def _section(owner: type[Section], name: str, key: str) -> type[Section]:
    annotation = owner.model_fields[name].annotation if name in owner.model_fields else None
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    raise ProjectError("override_unknown", key=key, near=near_miss(name, owner.model_fields))


def near_miss(word: str, known: Mapping[str, Any] | Sequence[str]) -> str:
    """Return the known word nearest to `word`, or all known words when none is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return near[0] if near else ", ".join(sorted(known))


def _problem(model: type[BaseModel], detail: Any) -> str:
    path = ".".join(str(part) for part in detail["loc"])
    if detail["type"] != "extra_forbidden":
        return f"{path}: {detail['msg']} (got {detail['input']!r})"
    known = _known_keys(model, detail["loc"][:-1])
    hint = f"; nearest known: {near_miss(str(detail['loc'][-1]), known)}" if known else ""
    return f"{path}: unknown key{hint}"


def _known_keys(model: type[BaseModel], place: Sequence[str | int]) -> list[str]:
    """Return the keys that may stand at a place: numbers count items, and a word may be the kind of one."""
    options = [model]
    for part in place:
        if isinstance(part, int):
            continue
        of_kind = [one for one in options if "kind" in one.model_fields and part in _choices(one)]
        fields = [one.model_fields[part] for one in options if part in one.model_fields]
        options = of_kind or [inner for field in fields for inner in _models_in(field.annotation)]
    return list(options[0].model_fields) if options else []


def _choices(model: type[BaseModel]) -> tuple[Any, ...]:
    return get_args(model.model_fields["kind"].annotation)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in get_args(annotation) for model in _models_in(inner)]
