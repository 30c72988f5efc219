"""`zy demo`: the whole job on this machine, for real: SSH, storage, corpus, training, answers before and after.

Side effects: everything it makes lies in one folder (`demo-out/`); servers listen on loopback only and end with it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controller.demo_model import write_demo_model, write_tiny_model, write_tokenizer
from controller.demo_sshd import DemoSshd, find_sshd
from controller.demo_storage import serve_object
from corpus_builder.errors import ProjectError, Value
from corpus_builder.say import SEE_ALL, say
from corpus_builder.suite import load_suite
from trainer.build_locks import EXTENSIONS_DIR, extensions_dir
from trainer.recipe import load_recipe
from trainer.run_paths import DataPaths

CODE_ROOT = Path(__file__).parents[1]
WATCH_MINUTES = 30
START_DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demo:
    """Where one demo happens; `box` is the folder that plays the rented machine."""

    out: Path
    is_tiny: bool
    lang: str

    @property
    def box(self) -> Path:
        return self.out / "box"

    @property
    def summary(self) -> Path:
        return self.out / "summary.md"

    @property
    def data(self) -> DataPaths:
        return DataPaths(str(self.box / "data"))


def run_demo(out: Path, *, is_tiny: bool, lang: str) -> int:
    """Do the whole job in `out` and return 0.

    A random model (`is_tiny`) learns nothing worth judging: there the columns are shown and not judged.

    Raises:
        ProjectError: `not_ready`: the trained model misses its suite; `not_taught`: the base model knew it already.
    """
    demo = Demo(out=out.absolute(), is_tiny=is_tiny, lang=lang)
    prepare_folder(demo.out)
    tell(demo, "model")
    mother_model = make_model(demo)
    suite = load_suite(CODE_ROOT / "configs/accept/demo.yaml").value.model_dump(mode="json")

    tell(demo, "before")
    before = ask_suite(demo, mother_model, suite, "before")
    with machine(demo, mother_model) as zy:
        tell(demo, "setup")
        zy.run("setup-only")
        tell(demo, "train")
        zy.train_while_looking()
    final = Path(demo.data.version_final(recipe_version()))
    tell(demo, "after")
    after = ask_suite(demo, final.resolve(), suite, "after")

    append(demo.summary, two_columns(before, after, lang))
    collect(demo)
    print(two_columns(before, after, lang), flush=True)
    tell(demo, "done", folder=os.path.relpath(demo.out))
    if not is_tiny:
        judge(before, after, suite)
    return 0


def prepare_folder(out: Path) -> None:
    """Empty what an earlier demo left; a folder that is not a demo's is never touched."""
    mark = out / ".zy-demo"
    if out.exists() and any(out.iterdir()) and not mark.exists():
        raise ProjectError("input_invalid", name="--out", reason="the folder holds something that no demo made")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True, mode=0o700)
    mark.touch()


def make_model(demo: Demo) -> Path:
    """Return the mother model's folder: SmolLM2-135M-Instruct, or a random model with the same tokenizer."""
    cache_dir = CODE_ROOT / ".cache" / "demo-model"
    if demo.is_tiny:
        return write_tiny_model(demo.out / "mother-model", tokenizer_from=write_tokenizer(cache_dir))
    return write_demo_model(cache_dir)


def recipe_version() -> str:
    """Return the version that the demo's recipe names."""
    return load_recipe(CODE_ROOT / "configs/recipes/demo.yaml", environment={}).value.version


def ask_suite(demo: Demo, model_dir: Path, suite: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the suite's result for a model folder, as `trainer.accept` wrote it."""
    request, result = demo.out / f"accept-{name}.request.json", demo.out / f"accept-{name}.json"
    request.write_text(json.dumps({"model_dir": str(model_dir), "suite": suite, "out": str(result)}), "utf-8")
    subprocess.run([sys.executable, "-m", "trainer.accept", str(request)], check=True, cwd=CODE_ROOT)
    request.unlink()
    answers: dict[str, Any] = json.loads(result.read_text("utf-8"))
    return answers


def judge(before: Mapping[str, Any], after: Mapping[str, Any], suite: Mapping[str, Any]) -> None:
    """Raise `not_taught` or `not_ready` unless training taught what the suite asks."""
    total = after["total"]
    if before["right"] > suite["before_at_most"]:
        raise ProjectError(
            "not_taught", right=before["right"], total=total, most=suite["before_at_most"], suite=suite["name"]
        )
    if after["right"] < suite["pass_at_least"]:
        raise ProjectError(
            "not_ready", right=after["right"], total=total, wanted=suite["pass_at_least"], suite=suite["name"]
        )


@dataclass(frozen=True, slots=True)
class Zy:
    """The command line, as the workflow calls it: a process of its own with settings in its environment."""

    demo: Demo
    environment: Mapping[str, str]
    box_kind: str

    def argv(self, action: str, *options: str) -> list[str]:
        return [sys.executable, "-m", "controller.cli", action, "--box", self.box_kind, *options]

    def run(self, action: str, *options: str, is_expected: Sequence[int] = (0,)) -> int:
        """Run one action; its output is shown as it comes. An unexpected exit code ends the demo with that code."""
        print(f"\n$ zy {action} {' '.join(options)}", flush=True)
        argv = self.argv(action, *self._recipe(action), *options)
        done = subprocess.run(argv, env=dict(self.environment), cwd=CODE_ROOT, check=False)
        if done.returncode not in is_expected:
            raise SystemExit(done.returncode)
        return done.returncode

    def end_what_is_left(self) -> None:
        """End a run that an interrupted demo would leave behind: it survives its connection by design."""
        if any(not (folder / "outcome.json").exists() for folder in Path(self.demo.data.runs).glob("*/")):
            subprocess.run(
                self.argv("kill", "--grace-minutes", "0"), env=dict(self.environment), cwd=CODE_ROOT, check=False
            )

    def _recipe(self, action: str) -> tuple[str, ...]:
        return ("--recipe", "demo") if action.startswith("setup") else ()

    def train_while_looking(self) -> None:
        """Start training and watch it; ask `status` and `tail-log` beside it once it runs."""
        options = (*self._recipe("setup-and-train"), "--confirm", "--watch-minutes", str(WATCH_MINUTES))
        print(f"\n$ zy setup-and-train {' '.join(options)}", flush=True)
        watching = subprocess.Popen(self.argv("setup-and-train", *options), env=dict(self.environment), cwd=CODE_ROOT)
        try:
            if wait_for_first_line(self.demo, watching):
                self.run("status")
                self.run("tail-log")
            code = watching.wait(timeout=60 * WATCH_MINUTES + START_DEADLINE_S)
        finally:
            if watching.poll() is None:
                watching.terminate()
        if code != 0:
            raise SystemExit(code)


def wait_for_first_line(demo: Demo, watching: subprocess.Popen[bytes]) -> bool:
    """Wait until a run has told its first progress; return whether it did while `watching` still watches."""
    give_up = time.monotonic() + START_DEADLINE_S
    runs = Path(demo.data.runs)
    while watching.poll() is None and time.monotonic() < give_up:
        if any(path.stat().st_size for path in runs.glob("*/progress.jsonl")):
            return True
        time.sleep(0.5)
    return False


@contextmanager
def machine(demo: Demo, mother_model: Path) -> Iterator[Zy]:
    """A machine reached over SSH and a storage that holds the dialog ZIP, both on loopback, for as long as it lasts."""
    with ExitStack() as stack:
        archive = zip_dialogs(demo.out / "dialogs.zip")
        url, address = stack.enter_context(serve_object(archive, key="dialogs.zip"))
        environment = base_environment(demo, mother_model, url=url, fetch_allow=address)
        if find_sshd() is None:
            tell(demo, "no_sshd")
            zy = Zy(demo, environment, "local")
            stack.callback(zy.end_what_is_left)
            yield zy
            return
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="zy-")))
        home = demo.box / "home"
        home.mkdir(parents=True, mode=0o700)
        # A tmux server of its own: the demo never meets the sessions of whoever runs it. CPU Adam is built once for
        # this environment, and not in the home of each demo.
        for_user = {"TMUX_TMPDIR": str(scratch), EXTENSIONS_DIR: extensions_dir(sys.executable)}
        sshd = stack.enter_context(DemoSshd(scratch, home=home, environment=for_user))
        stack.callback(end_tmux_server, scratch)
        zy = Zy(demo, {**environment, **sshd.settings()}, "ssh")
        stack.callback(zy.end_what_is_left)
        yield zy


def end_tmux_server(folder: Path) -> None:
    """End the tmux server of this demo, if one is left; without tmux there is none."""
    if shutil.which("tmux") is not None:
        environment = {**os.environ, "TMUX_TMPDIR": str(folder)}
        subprocess.run(["tmux", "kill-server"], env=environment, stderr=subprocess.DEVNULL, check=False)


def base_environment(demo: Demo, mother_model: Path, *, url: str, fetch_allow: str) -> dict[str, str]:
    """Return the settings as a repository's secrets and variables would give them."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("ZY_", "GITHUB_", "AWS_"))}
    return {
        **inherited,
        "PYTHONPATH": str(CODE_ROOT),
        "ZY_LANG": demo.lang,
        "ZY_CODING_TRAIN_DATA": str(demo.box / "data"),
        "ZY_CODING_TRAIN_ROOT": str(demo.box / "root"),
        "ZY_BASE_MODEL_DIR": str(mother_model),
        "ZY_MOTHER_VENV": sys.prefix,
        "ZY_BINGSHUO_DIALOG_URL": url,
        "ZY_FETCH_ALLOW": fetch_allow,
        "GITHUB_STEP_SUMMARY": str(demo.summary),
    }


def zip_dialogs(path: Path) -> Path:
    """Write the demo's dialogs as the ZIP that a person would upload."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for dialog in sorted((CODE_ROOT / "demo/dialogs").glob("*.md")):
            archive.write(dialog, dialog.name)
    return path


def two_columns(before: Mapping[str, Any], after: Mapping[str, Any], lang: str) -> str:
    """Return the answers before and after as a Markdown table."""
    rows = [f"| {say('demo.question', lang)} | {say('demo.before_column', lang)} | {say('demo.after_column', lang)} |"]
    rows.append("|---|---|---|")
    for old, new in zip(before["answers"], after["answers"], strict=True):
        rows.append(f"| {cell(old['ask'])} | {verdict(old)} | {verdict(new)} |")
    rows.append(f"| | {before['right']} / {before['total']} | {after['right']} / {after['total']} |")
    return "\n".join(["", f"## {say('demo.answers', lang)}", "", *rows, ""])


def verdict(answer: Mapping[str, Any]) -> str:
    """Return one judged answer as a table cell."""
    return f"{'✅' if answer['is_right'] else '❌'} {cell(answer['answer'])}"


def cell(text: str) -> str:
    """Return `text` as the content of a Markdown table cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;") or "–"


def collect(demo: Demo) -> None:
    """Copy what a reader looks for out of the machine's folder: corpus, report, run files."""
    for path in (demo.data.samples, demo.data.manifest, demo.data.report):
        shutil.copy(path, demo.out)
    shutil.copytree(demo.data.runs, demo.out / "runs", dirs_exist_ok=True)


def append(path: Path, text: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def tell(demo: Demo, step: str, **values: Value) -> None:
    """Say what comes next."""
    print(f"\n=== {say(f'demo.{step}', demo.lang, see=SEE_ALL, **values)}", flush=True)
