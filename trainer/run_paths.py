"""Every file and folder of the box: no other module spells these names (design 4.4). Pure.

Runs on the box too: standard library and Python 3.8 only. Paths are strings of the box, joined with `/`.

    >>> run_paths("/data/zy", "zy_coding_v1", "20260503-101500-3fa1").outcome
    '/data/zy/runs/20260503-101500-3fa1/outcome.json'
"""

import posixpath
import re
import secrets
from dataclasses import dataclass

TRAIN_SESSION = "zy-coding-train"
SETUP_SESSION = "zy-setup"
RUN_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}\Z")
VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
CHECKPOINT = re.compile(r"checkpoint-(\d+)\Z")
#: Written into a checkpoint folder last: a folder without it is not a checkpoint.
CHECKPOINT_COMPLETE = "complete.json"


def new_run_id(now_utc: str) -> str:
    """Return `YYYYmmdd-HHMMSS-xxxx` for a UTC time stamp `YYYYmmdd-HHMMSS`."""
    return "%s-%s" % (now_utc, secrets.token_hex(2))


@dataclass(frozen=True)
class DataPaths:
    """The data folder (`ZY_CODING_TRAIN_DATA`)."""

    data: str

    def _at(self, *parts: str) -> str:
        return posixpath.join(self.data, *parts)

    @property
    def dialog_pointer(self) -> str:
        """Points to the current archive's folder; swapped by rename, never merged."""
        return self._at("raw", "bingshuo-dialog")

    @property
    def archives(self) -> str:
        return self._at("raw", ".archives")

    def archive(self, sha256: str) -> str:
        return self._at("raw", ".archives", sha256)

    @property
    def download(self) -> str:
        """The dialog ZIP while it arrives."""
        return self._at("raw", ".download", "dialog.zip.partial")

    def upload(self, sha256: str) -> str:
        """A dialog ZIP that the runner has sent, until it is extracted."""
        return self._at("raw", ".download", sha256 + ".zip")

    @property
    def samples(self) -> str:
        return self._at("processed", "coding-sft.jsonl")

    @property
    def manifest(self) -> str:
        return self._at("processed", "coding-sft.manifest.json")

    @property
    def report(self) -> str:
        return self._at("processed", "coding-sft.report.html")

    @property
    def encoded(self) -> str:
        """Samples as token ids, one file per corpus, tokenizer and window; can be deleted at any time."""
        return self._at("processed", ".encoded")

    @property
    def weight_digests(self) -> str:
        """sha256 of weight files by path, size and time; can be deleted at any time."""
        return self._at(".weight-digests.json")

    @property
    def logs(self) -> str:
        return self._at("logs")

    @property
    def setup_log(self) -> str:
        return self._at("logs", "setup.log")

    @property
    def build_log(self) -> str:
        return self._at("logs", "build-corpus.log")

    @property
    def audit(self) -> str:
        return self._at("audit.jsonl")

    @property
    def runs(self) -> str:
        return self._at("runs")

    @property
    def setups(self) -> str:
        """One folder per setup, with the files of a run."""
        return self._at("setups")

    @property
    def checkpoints(self) -> str:
        return self._at("checkpoints")

    @property
    def current(self) -> str:
        """What serve, verify and ask use; a rollback is one rename of this pointer."""
        return self._at("checkpoints", "current")

    @property
    def published(self) -> str:
        return self._at("checkpoints", "published.jsonl")

    def version(self, version: str) -> str:
        return self._at("checkpoints", version)

    def version_final(self, version: str) -> str:
        """Pointer to the newest run's result of a version."""
        return self._at("checkpoints", version, "final")


@dataclass(frozen=True)
class RootPaths:
    """The folder of our code (`ZY_CODING_TRAIN_ROOT`)."""

    root: str

    def release(self, digest: str) -> str:
        return posixpath.join(self.root, "releases", digest)

    @property
    def releases(self) -> str:
        return posixpath.join(self.root, "releases")

    @property
    def current_release(self) -> str:
        return posixpath.join(self.root, "releases", "current")

    @property
    def venvs(self) -> str:
        return posixpath.join(self.root, "venvs")

    def venv(self, digest: str) -> str:
        return posixpath.join(self.root, "venvs", digest)

    @property
    def locks(self) -> str:
        return posixpath.join(self.root, "locks")

    @property
    def setup_lock(self) -> str:
        return posixpath.join(self.root, "locks", "setup.json")

    @property
    def run_lock(self) -> str:
        return posixpath.join(self.root, "locks", "run.json")


@dataclass(frozen=True)
class RunPaths:
    """One run, or one setup (which has the same files under `setups/` and no checkpoints)."""

    folder: str
    log: str
    checkpoints: str

    def _at(self, name: str) -> str:
        return posixpath.join(self.folder, name)

    @property
    def run_id(self) -> str:
        return posixpath.basename(self.folder)

    @property
    def recipe(self) -> str:
        """The resolved recipe with the origin of each value."""
        return self._at("recipe.json")

    @property
    def supervisor_spec(self) -> str:
        """What the supervisor was asked to do (`trainer.supervise`)."""
        return self._at("spec.json")

    @property
    def state(self) -> str:
        return self._at("state.json")

    @property
    def progress(self) -> str:
        return self._at("progress.jsonl")

    @property
    def events(self) -> str:
        return self._at("events.jsonl")

    @property
    def outcome(self) -> str:
        """Written last, by rename: its existence means that the run has ended."""
        return self._at("outcome.json")

    @property
    def supervisor(self) -> str:
        """Pid, start ticks and boot id of the supervisor and its child, one entry per attempt."""
        return self._at("supervisor.json")

    @property
    def stop(self) -> str:
        """`checkpoint` or `now`; read by rank 0 at a step border."""
        return self._at("stop")

    @property
    def secrets(self) -> str:
        return self._at("secrets.env")

    @property
    def error(self) -> str:
        """A `ProjectError` that ended a step, as JSON."""
        return self._at("error.json")

    @property
    def first_batch(self) -> str:
        """The first batch decoded, its trained part marked: text, 0600, never in a log."""
        return self._at("first-batch.txt")

    @property
    def base_answers(self) -> str:
        """What the base model said to the questions that it must answer: text, 0600, never in a log."""
        return self._at("base-answers.json")

    @property
    def final(self) -> str:
        return posixpath.join(self.checkpoints, "final")

    def checkpoint(self, step: int) -> str:
        return posixpath.join(self.checkpoints, "checkpoint-%d" % step)


def run_paths(data: str, version: str, run_id: str) -> RunPaths:
    """Return the paths of one training run."""
    paths = DataPaths(data)
    return RunPaths(
        folder=posixpath.join(paths.runs, run_id),
        log=posixpath.join(paths.logs, "train-%s.log" % run_id),
        checkpoints=posixpath.join(paths.version(version), run_id),
    )


def setup_paths(data: str, setup_id: str) -> RunPaths:
    """Return the paths of one setup."""
    paths = DataPaths(data)
    return RunPaths(folder=posixpath.join(paths.setups, setup_id), log=paths.setup_log, checkpoints="")
