"""The steps of a setup that run on the box: check, fetch, environment, kernels. Side effects: as each step says.

    python3 -m controller.boxside step <name> <request.json>      in the code folder of a release

Runs on the box: standard library and Python 3.8 only. A step that fails says why in a ZY_ERROR line.
"""

import json
import os
import subprocess
import sys
from typing import Any, Callable, Dict, List, Mapping, Optional

from controller.boxside.environment import for_installers, make_environment, note_current, probe, read_lock_file
from controller.boxside.facts import GIB, read_disk
from controller.boxside.fetch import fetch_dialogs
from controller.boxside.folders import make_private_folder
from controller.boxside.status import size_of
from corpus_builder.errors import EXIT_INPUT, Named, ProjectError, format_error_line
from corpus_builder.log_lines import log_line
from trainer.base_model import check_base_model
from trainer.build_locks import EXTENSIONS_DIR, drop_stale_locks, extensions_dir

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


def say(tag: str, sentence: str, **values: Any) -> None:
    """Print one line of our log."""
    print(log_line(tag, sentence, **values), flush=True)


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
    """Prove the person's own environment, or make ours; then it is the one that trains."""
    if request["python"] is not None:
        python = request["python"]
        say("environment", "looking at the environment of {python}; nothing is written to it", python=Named(python))
    else:
        lock_text = read_lock_file(request["code"], request["lock"])
        python = make_environment(request["root"], lock_text, _install)
    versions = probe(python)
    note_current(request["root"], python, versions)
    say("environment", "{versions}", versions=", ".join("%s %s" % pair for pair in sorted(versions.items())))


def _install(argv: List[str], words: str) -> None:
    """Run one command of an installation; its output is the log's."""
    say("environment", "{words}", words=words)
    code = _run(argv, clean_environment())
    if code != 0:
        raise ProjectError("environment_failed", path=argv[0], reason="%s: exit code %d" % (words, code))


def clean_environment() -> Dict[str, str]:
    """Return our environment without the path to our code, which is nothing to install beside."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
    return for_installers(kept)


def kernels(request: Mapping[str, Any]) -> None:
    """Build DeepSpeed's CPU Adam, so that the first step of a training never pays for it."""
    python = request["python"]
    extensions = extensions_dir(python)
    for name in drop_stale_locks(extensions):
        say("environment", "the lock of a build of {name} that was killed is gone", name=name)
    say("environment", "building CPU Adam (about two minutes the first time)")
    tools = dict(os.environ, PATH=os.path.dirname(python) + os.pathsep + os.environ.get("PATH", os.defpath))
    tools[EXTENSIONS_DIR] = extensions
    code = _run([python, "-c", _KERNELS], tools)
    if code != 0:
        raise ProjectError("environment_failed", path=python, reason="CPU Adam could not be built: exit code %d" % code)
    say("environment", "CPU Adam is ready")


def _run(argv: List[str], environment: Mapping[str, str]) -> int:
    """Return the exit code of a command; a signal counts as 128 and its number, as in a shell."""
    code = subprocess.run(argv, env=dict(environment), stdin=subprocess.DEVNULL).returncode
    return code if code >= 0 else 128 - code


STEPS: Dict[str, Callable[[Mapping[str, Any]], None]] = {
    "check": check,
    "fetch": fetch,
    "environment": environment,
    "kernels": kernels,
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
