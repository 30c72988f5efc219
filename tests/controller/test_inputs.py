"""Every input is refused or taken before it reaches a box; nothing typed is trusted because a form promised it."""

from pathlib import Path

import pytest

from controller.inputs import ACTIONS, carries_a_key, check_inputs
from corpus_builder.errors import ProjectError
from corpus_builder.say import LANGUAGES, format_error

HOSTILE = ('"; touch x #', "$(touch x)", "`touch x`", "a\nb", "-rf", "--help", "a\x00b", " ", "\u2028")


def refused(**given):
    with pytest.raises(ProjectError) as caught:
        check_inputs({"action": "status", **given})
    assert caught.value.exit_code == 2
    return caught.value


def test_defaults_are_those_of_the_form():
    inputs = check_inputs({"action": "setup-only", "dialog_zip": ""})
    assert (inputs.recipe, inputs.watch_minutes, inputs.is_confirmed) == ("coding_v1", 340, False)
    assert (inputs.base_model_dir, inputs.dialog_zip, inputs.is_zip_fresh) == (None, None, False)
    assert check_inputs({"action": "setup-only", "fresh_zip": "true"}).is_zip_fresh


@pytest.mark.parametrize("action", ACTIONS)
def test_every_action_is_taken(action):
    assert check_inputs({"action": action}).action == action


@pytest.mark.parametrize(
    "name", ["action", "base_model_dir", "dialog_zip", "confirm_override", "recipe", "watch_minutes", "fresh_zip"]
)
@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_text_is_refused_in_every_input(name, value):
    error = refused(**{name: value})
    assert error.code in {"input_invalid", "action_unknown"}


def test_absolute_model_folder_with_shell_marks_is_only_a_path():
    assert check_inputs({"action": "status", "base_model_dir": "/data/$(id)/x y"}).base_model_dir == "/data/$(id)/x y"


@pytest.mark.parametrize("text", ["341", "-1", "1.5", "1e2", "٣", "10000", "ten"])
def test_watch_minutes_outside_0_to_340_are_refused(text):
    assert refused(watch_minutes=text).values["name"] == "watch_minutes"


@pytest.mark.parametrize("text", ["0", "340", "007"])
def test_watch_minutes_from_0_to_340_are_taken(text):
    assert check_inputs({"action": "status", "watch_minutes": text}).watch_minutes == int(text)


@pytest.mark.parametrize(("text", "is_confirmed"), [("true", True), ("True", True), ("1", True), ("false", False)])
def test_confirmation_is_a_boolean(text, is_confirmed):
    assert check_inputs({"action": "status", "confirm_override": text}).is_confirmed is is_confirmed


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/a b.zip",
        "cos://b-125/key.zip",
        "https://host/a.zip",
        "/data/a.zip",
        "~/a.zip",
        "s3://b/k?y",
        "file:a b.zip",
        "./a.zip",
        "../a.zip",
    ],
)
def test_dialog_zip_takes_addresses_and_paths(text):
    assert check_inputs({"action": "status", "dialog_zip": text}).dialog_zip == text


@pytest.mark.parametrize("text", ["https://host/a.zip?sign=abc", "HTTPS://u:p@host/a.zip", "http://h/?x"])
def test_link_that_carries_its_key_is_refused_and_not_repeated(text):
    error = refused(dialog_zip=text)
    assert error.code == "url_with_query"
    assert carries_a_key(text)
    assert all(text not in format_error(error, lang) for lang in LANGUAGES)


@pytest.mark.parametrize(
    "text", ["ftp://h/a.zip", "a.zip", "https://host", "https:///a", "s3://b", "https://[::1/a.zip"]
)
def test_dialog_zip_takes_nothing_else(text):
    assert refused(dialog_zip=text).values["name"] == "dialog_zip"


@pytest.mark.parametrize("text", ["coding_v1", "configs/my recipe.yaml", "/abs/r.yml", "a.b-c_d"])
def test_recipe_takes_names_and_yaml_paths(text):
    assert check_inputs({"action": "status", "recipe": text}).recipe == text


@pytest.mark.parametrize("text", ["../x.yaml", "a/../../x.yaml", "a/b", "x" * 65])
def test_recipe_takes_no_way_out(text):
    assert refused(recipe=text).values["name"] == "recipe"


def test_sets_go_to_the_recipe_or_the_plan():
    inputs = check_inputs({"action": "status"}, sets=("learning_rate=2e-5", "plan.soul_replica=2", "x=a=b"))
    assert inputs.recipe_sets == (("learning_rate", "2e-5"), ("x", "a=b"))
    assert inputs.plan_sets == (("soul_replica", "2"),)
    assert inputs.repo_root == Path(".")


@pytest.mark.parametrize("text", ["novalue", "=x"])
def test_set_without_a_key_is_refused(text):
    with pytest.raises(ProjectError, match="override_invalid"):
        check_inputs({"action": "status"}, sets=(text,))


def test_reasons_are_said_in_the_language():
    error = refused(watch_minutes="ten")
    assert "0 到 340" in format_error(error, "zh")
    assert "from 0 to 340" in format_error(error, "en")
