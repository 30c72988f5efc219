"""A training as values: what starts it, its environment, and what must hold before it may start. Asks only.

Runs on the box: standard library and Python 3.8 only. Side effects: none.
"""

import os
import posixpath
from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence

from controller.boxside.arguments import DIGEST, Arguments
from controller.boxside.environment import find_current, find_overlay, python_of
from controller.boxside.facts import is_release_present
from controller.boxside.work import TRAIN, read_json
from corpus_builder.errors import ProjectError
from trainer.gpus import GpuQuery, Gpus, choose_gpus
from trainer.on_end import ON_END, split_command
from trainer.run_paths import RUN_ID, VERSION, DataPaths, RootPaths, RunPaths, run_paths

MAX_RANKS = 64
DEFAULT_GRACE_S = 600
STOP = "stop"


@dataclass(frozen=True)
class TrainPlan:
    """One run that is about to start. `samples_sha256`: of the corpus that is meant, None for whichever is there."""

    data: str
    root: str
    digest: str
    id: str
    version: str
    owner: str
    action: str
    recipe: Dict[str, Any]
    origins: Dict[str, Any]
    python: str
    secrets: Dict[str, str]
    grace_s: int
    gpus: Gpus
    samples_sha256: Optional[str] = None
    overlay: Optional[str] = None  # the folder with what the person's own environment lacks
    on_end: Optional[str] = None  # `poweroff`, or a command
    kind: str = TRAIN

    @property
    def paths(self) -> RunPaths:
        """The files of this run."""
        return run_paths(self.data, self.version, self.id)

    @property
    def code(self) -> str:
        """Our code on the box."""
        return posixpath.join(RootPaths(self.root).release(self.digest), "code")

    @property
    def is_on_cpu(self) -> bool:
        """Whether the recipe's device, or a box without nvidia-smi, means the CPU."""
        device = self.recipe.get("device", "auto")
        return bool(device == "cpu" or (device == "auto" and not self.gpus.is_installed))

    def check(self) -> None:
        """Raise unless there is a corpus that its gates let pass, GPUs for every rank, and a Python."""
        if not is_release_present(self.root, self.digest):
            raise ProjectError(
                "release_corrupt", path=RootPaths(self.root).release(self.digest), reason="it is not there"
            )
        if not os.access(self.python, os.X_OK):
            raise ProjectError("environment_unusable", path=self.python, reason="there is no such program")
        if not self.is_on_cpu:
            choose_gpus(self.recipe["gpus"], self.gpus.rows or [])  # the run itself chooses again
        if self.recipe.get("data_path") is None:
            check_manifest(DataPaths(self.data), self.samples_sha256)

    def recipe_json(self) -> Dict[str, Any]:
        """Return what `trainer.launch` and `trainer.train` read."""
        return {
            "recipe": self.recipe,
            "origins": self.origins,
            "data": self.data,
            "version": self.version,
            "run_id": self.id,
            "samples_sha256": self.samples_sha256,
            "resume_from": None,
        }

    def spec(self) -> Dict[str, Any]:
        """Return what the supervisor is asked to do."""
        return train_spec(
            self.paths,
            data=self.data,
            code=self.code,
            python=self.python,
            lock=RootPaths(self.root).run_lock,
            owner=self.owner,
            action=self.action,
            version=self.version,
            digest=self.digest,
            grace_s=self.grace_s,
            secrets=sorted(self.secrets),
            overlay=self.overlay,
            on_end_locks=[RootPaths(self.root).setup_lock, RootPaths(self.root).run_lock],
        )

    def secrets_json(self) -> Dict[str, str]:
        """Return what the 0600 file holds: a command may carry a key, so it lies there, and no step sees it."""
        return self.secrets if self.on_end is None else dict(self.secrets, **{ON_END: self.on_end})


def train_spec(
    paths: RunPaths,
    *,
    data: str,
    code: str,
    python: str,
    lock: str,
    owner: str,
    action: str,
    version: str,
    digest: str,
    grace_s: int,
    secrets: List[str],
    overlay: Optional[str] = None,
    on_end_locks: Sequence[str] = (),
) -> Dict[str, Any]:
    """Return what a supervisor is asked to do to train the run of `paths`; `secrets` are names."""
    return {
        "kind": TRAIN,
        "folder": paths.folder,
        "data": data,
        "log": paths.log,
        "lock": lock,
        "owner": owner,
        "action": action,
        "name": paths.run_id,
        "version": version,
        "digest": digest,
        "final": paths.final,
        "grace_s": grace_s,
        "on_end_locks": list(on_end_locks),
        "steps": [
            {
                "name": "train",
                "argv": [python, "-m", "trainer.launch", paths.recipe],
                "cwd": code,
                "env": train_environment(python, code, overlay),
                "log": None,
                "secrets": secrets,
            }
        ],
    }


def train_environment(python: str, code: str, overlay: Optional[str]) -> Dict[str, str]:
    """Return what a training's environment has beside what it inherits; ranks get theirs from `trainer.launch`."""
    tools = [os.path.dirname(python)]  # ninja, for what DeepSpeed compiles
    lacked = {}
    if overlay is not None:
        tools.append(os.path.join(overlay, "bin"))
        lacked["PYTHONPATH"] = os.pathsep.join((code, overlay))
    return {
        **lacked,
        "PATH": os.pathsep.join([*tools, os.environ.get("PATH", os.defpath)]),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",  # a person's own environment is never written to
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore::FutureWarning",  # torch tells its own callers so, thousands of times a run
    }


def plan_training(args: Arguments) -> TrainPlan:
    """Return the run that the arguments of `start_train` ask for; nothing is written."""
    query = GpuQuery()
    root, recipe, python = args.path("root"), args.mapping("recipe"), args.optional_path("python")
    check_gpu_wish(recipe.get("gpus"))
    interpreter = python_of(python) if python else find_current(root)
    if interpreter is None:
        raise ProjectError("environment_unusable", path=RootPaths(root).venvs, reason="no setup has made one yet")
    return TrainPlan(
        data=args.path("data"),
        root=root,
        digest=args.text("digest", DIGEST),
        id=args.text("run_id", RUN_ID),
        version=args.text("version", VERSION),
        owner=args.text("owner"),
        action=args.text("action"),
        recipe=recipe,
        origins=args.mapping("origins"),
        python=interpreter,
        secrets=dict(args.variables("env"), **args.variables("secrets")),
        grace_s=args.count("grace_s", DEFAULT_GRACE_S, 24 * 3600),
        gpus=query.read(),
        samples_sha256=args.optional_text("samples_sha256", DIGEST),
        overlay=find_overlay(root, interpreter),
        on_end=checked_on_end(args),
    )


def checked_on_end(args: Arguments) -> Optional[str]:
    """Return what to do after the run's end, None for nothing; raise `input_invalid` unless it is a command."""
    wish = args.optional_text("on_end")
    if wish is None:
        return None
    try:
        split_command(wish)
    except ValueError:
        raise ProjectError("input_invalid", name="on_end", reason="must be `poweroff` or a command") from None
    return wish


def check_gpu_wish(gpus: Any) -> None:
    """Raise unless `gpus` is a count, or a list of different numbers, of at most MAX_RANKS."""
    count = len(gpus) if isinstance(gpus, list) else gpus
    numbers = gpus if isinstance(gpus, list) else []
    is_whole = all(isinstance(number, int) and not isinstance(number, bool) for number in [count] + numbers)
    if not is_whole or not 0 < count <= MAX_RANKS or min(numbers + [0]) < 0 or len(set(numbers)) != len(numbers):
        raise ProjectError(
            "input_invalid", name="gpus", reason="must be a whole number from 1 to %d, or a list of them" % MAX_RANKS
        )


def check_manifest(paths: DataPaths, samples_sha256: Optional[str]) -> None:
    """Raise `corpus_missing` or `samples_changed` where it is not the one meant, `gate_failed` where a gate stops."""
    path = paths.manifest
    manifest = read_json(path)
    if manifest is None:
        raise ProjectError("corpus_missing", path=path)
    if samples_sha256 is not None and manifest.get("samples_sha256") != samples_sha256:
        raise ProjectError("samples_changed", path=paths.samples)
    try:
        stopped = [gate for gate in manifest["gates"] if gate["verdict"] == STOP]
        words = ["%s (%g < %g)" % (gate["name"], gate["found"], gate["wanted"]) for gate in stopped]
    except (KeyError, TypeError):
        raise ProjectError("corpus_missing", path=path) from None
    if words:
        raise ProjectError("gate_failed", gates=", ".join(words))
