"""`zy train`: one run on this machine, in the foreground, under the same supervisor as on a rented one.

train-out/ processed/ runs/<run>/ checkpoints/<version>/<run>/final/ logs/ locks/    the layout of a box (run_paths.py)

So lock, journal, outcome and resume are a box's: `zy status --box local` reads them with ZY_CODING_TRAIN_DATA set to
that folder. Ctrl-C asks for a checkpoint, a second one ends at once. Side effects: files, processes.
"""

from __future__ import annotations

import getpass
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from controller.actions.setup_and_train import run_error
from controller.boxside.train_plan import train_spec
from controller.boxside.work import TRAIN, Work, load_work, read_json
from controller.configuration import CODE_ROOT
from controller.follow import Followed
from controller.github import defuse
from controller.inputs import parse_set
from controller.invocation import Surroundings, choose_lang, tell_error
from controller.settings import SETTINGS, Settings
from corpus_builder.errors import EXIT_DONE, EXIT_REFUSED, ProjectError, parse_error_line
from corpus_builder.log_lines import public_line
from trainer.children import end_group
from trainer.journal import NOW, request_stop, save_json
from trainer.recipe import Recipe, load_recipe
from trainer.run_paths import RUN_ID, RootPaths, RunPaths, new_run_id, run_paths
from trainer.run_state import LOST

ACTION = "train"
LIBRARIES = ("torch", "transformers", "deepspeed", "tokenizers", "numpy")
GRACE_S = 600  # for a checkpoint, as on a box
#: Keys of a recipe that are paths of this machine; relative ones start where the command was typed.
PATH_KEYS = ("base_model_dir", "data_path", "output_dir")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainWish:
    """What the command line gave; exactly one of `recipe` and `resume`."""

    recipe: str | None
    resume: str | None
    data: str
    samples: str | None
    sets: tuple[str, ...]
    is_dry_run: bool
    lang: str | None


@dataclass(frozen=True, slots=True)
class Planned:
    """A run that is about to start: its files, and what `recipe.json` holds; `earlier` is it, begun before."""

    paths: RunPaths
    request: dict[str, Any]
    earlier: Work | None = None


def perform(around: Surroundings, wish: TrainWish) -> int:
    """Train, or say what would be done; return the exit code of the outcome."""
    lang = choose_lang(wish.lang, around.environ)
    check_libraries()
    data = Path(wish.data).absolute()
    planned = plan_resume(data, wish.resume) if wish.resume is not None else plan_run(data, wish, around.environ)
    error = show_launch(planned, around) if wish.is_dry_run else train(planned, data, around, lang)
    return EXIT_DONE if error is None else tell_error(error, around, lang)


def check_libraries() -> None:
    """Raise `extra_missing` for the first library that training needs and that is not here."""
    for package in LIBRARIES:
        if find_spec(package) is None:
            raise ProjectError("extra_missing", package=package, extra="train")


def plan_run(data: Path, wish: TrainWish, environ: Mapping[str, str]) -> Planned:
    """Return a new run; raise what is wrong with the recipe or an override. Reads the recipe."""
    assert wish.recipe is not None
    is_path = wish.recipe.endswith((".yaml", ".yml"))
    path = Path(wish.recipe) if is_path else CODE_ROOT / "configs" / "recipes" / f"{wish.recipe}.yaml"
    sets = [parse_set(text) for text in wish.sets]
    if wish.samples is not None:
        sets.append(("data_path", wish.samples))
    resolved = load_recipe(path, environment=environ, sets=sets)
    recipe = with_absolute_paths(resolved.value)
    return _plan(data, recipe.version, {"recipe": recipe.model_dump(mode="json"), "origins": resolved.origins})


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """Return the recipe with paths that no longer depend on where a process runs."""
    given = {key: value for key in PATH_KEYS if (value := getattr(recipe, key)) is not None}
    if recipe.deepspeed.endswith(".json"):
        given["deepspeed"] = recipe.deepspeed
    return recipe.model_copy(update={key: os.path.abspath(os.path.expanduser(path)) for key, path in given.items()})


def plan_resume(data: Path, run_id: str) -> Planned:
    """Return how a run goes on: itself if it never ended, else a new run from its newest checkpoint (design 4.4).

    Raises:
        ProjectError: `run_not_found`; `lock_held`: it is at work.
    """
    work = load_work(str(data), TRAIN, run_id) if RUN_ID.match(run_id) else None
    request = None if work is None else read_json(work.paths.recipe)
    if work is None or request is None:
        raise ProjectError("run_not_found", path=run_paths(str(data), "", run_id).folder)
    if work.is_supervised:
        raise ProjectError("lock_held", action=ACTION, name=run_id, owner=str(work.spec.get("owner")))
    if work.outcome is None:
        return Planned(work.paths, request, earlier=work)
    more = {"resume_from": work.paths.checkpoints, "resumed_from": run_id}
    return _plan(data, work.version, {"recipe": request["recipe"], "origins": request.get("origins", {}), **more})


def _plan(data: Path, version: str, values: Mapping[str, Any]) -> Planned:
    run_id = new_run_id(time.strftime("%Y%m%d-%H%M%S", time.gmtime()))
    named = {"data": str(data), "version": version, "run_id": run_id, "samples_sha256": None, "resume_from": None}
    return Planned(run_paths(str(data), version, run_id), {**named, **values})


def show_launch(planned: Planned, around: Surroundings) -> ProjectError | None:
    """Print the preflight and DeepSpeed's exact command line; return what stands against the run. Changes nothing."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "recipe.json"
        path.write_text(json.dumps(planned.request), "utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "trainer.launch", str(path), "--dry-run"], env=_environment(), cwd=CODE_ROOT,
            capture_output=True, encoding="utf-8", errors="replace", check=False,
        )  # fmt: skip
    _show_all(done.stdout.splitlines(), around)
    errors = [error for line in done.stderr.splitlines() if (error := parse_error_line(line)) is not None]
    if done.returncode == 0:
        return None
    _show_all(done.stderr.splitlines(), around)
    reason = f"trainer.launch ended with exit code {done.returncode}"
    return errors[-1] if errors else ProjectError("run_failed", state="failed", reason=reason, name="dry run")


def train(planned: Planned, data: Path, around: Surroundings, lang: str) -> ProjectError | None:
    """Run the supervisor to its end, its lines shown; return why the run did not succeed, None when it did."""
    paths, is_new = planned.paths, planned.earlier is None
    _write_files(planned, data, around.environ)
    exit_code = _supervise(paths, around)
    refusal = read_json(paths.error)
    if exit_code == EXIT_REFUSED and refusal is not None:
        for name in (paths.error, *((paths.recipe, paths.supervisor_spec) if is_new else ())):
            os.unlink(name)
        if is_new:
            os.rmdir(paths.folder)
        return ProjectError.from_json(refusal)
    outcome = read_json(paths.outcome)
    error = (outcome or {}).get("error")
    ended = Followed(
        id=paths.run_id,
        state=LOST if outcome is None else outcome["state"],
        outcome=outcome,
        error=ProjectError.from_json(error) if error else None,
        points=(),
        eta_s=None,
        elapsed_s=0.0,
    )
    problem = run_error(ended, lang=lang)
    if problem is None:
        around.out.write(f"{paths.final}\n")
    return problem


def _write_files(planned: Planned, data: Path, environ: Mapping[str, str]) -> None:
    """Write what the supervisor reads; of an attempt that never ended, end what it left and forget its stop."""
    paths, request = planned.paths, planned.request
    if planned.earlier is None:
        os.makedirs(paths.folder, mode=0o700)
        save_json(paths.recipe, request)
    else:
        for child in planned.earlier.children:
            end_group(child)
        for name in (paths.stop, paths.error):
            Path(name).unlink(missing_ok=True)
    tokens = Settings.from_environment(environ).tracker_tokens(request["recipe"].get("report_to") or ())
    if tokens:
        save_json(paths.secrets, tokens)
    spec = train_spec(
        paths,
        data=str(data),
        code=str(CODE_ROOT),
        python=sys.executable,
        lock=RootPaths(str(data)).run_lock,
        owner=getpass.getuser(),
        action=ACTION,
        version=request["version"],
        digest="",
        grace_s=GRACE_S,
        secrets=sorted(tokens),
    )
    save_json(paths.supervisor_spec, spec)


def _supervise(paths: RunPaths, around: Surroundings) -> int:
    command = [sys.executable, "-m", "trainer.supervise", paths.supervisor_spec]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=_environment(),
        cwd=CODE_ROOT, encoding="utf-8", errors="replace",
    ) as child, _passing_signals(child, paths):  # fmt: skip
        assert child.stdout is not None
        for line in child.stdout:
            _show_all([line.rstrip("\n")], around)
        return child.wait()


@contextmanager
def _passing_signals(child: subprocess.Popen[str], paths: RunPaths) -> Iterator[None]:
    """While the block lasts, a signal asks the supervisor for a checkpoint, the second one for the end."""
    asked = False

    def pass_on(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            request_stop(paths, NOW)
        asked = True
        child.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _environment() -> dict[str, str]:
    """Return what the supervisor inherits: no secret of ours but through the run's own file."""
    secrets = {setting.name for setting in SETTINGS if setting.is_secret}
    kept = {name: value for name, value in os.environ.items() if name not in secrets}
    search = os.pathsep.join(filter(None, (str(CODE_ROOT), os.environ.get("PYTHONPATH"))))
    return {**kept, "PYTHONPATH": search, "PYTHONUNBUFFERED": "1"}


def _show_all(lines: list[str], around: Surroundings) -> None:
    """Show lines of a log, as much of each as its reader may see; an error is said in words later."""
    sees = around.runner.sees()
    for line in lines:
        shown = line if sees == "text" else public_line(line)
        if shown is not None and parse_error_line(line) is None:
            around.out.write(defuse(shown) + "\n")
            around.out.flush()
