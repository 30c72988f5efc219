"""The steps of a setup that run on the box, from `tmux` to `smoke`. Side effects: as each step says.

    python3 -m controller.boxside step <name> <request.json>      in the code folder of a release

Runs on the box: standard library and Python 3.8 only. A step that fails says why in a ZY_ERROR line.
"""

import json
import os
import sys
from typing import Any, Callable, Dict, List, Mapping, Optional

from controller.boxside.commands import clean_environment, environment_of, run_command, say
from controller.boxside.environment import (
    make_environment,
    note_candidate,
    probe,
    read_candidate,
    read_lock_file,
)
from controller.boxside.facts import read_disk
from controller.boxside.fetch import fetch_dialogs
from controller.boxside.folders import make_private_folder
from controller.boxside.health import GIB
from controller.boxside.overlay import make_overlay
from controller.boxside.packages import install_tmux
from controller.boxside.smoke import prove
from controller.boxside.status import size_of
from corpus_builder.errors import EXIT_INPUT, Named, ProjectError, format_error_line
from trainer.base_model import check_base_model
from trainer.build_locks import drop_stale_locks, extensions_dir

#: Beside the result and one checkpoint of the base model's size: corpus, logs, packages on the way.
RESERVE_GIB = 2.0
#: What DeepSpeed compiles on first use, a minute or two each: CPU Adam, and on a CPU the ranks' shared memory.
#: Source: deepspeed/comm/torch.py, `build_shm_op`.
_KERNELS = """
import os
import torch
is_on_cpu = not torch.cuda.is_available()
if is_on_cpu:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder import CPUAdamBuilder
CPUAdamBuilder().load()
if is_on_cpu:
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is not None:
        builder.load()
"""


def check(request: Mapping[str, Any]) -> None:
    """Raise unless the folders are ours alone, the base model is whole, and the disk has room for a result."""
    data, root, base_model_dir = request["data"], request["root"], request["base_model_dir"]
    for folder in (data, root):
        make_private_folder(folder)
    check_base_model(base_model_dir)
    free_gib = read_disk(data)["free_gib"]
    needed_gib = round(2 * size_of(base_model_dir) / GIB + RESERVE_GIB, 2)
    if free_gib < needed_gib:
        raise ProjectError("box_disk_full", path=data, free_gib=free_gib, needed_gib=needed_gib)
    say("check", "base model whole; {free} GiB free, {needed} GiB needed", free=free_gib, needed=needed_gib)


def fetch(request: Mapping[str, Any]) -> None:
    """Bring the dialogs."""
    fetch_dialogs(request, os.environ)


def environment(request: Mapping[str, Any]) -> None:
    """Look at the person's own environment, or make ours; the step `smoke` proves it and takes it into use."""
    root, code, python = request["root"], request["code"], request["python"]
    overlay = None
    if python is not None:
        say("environment", "looking at the environment of {python}; nothing is written to it", python=Named(python))
        overlay = make_overlay(root, python, lambda: read_lock_file(code, request["lock"]), _install_beside)
    else:
        python = make_environment(root, read_lock_file(code, request["lock"]), _install)
    versions = probe(python, overlay)
    note_candidate(root, python, versions, overlay)
    say("environment", "{versions}", versions=", ".join("%s %s" % pair for pair in sorted(versions.items())))


def _install(argv: List[str], words: str) -> None:
    """Run one command of an installation; its output is the log's."""
    _run_install(argv, words, clean_environment())


def _install_beside(argv: List[str], words: str) -> None:
    """The same with an environment's own Python, which writes no `.pyc` there."""
    _run_install(argv, words, dict(clean_environment(), PYTHONDONTWRITEBYTECODE="1"))


def _run_install(argv: List[str], words: str, environment: Mapping[str, str]) -> None:
    say("environment", "{words}", words=words)
    code = run_command(argv, environment)
    if code != 0:
        raise ProjectError("environment_failed", path=argv[0], reason="%s: exit code %d" % (words, code))


def kernels(request: Mapping[str, Any]) -> None:
    """Build DeepSpeed's CPU Adam, so that the first step of a training never pays for it."""
    python = request["python"]
    overlay = read_candidate(request["root"], python).get("overlay")
    for name in drop_stale_locks(extensions_dir(python)):
        say("environment", "the lock of a build of {name} that was killed is gone", name=name)
    say("environment", "building CPU Adam (about two minutes the first time)")
    code = run_command([python, "-c", _KERNELS], environment_of(python, overlay))
    if code != 0:
        raise ProjectError("environment_failed", path=python, reason="CPU Adam could not be built: exit code %d" % code)
    say("environment", "CPU Adam is ready")


STEPS: Dict[str, Callable[[Mapping[str, Any]], None]] = {
    "check": check,
    "tmux": install_tmux,
    "fetch": fetch,
    "environment": environment,
    "kernels": kernels,
    "smoke": prove,
}


def run_step(name: str, request_path: str) -> int:
    """Run one step; return its exit code."""
    step: Optional[Callable[[Mapping[str, Any]], None]] = STEPS.get(name)
    if step is None:
        print("no such step: %s" % name, file=sys.stderr)
        return EXIT_INPUT
    os.umask(0o077)
    with open(request_path, encoding="utf-8") as file:
        request = json.load(file)
    try:
        step(request)
    except ProjectError as error:
        print(format_error_line(error), file=sys.stderr, flush=True)
        return error.exit_code
    return 0
