"""The workflow and the composite action: what they may hold, and two linters that find nothing."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from controller.github import INPUT_NAMES, WITH_PREFIX
from controller.inputs import ACTIONS, DEFAULT_RECIPE, MAX_WATCH_MINUTES
from controller.install_runner import CODE_ROOT, commands, install, wanted
from controller.settings import SETTINGS
from corpus_builder.plan import ENVIRONMENT_KEYS as PLAN_VARIABLES
from trainer.recipe import ENVIRONMENT_KEYS as RECIPE_VARIABLES
from trainer.recipe import load_recipe

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
WORKFLOW = ROOT / ".github/workflows/coding-model-train.yml"
ACTION = ROOT / "action.yml"


def load(path):
    tree = yaml.safe_load(path.read_text("utf-8"))
    tree["on"] = tree.pop(True, None)  # YAML 1.1 reads the key `on` as a boolean
    return tree


def tool(name):
    """Return a linter's path; one that is missing fails the test instead of passing it by."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:/usr/bin:/usr/local/bin")
    assert found, f"{name} is not installed (extra `dev`)"
    return found


def test_there_are_workflows():
    assert WORKFLOW in WORKFLOWS


def test_actionlint_finds_nothing():
    done = subprocess.run([tool("actionlint"), *map(str, WORKFLOWS)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_zizmor_finds_nothing():
    targets = [str(ROOT / ".github"), str(ACTION)]
    done = subprocess.run(
        [tool("zizmor"), "--offline", "--no-progress", *targets], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout


def test_zizmor_would_find_an_injection(tmp_path):
    bad = tmp_path / "bad.yml"
    bad.write_text(
        "on: workflow_dispatch\npermissions: {}\njobs:\n  a:\n    runs-on: ubuntu-latest\n    steps:\n"
        "      - run: echo ${{ github.event.comment.body }}\n"
    )
    done = subprocess.run([tool("zizmor"), "--offline", "--no-progress", str(bad)], capture_output=True, timeout=60)
    assert done.returncode != 0


@pytest.mark.parametrize("path", [*WORKFLOWS, ACTION], ids=lambda path: path.name)
def test_no_expression_stands_in_a_script(path):
    tree = load(path)
    jobs = tree.get("jobs", {"composite": tree.get("runs", {})})
    scripts = [step["run"] for job in jobs.values() for step in job.get("steps", []) if "run" in step]
    assert path != ACTION or len(scripts) == 2
    assert [script for script in scripts if "${{" in script] == []


def test_workflow_is_started_by_hand_and_may_only_read():
    tree = load(WORKFLOW)
    assert list(tree["on"]) == ["workflow_dispatch"]
    assert tree["permissions"] == {"contents": "read"}
    assert tree["name"] == "🧠 编程模型训练 (Coding Model SFT)"
    [job] = tree["jobs"].values()
    assert job["timeout-minutes"] == 355 > MAX_WATCH_MINUTES


def test_actions_are_pinned_by_full_sha():
    for path in [*WORKFLOWS, ACTION]:
        for used in re.findall(r"uses: (\S+)", path.read_text("utf-8")):
            assert used == "./" or re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", used) or path == ACTION


def test_form_has_the_seeds_defaults():
    inputs = load(WORKFLOW)["on"]["workflow_dispatch"]["inputs"]
    assert tuple(inputs) == INPUT_NAMES
    assert tuple(inputs["action"]["options"])[:5] == ("setup-only", "setup-and-train", "tail-log", "status", "kill")
    assert set(inputs["action"]["options"]) == set(ACTIONS)
    recipe = load_recipe(ROOT / "configs/recipes/coding_v1.yaml", environment={}).value
    assert inputs["action"]["default"] == "setup-only"
    assert inputs["base_model_dir"]["default"] == recipe.base_model_dir
    assert (inputs["recipe"]["default"], inputs["watch_minutes"]["default"]) == (DEFAULT_RECIPE, MAX_WATCH_MINUTES)
    assert (inputs["confirm_override"]["type"], inputs["confirm_override"]["default"]) == ("boolean", False)


def test_reading_and_kill_never_queue_behind_training():
    tree = load(WORKFLOW)
    assert tree["concurrency"] == {
        "group": "${{ startsWith(inputs.action, 'setup') && 'zy-train' || format('zy-{0}', github.run_id) }}",
        "cancel-in-progress": False,
    }
    [job] = tree["jobs"].values()
    assert job["environment"] == "${{ startsWith(inputs.action, 'setup') && 'gpu-train' || 'gpu' }}"


def our_step():
    [job] = load(WORKFLOW)["jobs"].values()
    return next(step for step in job["steps"] if step.get("uses") == "./")


def test_only_the_choice_and_registered_values_travel_by_environment():
    step = our_step()
    assert step["with"] == {"action": "${{ inputs.action }}"}
    assert not any("inputs" in value or "event" in value for value in step["env"].values())
    assert all(
        re.fullmatch(r"\$\{\{ (vars\.(\w+)( \|\| secrets\.\2)?|secrets\.\w+) \}\}", v) for v in step["env"].values()
    )


def test_every_setting_is_handed_over_and_a_secret_only_as_a_secret():
    environment = our_step()["env"]
    overrides = {*PLAN_VARIABLES, *RECIPE_VARIABLES}
    assert set(environment) == {setting.name for setting in SETTINGS} | overrides | {"ZY_RUNNER_PYTHON"}
    for setting in SETTINGS:
        assert setting.name in environment[setting.name]
        assert not setting.is_secret or "vars." not in environment[setting.name]


def test_checkout_keeps_no_credentials():
    [job] = load(WORKFLOW)["jobs"].values()
    checkout = job["steps"][0]
    assert checkout["uses"] == "actions/checkout@11bd71901bbe5b1630ceea73d27597364c9af683"
    assert checkout["with"] == {"persist-credentials": False}


def test_composite_action_has_the_inputs_of_the_form_as_texts():
    tree = load(ACTION)
    assert tuple(tree["inputs"]) == INPUT_NAMES
    assert {name: spec.get("default") for name, spec in tree["inputs"].items() if name != "action"} == dict.fromkeys(
        INPUT_NAMES[1:], ""
    )
    environment = tree["runs"]["steps"][1]["env"]
    assert environment == {WITH_PREFIX + name.upper(): f"${{{{ inputs.{name} }}}}" for name in INPUT_NAMES}
    assert tree["runs"]["steps"][1]["run"] == 'zy -- "$ZY_INPUT_ACTION"'


def test_storage_clients_are_installed_only_where_a_storage_secret_is_set():
    assert wanted({"AWS_ACCESS_KEY_ID": ""}) == str(CODE_ROOT)
    assert wanted({"ZY_COS_SECRET_ID": "x"}) == f"{CODE_ROOT}[objects]"


@pytest.mark.parametrize("uv", [None, "/usr/bin/uv"])
def test_install_makes_an_environment_of_its_own(uv):
    made, filled = commands(Path("/t/zyforge"), "/code", python="python3", uv=uv)
    assert made[-1] == "/t/zyforge"
    assert filled[-2:] == ["--editable", "/code"]
    assert "/t/zyforge/bin/python" in filled


def test_python_that_is_there_runs_the_code_of_this_commit(tmp_path):
    folder = install({"RUNNER_TEMP": str(tmp_path), "ZY_RUNNER_PYTHON": sys.executable})
    done = subprocess.run([str(folder / "zy"), "--help"], capture_output=True, text=True, cwd="/", timeout=60)
    assert done.returncode == 0
    assert "setup-and-train" in done.stdout
