"""Before a run: all that can be known without loading a model. Then the launcher takes this process's place.

    python -m trainer.launch RUN_FOLDER/recipe.json [--dry-run]

The supervisor's train step, and `zy train`. No torch here: what is wrong is said within seconds. In order: the base
model, the GPUs, the samples (encoded, so that the ranks find them), the preflight, the questions that the base must
answer. `--dry-run` prints the preflight and the exact command, and changes nothing.

Side effects: asks nvidia-smi; writes the encoded samples, digests of weight files and the base's answers; replaces
this process by DeepSpeed's launcher (`os.execve`), whose exit code is then ours.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from corpus_builder.errors import ProjectError, format_error_line
from corpus_builder.frame import load_frame
from trainer.arguments import Schedule, check_trackers
from trainer.base_model import check_base_model
from trainer.base_rules import DigestCache, check_answers, check_not_stock
from trainer.device import Place, choose_attention, choose_precision
from trainer.encode import check_samples, encode_corpus, read_samples
from trainer.encoded import EncodedCorpus
from trainer.gpus import GpuQuery, Gpus
from trainer.material import check_steps, load_corpus, pack_rows, packs_rows
from trainer.methods import check_methods
from trainer.packing import one_each
from trainer.ranks import (
    Ranks,
    alone_argv,
    asking_environment,
    choose_ranks,
    free_port,
    rank_environment,
    say_ranks,
    train_argv,
)
from trainer.request import Request, load_request
from trainer.room import check_room
from trainer.voice import Voice

FIRST = Place(rank=0, local_rank=0, ranks=1, is_launched=False)
#: What rank 0 says of the samples is said once: not by us.
SILENT = Voice(Place(rank=1, local_rank=1, ranks=2, is_launched=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A run that may start."""

    request: Request
    ranks: Ranks


def tracker_environment(report_to: Sequence[str], folder: str) -> dict[str, str]:
    """Return where trackers keep their files: in the run's folder, else they lie in our code (the working folder).

    Source: both makers' lists of environment variables; SwanLab's newer versions spell it without the underscore.
    """
    names = {"wandb": ("WANDB_DIR",), "swanlab": ("SWANLAB_LOG_DIR", "SWANLAB_LOGDIR")}
    return {name: folder for tracker in report_to for name in names.get(tracker, ())}


def prepare(request: Request, voice: Voice, *, is_dry_run: bool) -> Prepared:
    """Check everything, say the preflight, and return the run; raise what stands against it."""
    recipe = request.recipe
    query = GpuQuery() if recipe.device != "cpu" else None
    check_base_model(recipe.base_model_dir)
    check_not_stock(recipe, DigestCache(Path(request.data.weight_digests)), keeps=not is_dry_run)
    check_trackers(recipe.report_to)
    seen = Gpus(False, None) if query is None else query.read()
    ranks = choose_ranks(recipe, seen)
    say_ranks(ranks, voice)
    precision = choose_precision(recipe.precision, ranks.device)
    choose_attention(recipe.attn_implementation, ranks.device, precision)
    check_methods(recipe, ranks.device, precision)

    corpus = encode(request, is_dry_run=is_dry_run)
    packing = pack_rows(corpus.train, recipe, SILENT) if packs_rows(recipe, SILENT) else one_each(len(corpus.train))
    schedule = Schedule(recipe, rows=len(packing), tokens=corpus.train.tokens, ranks=ranks.count)
    check_steps(schedule.steps, recipe, SILENT)
    check_room(request, ranks, precision, corpus.train, packing, schedule, seen, voice)

    if not is_dry_run:
        out = Path(request.paths.base_answers)
        check_answers(recipe, out, asking_environment(ranks, os.environ))
    return Prepared(request=request, ranks=ranks)


def encode(request: Request, *, is_dry_run: bool) -> EncodedCorpus:
    """Return the encoded samples, written for the ranks to find; a dry run keeps them to itself."""
    recipe = request.recipe
    frame = load_frame(Path(recipe.base_model_dir))
    if not is_dry_run:
        return load_corpus(request, frame, FIRST, SILENT)
    is_own = recipe.data_path is None
    meant = request.samples_sha256 if is_own else None
    samples = check_samples(Path(recipe.data_path or request.data.samples), is_own=is_own, meant_sha256=meant)
    return encode_corpus(read_samples(samples), frame, max_seq_len=recipe.max_seq_len)


def command_of(prepared: Prepared) -> list[str]:
    """Return the command that trains the run."""
    recipe_path, ranks = prepared.request.paths.recipe, prepared.ranks
    if ranks.is_alone:
        return alone_argv(recipe_path, sys.executable)
    return train_argv(recipe_path, sys.executable, ranks=ranks.count, gpus=ranks.gpus, master_port=free_port())


def replace_process(argv: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Become `argv`: same pid, so whoever watches us watches the launcher."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(argv[0], list(argv), dict(environment))


def main(argv: Sequence[str]) -> int:
    """Prepare the run of a recipe file and start it; returns only for a dry run, a finished run or an error."""
    os.umask(0o077)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    is_dry_run = "--dry-run" in argv
    (recipe_path,) = (word for word in argv if word != "--dry-run")
    voice = Voice(FIRST)
    try:
        request = load_request(Path(recipe_path))
        is_done = Path(request.paths.final).exists() and not is_dry_run
        prepared = None if is_done else prepare(request, voice, is_dry_run=is_dry_run)
    except ProjectError as error:
        print(format_error_line(error), file=sys.stderr, flush=True)
        return error.exit_code
    if prepared is None:  # the recipe page knows what a finished run still lacks
        replace_process(alone_argv(request.paths.recipe, sys.executable), os.environ)
    command = command_of(prepared)
    if is_dry_run:
        print(shlex.join(command), flush=True)
        return 0
    trackers = tracker_environment(request.recipe.report_to, request.paths.folder)
    replace_process(command, rank_environment(prepared.ranks, {**os.environ, **trackers}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
