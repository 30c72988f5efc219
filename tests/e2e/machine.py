"""A rented machine in miniature: a private sshd, a tmux of its own, a random base model, a repository, a dialog ZIP.

The canary stands in a document, in a dialog, and in the names of files: it must never leave the machine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from corpus_builder.sample import Message, Sample
from tests.servers import DemoSshd
from tests.smoke_receipt import place_receipt
from tests.tiny_run import write_base_model
from trainer.build_locks import EXTENSIONS_DIR, extensions_dir
from trainer.run_paths import DataPaths, RootPaths

ROOT = Path(__file__).parents[2]
CANARY = "zqcanaryxv"
DIALOGS = 6
#: What of each recipe asks something of the environment: two steps of a tiny model are proved once for all machines.
SMOKED = {
    "tiny.yaml": {"gpus": 2, "device": "cpu", "deepspeed": "zero3_offload"},
    "alone.yaml": {"gpus": 1, "device": "cpu", "deepspeed": "none"},
}
TIMEOUT_S = 600


@dataclass(frozen=True)
class Machine:
    """The machine, the person's repository, and the settings that reach the one from the other.

    `place` is the folder of data and code, `recipe` what is trained: `tiny.yaml` on two ranks, `alone.yaml` in one
    plain process, which is there in a third of the time and takes the same steps to the last bit.
    """

    folder: Path
    sshd: DemoSshd
    extra: dict[str, str] = field(default_factory=dict)
    place: str = ""
    recipe: str = "tiny.yaml"

    @property
    def data(self) -> DataPaths:
        return DataPaths(str(self.folder / self.place / "data"))

    @property
    def root(self) -> RootPaths:
        return RootPaths(str(self.folder / self.place / "root"))

    def at(self, place: str, *, recipe: str | None = None, **extra: str) -> Machine:
        """Return the same machine with data and code in another folder."""
        (self.folder / place).mkdir(exist_ok=True)
        return replace(self, place=place, recipe=recipe or self.recipe, extra={**self.extra, **extra})

    def behind(self, port: int) -> Machine:
        """Return the same machine, reached through whatever listens on another port of this host."""
        pins = self.sshd.known_hosts.replace(f":{self.sshd.port} ", f":{port} ")
        return replace(self, extra={**self.extra, "ZY_GPU_PORT": str(port), "ZY_GPU_KNOWN_HOSTS": pins})

    @property
    def repository(self) -> Path:
        return self.folder / "repository"

    @property
    def base_model(self) -> Path:
        return self.folder / "base-model"

    @property
    def dialog_zip(self) -> Path:
        return self.folder / "dialogs.zip"

    def settings(self) -> dict[str, str]:
        """Return secrets and variables, as the repository would give them."""
        return {
            **self.sshd.settings(),
            "ZY_LANG": "en",
            "ZY_CODING_TRAIN_DATA": self.data.data,
            "ZY_CODING_TRAIN_ROOT": self.root.root,
            "ZY_MOTHER_VENV": sys.prefix,
            **self.extra,
        }

    def environment(self, **changes: str) -> dict[str, str]:
        """Return the environment of a laptop that knows the settings and nothing else."""
        base = {"PATH": os.environ["PATH"], "HOME": str(self.folder / "laptop"), "LANG": "C.UTF-8"}
        return {**base, "PYTHONPATH": str(ROOT), **self.settings(), **changes}

    def argv(self, action: str, *options: str) -> list[str]:
        """Return the command line of an action as a person types it."""
        wish: list[str] = []
        if action.startswith("setup"):
            if not Path(self.root.root).exists():
                place_receipt(self.root.root, **SMOKED[self.recipe])
            wish = ["--recipe", self.recipe, "--repo-root", str(self.repository), "--dialog-zip", str(self.dialog_zip)]
        return [sys.executable, "-m", "controller.cli", action, *wish, *options]

    def zy(self, action: str, *options: str, **changes: str) -> subprocess.CompletedProcess[str]:
        """Run an action to its end."""
        return subprocess.run(
            self.argv(action, *options), env=self.environment(**changes), cwd=self.folder, capture_output=True,
            text=True, timeout=TIMEOUT_S,
        )  # fmt: skip

    @contextmanager
    def started(self, action: str, *options: str, **changes: str) -> Iterator[subprocess.Popen[str]]:
        """An action that is looked at while it runs; what still runs at the end of the block is ended."""
        with subprocess.Popen(
            self.argv(action, *options), env=self.environment(**changes), cwd=self.folder, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as child:  # fmt: skip
            try:
                yield child
            finally:
                child.kill()

    def status(self) -> dict[str, Any]:
        """Return the machine's own account."""
        done = self.zy("status", "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)["status"]
        return found

    def run_id(self) -> str | None:
        """Return the newest run's id."""
        run = self.status()["run"]
        return None if run is None else str(run["id"])

    def wait_for_step(self, *, after: str | None = None, timeout_s: float = 240) -> dict[str, Any]:
        """Return the account of a run that is newer than `after` once it has told a step."""
        give_up = time.monotonic() + timeout_s
        while time.monotonic() < give_up:
            run = self.status()["run"]
            is_new = run is not None and run["id"] != after
            if is_new and run["state"] == "running" and run["last_step"] > 0:
                return dict(run)
            assert not is_new or run["state"] in ("starting", "running"), run
            time.sleep(1)
        raise AssertionError("the run told no step in time")

    def wait_for_setup(self, *, timeout_s: float = 60) -> str:
        """Return the id of the setup that is at work."""
        give_up = time.monotonic() + timeout_s
        while time.monotonic() < give_up:
            lock = self.status()["locks"]["setup"]
            if lock is not None:
                return str(lock["name"])
            time.sleep(0.2)
        raise AssertionError("no setup began in time")

    def processes(self) -> list[int]:
        """Return the living processes whose environment or command line names this machine's data folder."""
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                words = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
                is_zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue
            if b"ZY_SUPERVISED=" in words and str(self.folder / self.place).encode() in words and not is_zombie:
                found.append(int(entry.name))
        return found

    def supervisor(self, kind: str, work_id: str) -> int:
        """Return the process that supervises a run (`runs`) or a setup (`setups`)."""
        path = Path(self.data.data) / kind / work_id / "supervisor.json"
        return int(json.loads(path.read_text("utf-8"))["attempts"][-1]["process"]["pid"])

    def runs(self) -> dict[str, Any]:
        """Return every run that lies on the machine, with its outcome (None: there is none)."""
        folder = Path(self.data.runs)
        found = sorted(folder.iterdir()) if folder.is_dir() else []
        return {path.name: _read_json(path / "outcome.json") for path in found}

    def reboot(self) -> None:
        """Kill everything that works here, and let every file speak of another boot."""
        pids = self.processes()
        for path in Path(self.data.data).glob("*/*/supervisor.json"):
            pids += [attempt["process"]["pid"] for attempt in json.loads(path.read_text())["attempts"]]
        for pid in pids:
            with suppress(OSError):
                if str(self.folder / self.place).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        _end_tmux(self.folder / "tmux")
        until(lambda: not self.processes(), "what was killed is gone")
        here = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        files = [*Path(self.data.data).glob("*/*/*.json"), *Path(self.root.locks).rglob("*.json")]
        texts = {path: path.read_text("utf-8") for path in files}
        assert any(here in text for text in texts.values())
        for path, text in texts.items():
            path.write_text(text.replace(here, "00000000-0000-4000-8000-000000000000"), "utf-8")

    def audit(self) -> list[dict[str, Any]]:
        """Return who did what."""
        return [json.loads(line) for line in Path(self.data.audit).read_text("utf-8").splitlines()]


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None


def until(holds: Callable[[], object], what: str, *, timeout_s: float = 60) -> None:
    """Return as soon as `holds()`; fail after `timeout_s`."""
    give_up = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < give_up, f"never came: {what}"
        time.sleep(0.02)


@contextmanager
def running_machine(folder: Path, *, of_user: Mapping[str, str] | None = None, **extra: str) -> Iterator[Machine]:
    """A machine for as long as the block lasts; whatever it still does then is ended.

    Args:
        of_user: More variables for whoever logs in; `extra` are more settings.
    """
    with ExitStack() as stack:
        tmux = folder / "tmux"
        tmux.mkdir(parents=True)
        for_user = {
            "TMUX_TMPDIR": str(tmux),
            EXTENSIONS_DIR: extensions_dir(sys.executable),
            "CUDA_VISIBLE_DEVICES": "",
            **(of_user or {}),
        }
        sshd = stack.enter_context(DemoSshd(folder / "ssh", home=folder / "home", environment=for_user))
        machine = Machine(folder, sshd, dict(extra))
        (folder / "laptop").mkdir()
        write_repository(machine.repository)
        write_dialogs(machine.dialog_zip)
        write_base_model(machine.base_model, _tokenizer_texts(machine.repository))
        write_recipe(machine)
        stack.callback(_end_tmux, tmux)
        stack.callback(lambda: machine.zy("kill", "--grace-minutes", "0"))
        yield machine
    for pid in machine.processes():
        os.kill(pid, signal.SIGKILL)


def _end_tmux(folder: Path) -> None:
    environment = {**os.environ, "TMUX_TMPDIR": str(folder)}
    environment.pop("TMUX", None)
    subprocess.run(["tmux", "kill-server"], env=environment, capture_output=True, check=False)


def write_repository(folder: Path) -> None:
    """Write documents; the canary is in the text of one and in the name of another."""
    (folder / "docs").mkdir(parents=True)
    topics = ("lamp", "fog", "gull", "boat", CANARY)
    for topic in topics:
        text = f"# The {topic}\n\n## What is the {topic}?\n\nThe {topic} is here every night, {CANARY} says so. 灯塔\n"
        (folder / "docs" / f"{topic}.md").write_text(text, "utf-8")


def write_dialogs(path: Path) -> None:
    """Write the ZIP; the canary is in every dialog and in the name of one."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(DIALOGS):
            turns = "".join(
                f"Tamsin: How is night {number}, part {turn}?\nKestrin: Calm, {CANARY} and all. 晚安 {turn}\n"
                for turn in (1, 2)
            )
            name = f"{CANARY} {number}.md" if number == 0 else f"dialog {number}.md"
            archive.writestr(name, turns)


def write_recipe(machine: Machine) -> None:
    """Write the person's own plan and recipes: two ranks on the CPU, ZeRO-3 with the optimizer offloaded; and one."""
    plan = {
        "name": "tiny",
        "system_prompt": "You keep a lighthouse.",
        "system_prompt_share": 0.5,
        "soul_replica": 2,
        "speakers": {"user": ["Tamsin"], "assistant": ["Kestrin"]},
        "sources": [
            {
                "kind": "soul", "globs": ["docs/*.md"], "min_section_chars": 5,
                "questions": {
                    "whole": ["Read {path} to me.", "What does {path} say?"],
                    "section": ["{section}", "Tell me: {section}"],
                },
            },
            {"kind": "dialog"},
        ],
        "gates": {"relation_stop_below": 2, "relation_warn_below": 3, "total_stop_below": 5, "total_warn_below": 6},
    }  # fmt: skip
    recipe = {
        "name": "tiny", "version": "tiny_v1", "plan": "plan.yaml", "base_model_dir": str(machine.base_model),
        "max_seq_len": 256, "num_train_epochs": 2, "learning_rate": 1.0e-3, "tokens_per_step": 512, "gpus": 2,
        "packing": False, "device": "cpu", "deepspeed": "zero3_offload", "allow_few_steps": True,
        "report_every_steps": 1, "logging_steps": 1, "save_steps": 1000,
    }  # fmt: skip
    alone = {"gpus": 1, "deepspeed": "none", "num_train_epochs": 1, "packing": True, "name": "alone"}
    for name, values in (("plan.yaml", plan), ("tiny.yaml", recipe), ("alone.yaml", recipe | alone)):
        (machine.repository / name).write_text(yaml.safe_dump(values, allow_unicode=True), "utf-8")


def _tokenizer_texts(repository: Path) -> list[Sample]:
    texts = [path.read_text("utf-8") for path in sorted((repository / "docs").glob("*.md"))]
    texts.append("Tamsin Kestrin How is night part? Calm and all. 晚安 0123456789")
    return [
        Sample(messages=(Message("user", text), Message("assistant", text)), source="t", sample_class="soul")
        for text in texts
    ]


def counts_by_class(summary: Mapping[str, Any]) -> dict[str, int]:
    """Return the samples per class of a `--json` report."""
    return {name: account["samples"] for name, account in summary["manifest"]["classes"].items()}
