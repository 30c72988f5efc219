"""A box of the test's own: real agent, real release, real tmux on a private socket, everything in one folder."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from controller.local_box import LocalBox
from controller.release import CODE_ROOT, Release, gather
from corpus_builder.config import validate
from corpus_builder.plan import Plan
from trainer.children import child_from_json, find_members
from trainer.locks import start_ticks
from trainer.run_paths import DataPaths, RootPaths
from trainer.run_state import has_ended

VERSION = "v1"
PLAN: dict[str, Any] = {
    "name": "small",
    "system_prompt": "You keep a lighthouse.",
    "soul_replica": 2,
    "speakers": {"user": ["冰朔"], "assistant": ["铸渊"]},
    "sources": [
        {
            "kind": "soul",
            "paths": ["docs/lamp.md", "docs/missing.md"],
            "questions": {"whole": ["What is {path}?", "Tell {path}."], "section": ["{section} in {path}?"]},
        },
        {"kind": "dialog"},
    ],
    "gates": {"soul_files_found_share": 0.1, "total_stop_below": 1, "total_warn_below": 2},
}
#: Stands for an environment's Python: what the launcher starts, reduced to lines and a result.
TRAINER = """import json, os, signal, subprocess, sys, time
recipe = json.load(open(sys.argv[-1]))
mode = recipe["recipe"]["mode"]
folder = os.path.dirname(sys.argv[-1])
print("argv", json.dumps(sys.argv[1:]))
print("env", os.environ.get("DS_ACCELERATOR"), os.environ.get("OMP_NUM_THREADS"), os.environ["PATH"].split(":")[0])
if mode == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
for step in range(1, 5 if mode == "short" else 10 ** 6):
    print("ZY_PROGRESS step=%d total=4 loss=2.5 lr=1e-5 epoch=1 total_epochs=2 thr=1 loss_soul=2.25" % step, flush=True)
    if mode == "long" and os.path.exists(folder + "/stop"):
        print("ZY_EVENT name=stop_requested step=%d" % step)
        sys.exit(0)
    time.sleep(0.02 if mode == "short" else 0.2)
checkpoints = os.path.join(recipe["data"], "checkpoints", recipe["version"], recipe["run_id"])
os.makedirs(checkpoints + "/checkpoint-4")
open(checkpoints + "/checkpoint-4/complete.json", "w").write("{}")
os.makedirs(checkpoints + "/final")
"""


@dataclass
class AgentBox:
    """One private box. `ask` goes the whole way: bundle, loader, operation, answer."""

    folder: Path
    python: str
    tmux_environment: dict[str, str]  # of the private server: no other one is ever addressed
    ids: Iterator[int] = field(default_factory=lambda: iter(range(10**6)))

    @property
    def data(self) -> DataPaths:
        return DataPaths(str(self.folder / "data"))

    @property
    def root(self) -> RootPaths:
        return RootPaths(str(self.folder / "root"))

    @property
    def places(self) -> dict[str, str]:
        return {"data": self.data.data, "root": self.root.root}

    def ask(self, op: str, **args: Any) -> dict[str, Any]:
        stream = args.pop("stream", None)
        return LocalBox(self.python).ask(op, {**self.places, **args}, timeout_s=60, stream=stream)

    def release(self) -> Release:
        """Return our real code, and the sources of the small plan."""
        sources = self.folder / "repository"
        (sources / "docs").mkdir(parents=True, exist_ok=True)
        (sources / "docs/lamp.md").write_text("# Lamp\n\nIt is lit at dusk.\n\n## Oil\n\n" + "Much oil. " * 30, "utf-8")
        return gather(CODE_ROOT, sources, validate(Plan, PLAN, where="plan"))

    def push(self) -> str:
        """Bring the release and return its digest."""
        release = self.release()
        self.ask("receive_release", digest=release.digest, files=release.files(), stream=release.stream())
        return release.digest

    def next_id(self) -> str:
        return f"20260503-{next(self.ids):06d}-3fa1"

    def setup_request(self, digest: str, **changes: Any) -> dict[str, Any]:
        request = {
            "digest": digest, "owner": "alice", "action": "setup-only", "commit": "c0ffee", "run_url": "https://x/1",
            "setup_id": self.next_id(), "lang": "en", "python": None, "plan": PLAN,
            "recipe": {"base_model_dir": str(self.folder / "base"), "max_seq_len": 512, "deepspeed": "none"},
            "suite": None, "dialog": {"kind": "none"}, "secrets": {}, "fetch_allow": [],
        }  # fmt: skip
        return {**request, **changes}

    def train_request(self, digest: str, mode: str = "short", **changes: Any) -> dict[str, Any]:
        recipe = {"gpus": 2, "device": "cpu", "mode": mode, **changes.pop("recipe", {})}
        request = {
            "digest": digest, "owner": "alice", "action": "setup-and-train", "run_id": self.next_id(),
            "version": VERSION, "recipe": recipe, "origins": {}, "python": self.trainer(), "secrets": {}, "grace_s": 60,
        }  # fmt: skip
        return {**request, **changes}

    def trainer(self) -> str:
        """Return the Python of an environment in which a small script stands for the launcher."""
        path = self.folder / "mother/bin/python"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!{sys.executable}\n" + TRAINER)
        path.chmod(0o755)
        return str(path)

    def write_manifest(self, *gates: Mapping[str, Any]) -> None:
        path = Path(self.data.manifest)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.write_text(json.dumps({"gates": list(gates)}))

    def write_base_model(self, tokenizer_dir: Path) -> None:
        """Write a model folder that is whole as files go: a tokenizer, a config, weights of no tensor."""
        base = self.folder / "base"
        base.mkdir()
        for path in tokenizer_dir.iterdir():
            (base / path.name).write_bytes(path.read_bytes())
        (base / "config.json").write_text("{}")
        (base / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")

    def follow(self, kind: str, work_id: str, *, until: str | None = None) -> tuple[dict[str, Any], list[str]]:
        """Follow to the end, or until a line holds `until`; return the last answer and all lines."""
        lines: list[str] = []
        offset, give_up = 0, time.monotonic() + 90
        while time.monotonic() < give_up:
            answer = self.ask("follow", kind=kind, id=work_id, offset=offset, max_bytes=1 << 16, see="named")
            lines += answer["lines"]
            drained, offset = answer["next_offset"] == offset, answer["next_offset"]
            if until is not None and any(until in line for line in lines):
                return answer, lines
            if has_ended(answer["state"]) and drained:
                return answer, lines
            time.sleep(0.1)
        raise AssertionError("\n".join(lines[-50:]))

    def supervisor_pid(self, kind: str, work_id: str) -> int:
        return int(self.attempts(kind, work_id)[-1]["process"]["pid"])

    def attempts(self, kind: str, work_id: str) -> list[dict[str, Any]]:
        folder = Path(self.data.setups if kind == "setup" else self.data.runs) / work_id
        return list(json.loads((folder / "supervisor.json").read_text())["attempts"])

    def tree(self) -> dict[str, bytes | None]:
        """Return every path below the box's folder, with what files hold."""
        return {
            str(path.relative_to(self.folder)): path.read_bytes() if path.is_file() else None
            for path in sorted(self.folder.rglob("*"))
            if "tmux" not in path.parts and not path.is_socket()
        }

    def end_tmux(self) -> None:
        """End the private tmux server, and return when the hang-up of its terminals has reached everybody."""
        words = ["tmux", "display-message", "-p", "#{pid}"]
        asked = subprocess.run(words, check=True, capture_output=True, text=True, env=self.tmux_environment)
        subprocess.run(["tmux", "kill-server"], check=True, env=self.tmux_environment)
        give_up = time.monotonic() + 10
        while start_ticks(int(asked.stdout)) is not None:
            assert time.monotonic() < give_up, "tmux goes on"
            time.sleep(0.02)

    def end(self) -> None:
        """End what the test left: supervisors, their children, the private tmux server."""
        for path in self.folder.glob("data/*/*/supervisor.json"):
            for attempt in json.loads(path.read_text())["attempts"]:
                pids = [attempt["process"]["pid"]]
                pids += find_members(child_from_json(attempt["child"])) if attempt["child"] else []
                command = Path(f"/proc/{pids[0]}/cmdline")
                if not command.exists() or b"trainer.supervise" not in command.read_bytes():
                    pids = pids[1:]
                for pid in pids:
                    with suppress(ProcessLookupError):  # on its way out
                        os.kill(pid, signal.SIGKILL)
        subprocess.run(["tmux", "kill-server"], check=False, capture_output=True, env=self.tmux_environment)


@contextmanager
def agent_box(folder: Path, python: str, monkeypatch: Any) -> Iterator[AgentBox]:
    """Yield a private box; tmux and the home folder are its own."""
    for name in ("home", "tmux"):
        (folder / name).mkdir()
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.setenv("TMUX_TMPDIR", str(folder / "tmux"))
    monkeypatch.delenv("TMUX", raising=False)
    box = AgentBox(folder, python, {"PATH": os.environ["PATH"], "TMUX_TMPDIR": str(folder / "tmux")})
    try:
        yield box
    finally:
        box.end()
