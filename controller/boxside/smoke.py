"""Two steps of a tiny model in the interpreter that will train, and the receipt that spares the next setup from them.

Runs on the box: standard library and Python 3.8 only. Side effects: processes; a scratch folder in `$ROOT/venvs`, gone
afterwards; the receipt beside it, named by what it proves:

    smoke-1f0c….json   {"proves": {"python": …, "versions": {…}, "preset": …, "device": "cpu", …}, "seconds": 21.4,
                        "losses": [5.546, 5.545], "at": "2026-05-03T10:15:00Z"}
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from dataclasses import dataclass
from typing import IO, Any, Dict, List, Mapping, Optional, Union

from controller.boxside.commands import environment_of, say
from controller.boxside.environment import find_current, note_current, read_candidate
from controller.boxside.folders import make_private_folder
from controller.boxside.health import read_driver
from controller.boxside.setup_plan import preset_path
from controller.boxside.work import read_json
from corpus_builder.errors import ERROR_PREFIX, Named, ProjectError, parse_error_line
from trainer.children import describe_child, end_group
from trainer.gpus import GpuQuery, Gpus, is_busy
from trainer.journal import now_utc, save_json
from trainer.progress import Progress, parse_line
from trainer.run_paths import RootPaths

#: Libraries from a cold network disk take minutes, and so does what DeepSpeed compiles on first use.
TIMEOUT_S = 1200.0
MAX_RANKS = 2  # one rank has nobody to talk to; more than two say nothing more
#: Keys of a recipe that need something of an environment; the others are our own code's.
KEYS = ("deepspeed", "device", "precision", "attn_implementation", "use_liger_kernel")
_SHOWN_LINES = 80
_LAST_WORDS = re.compile(r"(?:\[rank\d+\]:? ?)?(?:[\w.]*(?:Error|Exception|Interrupt|Exit)\b.*|Fatal .*|Killed.*)")


@dataclass(frozen=True)
class Place:
    """Who trains: processes on the CPU (`gpus` None), or one per GPU of these numbers; `card` names their kind."""

    ranks: int
    gpus: Optional[List[int]] = None
    card: str = "cpu"


def prove(request: Mapping[str, Any]) -> None:
    """Train two steps, or find the receipt of it; then the environment is the one that trains.

    Raises:
        ProjectError: `smoke_failed`; the environment before stays in use.
    """
    root, recipe = request["root"], request["recipe"]
    candidate = read_candidate(root, request["python"])
    place = choose_place(recipe, GpuQuery().read())
    if isinstance(place, str):
        _postpone(root, candidate, place)
        return
    proves = _proves(candidate, recipe, place, request["code"])
    receipt = receipt_path(root, proves)
    known = read_json(receipt)
    if known is None:
        save_json(receipt, dict(_train(request, candidate, place), proves=proves, at=now_utc()))
    else:
        say("environment", "two steps of a tiny model trained here before, on {when}", when=str(known.get("at")))
    note_current(root, candidate)


def _postpone(root: str, candidate: Mapping[str, Any], reason: str) -> None:
    """Leave the environment before in use; where it is none, or the same interpreter, there is nothing to keep."""
    sentence = "no steps of a tiny model now: {reason}; the next setup tries again"
    say("environment", sentence, reason=reason)
    if find_current(root) in (None, candidate["python"]):
        note_current(root, candidate)


def choose_place(recipe: Mapping[str, Any], gpus: Gpus) -> Union[Place, str]:
    """Return who trains two steps, or why nobody can now: a GPU that is in use is left alone. Pure."""
    wanted = recipe.get("gpus") or 1
    count = min(MAX_RANKS, len(wanted) if isinstance(wanted, list) else int(wanted))
    device = recipe.get("device", "auto")
    if device == "cpu" or (device == "auto" and not gpus.is_installed):
        return Place(count)
    rows = [row for row in gpus.rows or [] if not isinstance(wanted, list) or row["index"] in wanted]
    if not rows:
        return "no GPU answers"
    free = [row for row in rows if not is_busy(row)][:count]
    if not free:
        return "every GPU is in use"
    card = "%s (%s)" % (free[0]["name"], free[0]["compute_capability"])
    return Place(len(free), [row["index"] for row in free], card)


def _proves(candidate: Mapping[str, Any], recipe: Mapping[str, Any], place: Place, code: str) -> Dict[str, Any]:
    """Return what a receipt is for: another one of these, and two steps are trained again."""
    lora, overlay = recipe.get("lora"), candidate.get("overlay")
    return {
        "python": candidate["python"],
        "packages": candidate["packages"],
        "versions": candidate["versions"],
        "overlay": None if overlay is None else os.path.basename(overlay),
        "card": place.card,
        "driver": None if place.gpus is None else read_driver(),
        "ranks": place.ranks,
        "preset": _digest_file(preset_path(code, str(recipe.get("deepspeed")))),
        "recipe": {key: recipe[key] for key in KEYS if key in recipe and key != "deepspeed"},
        "lora": None if lora is None else {"load_in_4bit": bool(lora.get("load_in_4bit"))},
    }


def _digest_file(path: str) -> Optional[str]:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()[:16]
    except OSError:
        return None


def receipt_path(root: str, proves: Mapping[str, Any]) -> str:
    """Return the file of a receipt, by what it proves."""
    digest = hashlib.sha256(json.dumps(proves, sort_keys=True).encode("utf-8")).hexdigest()[:16]
    return os.path.join(RootPaths(root).venvs, "smoke-%s.json" % digest)


def _train(request: Mapping[str, Any], candidate: Mapping[str, Any], place: Place) -> Dict[str, Any]:
    """Train, and return how long it took and the losses; raise `smoke_failed` with the last words."""
    recipe = {key: request["recipe"][key] for key in KEYS if key in request["recipe"]}
    if request["recipe"].get("lora") is not None:
        bits = bool(request["recipe"]["lora"].get("load_in_4bit"))
        recipe["lora"] = {"load_in_4bit": bits, "merge": False}
    scratch = os.path.join(RootPaths(request["root"]).venvs, "smoke-scratch")
    sentence = "two steps of a tiny model, {ranks} rank(s) on {card}"
    say("environment", sentence, ranks=place.ranks, card=place.card)
    shutil.rmtree(scratch, ignore_errors=True)
    make_private_folder(scratch)
    began = time.monotonic()
    try:
        with open(os.path.join(scratch, "log"), "w+b") as log:
            asked = {"ranks": place.ranks, "gpus": place.gpus, "recipe": recipe}
            code = _run(candidate, os.path.join(scratch, "run"), asked, request["code"], log)
            log.seek(0)
            lines = log.read().decode("utf-8", "replace").splitlines()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    points = [item for line in lines for item in parse_line(line) if isinstance(item, Progress)]
    if code != 0 or not points or points[-1].step != points[-1].total:
        _show(lines)
        raise ProjectError("smoke_failed", path=candidate["python"], reason=_how(code, last_words(lines)))
    seconds = round(time.monotonic() - began, 1)
    say("environment", "trained: {steps} steps in {seconds} s", steps=points[-1].step, seconds=seconds)
    return {"seconds": seconds, "losses": [point.loss for point in points]}


def _how(code: Optional[int], words: str) -> str:
    """Return how the steps ended; the words of a foreign program may name files and people."""
    if code is None:
        return "reason.no_end %d s" % TIMEOUT_S
    return Named(words) if words else "exit code %d" % code


def _run(
    candidate: Mapping[str, Any], folder: str, asked: Mapping[str, Any], code: str, log: IO[bytes]
) -> Optional[int]:
    """Run `trainer.smoke` to its end and end what it leaves; return its exit code, None when it took too long."""
    environment = environment_of(candidate["python"], candidate.get("overlay"))
    # No hub: what is wanted lies on this disk, and a machine without a network must not wait for one.
    environment.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    environment.update(PYTHONUNBUFFERED="1", PYTHONDONTWRITEBYTECODE="1", PYTHONWARNINGS="ignore::FutureWarning")
    popen = subprocess.Popen(
        [candidate["python"], "-m", "trainer.smoke", folder],
        cwd=code,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    child = describe_child(popen, folder)
    try:
        popen.communicate(json.dumps(asked).encode("ascii"), timeout=TIMEOUT_S)
        return popen.returncode
    except subprocess.TimeoutExpired:
        return None
    finally:
        end_group(child, reap=popen.poll)
        popen.wait()


def _show(lines: List[str]) -> None:
    """Print the end of a failed run's log, where a known failure is looked for; its points are no points of ours."""
    for line in [line for line in lines if not any(True for _ in parse_line(line))][-_SHOWN_LINES:]:
        print(line, flush=True)


def last_words(lines: List[str]) -> str:
    """Return the line that says best why a run ended: our own error, else the last that looks like one, else the last.

    Launchers say more after the ranks have died, so the very last line seldom tells.
    """
    errors = [str(error) for error in map(parse_error_line, lines) if error is not None]
    said = [line.strip() for line in lines if line.strip() and not line.startswith(ERROR_PREFIX)]
    found = errors or [line for line in said if _LAST_WORDS.match(line)] or said
    return found[-1][:300] if found else ""
