"""A training as values: the launcher's words, its environment, and what must hold before it may start. Asks only.

Runs on the box: standard library and Python 3.8 only. Side effects: none, but a port that is asked for and let go.
"""

import os
import posixpath
import socket
from dataclasses import dataclass
from typing import Any, Dict, Optional

from controller.boxside.arguments import DIGEST, Arguments
from controller.boxside.environment import find_current, python_of
from controller.boxside.facts import GpuQuery, Gpus, is_release_present
from controller.boxside.work import TRAIN, read_json
from corpus_builder.errors import ProjectError
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
    def ranks(self) -> int:
        """Processes that train: one per GPU, or as many on the CPU."""
        return int(self.recipe["gpus"])

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
        if not self.is_on_cpu and len(self.gpus.rows or []) < self.ranks:
            raise ProjectError("gpus_missing", wanted=self.ranks, found=len(self.gpus.rows or []))
        if self.recipe.get("data_path") is None:
            check_manifest(DataPaths(self.data), self.samples_sha256)

    def recipe_json(self) -> Dict[str, Any]:
        """Return what `trainer.train` reads."""
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
        launcher = [self.python, "-m", "deepspeed.launcher.runner", "--num_gpus", str(self.ranks)]
        options = ["--no_local_rank", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
        argv = [*launcher, *options, "--module", "trainer.train", self.paths.recipe]
        return {
            "kind": TRAIN,
            "folder": self.paths.folder,
            "data": self.data,
            "log": self.paths.log,
            "lock": RootPaths(self.root).run_lock,
            "owner": self.owner,
            "action": self.action,
            "name": self.id,
            "version": self.version,
            "digest": self.digest,
            "final": self.paths.final,
            "grace_s": self.grace_s,
            "steps": [
                {
                    "name": "train",
                    "argv": argv,
                    "cwd": self.code,
                    "env": self._environment(),
                    "log": None,
                    "secrets": sorted(self.secrets),
                }
            ],
        }

    def _environment(self) -> Dict[str, str]:
        tools = os.path.dirname(self.python)  # ninja, for what DeepSpeed compiles
        environment = {
            "PATH": tools + os.pathsep + os.environ.get("PATH", os.defpath),
            "PYTHONUNBUFFERED": "1",
            "PYTHONDONTWRITEBYTECODE": "1",  # a person's own environment is never written to
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONWARNINGS": "ignore::FutureWarning",  # torch tells its own callers so, thousands of times a run
        }
        if self.is_on_cpu:
            threads = max(1, len(os.sched_getaffinity(0)) // self.ranks)
            environment.update({"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": str(threads)})
        return environment


def plan_training(args: Arguments) -> TrainPlan:
    """Return the run that the arguments of `start_train` ask for; nothing is written."""
    query = GpuQuery()
    root, recipe, python = args.path("root"), args.mapping("recipe"), args.optional_path("python")
    ranks = recipe.get("gpus")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 0 < ranks <= MAX_RANKS:
        raise ProjectError("input_invalid", name="gpus", reason="must be a whole number from 1 to %d" % MAX_RANKS)
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


def free_port() -> int:
    """Return a TCP port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
