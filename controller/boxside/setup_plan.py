"""A setup as values: what was asked for, and the steps that follow from it. Asks only (GPUs, the lock file).

Runs on the box: standard library and Python 3.8 only. Side effects: none. Every step's request is a file in the
setup's folder, so no value ever stands in a command line.
"""

import hashlib
import json
import os
import posixpath
import shutil
import sys
from dataclasses import dataclass
from typing import Any, Dict, List, Optional

from controller.boxside.arguments import DIGEST, HOST, NAME, Arguments
from controller.boxside.environment import environment_digest, lock_name, overlay_link, python_of, read_lock_file
from controller.boxside.facts import is_release_present
from controller.boxside.uploads import SHA256
from controller.boxside.work import SETUP
from corpus_builder.errors import ProjectError
from trainer.gpus import GpuQuery
from trainer.run_paths import DataPaths, RootPaths, RunPaths, setup_paths

LANGUAGES = ("zh", "en")
DIALOG_KINDS = ("url", "path", "upload", "none")
#: What does not make a request another one: who asks, when, and the signature of a link.
_NOT_THE_REQUEST = frozenset({"setup_id", "owner", "action", "commit", "run_url", "secrets"})
DIALOG_URL = "ZY_DIALOG_URL"
OLDEST_LOCK = "volta"
#: Which step needs which secret; the others see none.
_SECRETS_OF = {"fetch": (DIALOG_URL,), "environment": ("PIP_INDEX_URL", "HF_ENDPOINT")}


@dataclass(frozen=True)
class SetupPlan:
    """One setup that is about to start. `secrets` go into a 0600 file, for the steps that need them."""

    data: str
    root: str
    digest: str
    id: str
    owner: str
    action: str
    requests: Dict[str, Dict[str, Any]]  # step name -> what its file says
    pythons: Dict[str, str]  # step name -> interpreter
    secrets: Dict[str, str]
    request_digest: str
    overlay: Optional[str] = None  # where what the person's own environment lacks will lie
    kind: str = SETUP

    @property
    def paths(self) -> RunPaths:
        """The files of this setup."""
        return setup_paths(self.data, self.id)

    @property
    def code(self) -> str:
        """Our code on the box."""
        return posixpath.join(RootPaths(self.root).release(self.digest), "code")

    def request_path(self, step: str) -> str:
        """Return the file of a step's request."""
        return posixpath.join(self.paths.folder, "step-%s.json" % step)

    def request_files(self) -> Dict[str, Dict[str, Any]]:
        """Return the files that the steps read."""
        return {self.request_path(step): request for step, request in self.requests.items()}

    def spec(self) -> Dict[str, Any]:
        """Return what the supervisor is asked to do."""
        return {
            "kind": SETUP,
            "folder": self.paths.folder,
            "data": self.data,
            "log": self.paths.log,
            "lock": RootPaths(self.root).setup_lock,
            "owner": self.owner,
            "action": self.action,
            "name": self.id,
            "digest": self.digest,
            "request_digest": self.request_digest,
            "grace_s": 0,
            "steps": [self._step(name) for name in self.requests],
        }

    def _step(self, name: str) -> Dict[str, Any]:
        module = ["corpus_builder.build"] if name == "corpus" else ["controller.boxside", "step", name]
        env = {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        if name == "corpus" and self.overlay is not None:
            env["PYTHONPATH"] = os.pathsep.join((self.code, self.overlay))
        return {
            "name": name,
            "argv": [self.pythons[name], "-m", *module, self.request_path(name)],
            "cwd": self.code,
            "env": env,
            "log": DataPaths(self.data).build_log if name == "corpus" else None,
            "secrets": [secret for secret in _SECRETS_OF.get(name, ()) if secret in self.secrets],
        }


def plan_setup(args: Arguments) -> SetupPlan:
    """Return the setup that the arguments of `start_setup` ask for; nothing is written.

    Raises:
        ProjectError: `input_invalid`, `release_corrupt`, or `environment_failed` where no lock file fits this box.
    """
    data, root, digest = args.path("data"), args.path("root"), args.text("digest", DIGEST)
    if not is_release_present(root, digest):
        raise ProjectError("release_corrupt", path=RootPaths(root).release(digest), reason="it is not there")
    secrets = dict(args.variables("env"), **args.variables("secrets"))
    code = posixpath.join(RootPaths(root).release(digest), "code")
    mother = args.optional_path("python")
    lock = _choose_lock(args, is_for_ours=mother is None)
    python = python_of(mother or _environment_folder(root, code, lock))
    recipe, dialog = args.mapping("recipe"), _checked_dialog(args, secrets)
    requests: Dict[str, Dict[str, Any]] = {
        "check": {"data": data, "root": root, "base_model_dir": recipe.get("base_model_dir")},
        "tmux": {"allow": args.values.get("allow_install") is True},
        "fetch": {
            "data": data,
            "dialog": dialog,
            "allow": args.texts("fetch_allow", HOST),
            "limits": args.mapping("plan").get("archive"),
        },
        "environment": {"root": root, "code": code, "python": None if mother is None else python, "lock": lock},
        "kernels": {"root": root, "python": python},
        "smoke": {"root": root, "code": code, "python": python, "recipe": recipe},
        "corpus": _corpus_request(args, data, code, dialog),
    }
    if not offloads_optimizer(code, str(recipe.get("deepspeed"))):
        del requests["kernels"]
    if shutil.which("tmux") is not None:
        del requests["tmux"]
    system = sys.executable or "python3"
    return SetupPlan(
        data=data,
        root=root,
        digest=digest,
        id=args.text("setup_id", NAME),
        owner=args.text("owner"),
        action=args.text("action"),
        requests=requests,
        pythons={name: python if name == "corpus" else system for name in requests},
        secrets=secrets,
        request_digest=digest_request(args.values, secrets.get(DIALOG_URL)),
        overlay=None if mother is None else overlay_link(root, python),
    )


def _choose_lock(args: Arguments, *, is_for_ours: bool) -> str:
    """Return the lock file's name: the one asked for, or what the GPUs need; a person's own environment may fit more.

    Of what such a one lacks, the small packages, every lock file has the same kinds.
    """
    asked = args.optional_text("environment_lock", NAME)
    try:
        return asked or lock_name(GpuQuery().read())
    except ProjectError:
        if is_for_ours:
            raise
        return OLDEST_LOCK


def _environment_folder(root: str, code: str, lock: str) -> str:
    """Return where the environment of a lock file lies or will lie."""
    return RootPaths(root).venv(environment_digest(read_lock_file(code, lock)))


def _checked_dialog(args: Arguments, secrets: Dict[str, str]) -> Dict[str, Any]:
    dialog = args.mapping("dialog")
    kind = Arguments(dialog).word("kind", DIALOG_KINDS, "none")
    if kind == "url" and not secrets.get(DIALOG_URL):
        raise ProjectError("input_invalid", name="dialog_zip", reason="its link is missing")
    path = Arguments(dialog).path("path") if kind == "path" else None
    sha256 = Arguments(dialog).text("sha256", SHA256) if kind == "upload" else None
    return {"kind": kind, "path": path, "sha256": sha256, "fresh": dialog.get("fresh") is True}


def _corpus_request(args: Arguments, data: str, code: str, dialog: Dict[str, Any]) -> Dict[str, Any]:
    """Return the request of `corpus_builder.build`; the plan's own dialog folder goes before the fetched archive."""
    plan, recipe, paths = args.mapping("plan"), args.mapping("recipe"), DataPaths(data)
    fetched = paths.dialog_pointer if dialog["kind"] != "none" else None
    return {
        "plan": plan,
        "sources_dir": posixpath.join(posixpath.dirname(code), "sources"),
        "dialog_dir": plan.get("dialog_dir") or fetched,
        "base_model_dir": recipe.get("base_model_dir"),
        "max_seq_len": recipe.get("max_seq_len"),
        "samples": paths.samples,
        "manifest": paths.manifest,
        "report": paths.report,
        "suite": args.values.get("suite"),
        "lang": args.word("lang", LANGUAGES, "zh"),
    }


def preset_path(code: str, name: str) -> str:
    """Return the file of a DeepSpeed preset: one of ours by its name, or a file of the box."""
    return name if name.endswith(".json") else os.path.join(code, "configs", "deepspeed", name + ".json")


def offloads_optimizer(code: str, name: str) -> bool:
    """Whether a preset keeps the optimizer on the host, which needs DeepSpeed's CPU Adam."""
    try:
        with open(preset_path(code, name), encoding="utf-8") as file:
            zero: Optional[Any] = json.load(file).get("zero_optimization")
        return bool((zero or {}).get("offload_optimizer", {}).get("device") == "cpu")
    except (OSError, ValueError, AttributeError):
        return False  # the training says what is wrong with it


def digest_request(values: Dict[str, Any], url: Optional[str]) -> str:
    """Return what makes two requests the same: everything but who asks and how a link is signed."""
    kept: Dict[str, Any] = {key: value for key, value in values.items() if key not in _NOT_THE_REQUEST}
    names: List[str] = sorted(values.get("secrets") or {})
    text = json.dumps([kept, names, (url or "").partition("?")[0]], sort_keys=True)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()
