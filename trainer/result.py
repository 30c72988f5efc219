"""Where a run leaves what it makes: its folders before the first step, the result and its pointer after the last.

Side effects: files in the run's folder and its version's.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from corpus_builder.frame import Frame
from corpus_builder.log_lines import log_line
from trainer.checkpoints import ResumePoint, delete_unusable
from trainer.device import Place
from trainer.encoded import EncodedCorpus
from trainer.final import (
    adapter_path,
    check_template,
    keep_base_config,
    name_base,
    partial_path,
    point_version,
    publish_final,
    wait_for_final,
    write_tokenizer,
)
from trainer.first_batch import write_first_batch
from trainer.merge import run_merge
from trainer.recipe import Recipe
from trainer.request import Request
from trainer.run_paths import RunPaths, run_paths
from trainer.voice import Voice

FIRST_ROWS = 4  # samples shown in first-batch.txt


def prepare_folders(request: Request, frame: Frame, corpus: EncodedCorpus, resume_point: ResumePoint) -> None:
    """Make the run's folders, prove the template that will be saved, and write the first batch for a person's eye."""
    recipe, paths = request.recipe, request.paths
    link_output(recipe, paths)
    Path(paths.checkpoints).mkdir(parents=True, exist_ok=True)
    delete_unusable(Path(paths.checkpoints), resume_point.step)
    shutil.rmtree(partial_path(paths), ignore_errors=True)  # of an attempt that was killed while it saved
    write_tokenizer(Path(recipe.base_model_dir), tokenizer_dir(paths), frame.chat_template)
    tokenizer = check_template(tokenizer_dir(paths), frame)
    from trainer.dataset import epoch_order

    first = epoch_order(len(corpus.train), seed=recipe.seed, epoch=0)[:FIRST_ROWS]
    write_first_batch(corpus.train, first, tokenizer, Path(paths.first_batch))


def link_output(recipe: Recipe, paths: RunPaths) -> None:
    """Where the recipe names an `output_dir`, let the run's checkpoint folder be a link into it."""
    here = Path(paths.checkpoints)
    if recipe.output_dir is None or here.exists() or Path(recipe.output_dir) == here.parent:
        return
    target = Path(recipe.output_dir) / paths.run_id
    target.mkdir(parents=True, exist_ok=True)
    here.parent.mkdir(parents=True, exist_ok=True)
    here.symlink_to(target.absolute(), target_is_directory=True)


def tokenizer_dir(paths: RunPaths) -> Path:
    """Return where the tokenizer of the result waits, proven before the first step."""
    return Path(paths.folder) / "tokenizer"


def save_result(trainer: Any, request: Request, corpus: EncodedCorpus, place: Place, voice: Voice) -> None:
    """Save what was trained, all ranks together; rank 0 makes the result whole, the others wait for it."""
    paths, base_dir, lora = request.paths, Path(request.recipe.base_model_dir), request.recipe.lora
    saved = partial_path(paths) if lora is None else adapter_path(paths, is_merged=lora.merge)
    trainer.save_model(str(saved))
    if not place.is_first:
        wait_for_final(paths)
        return
    if lora is None:
        keep_base_config(base_dir, saved)
    else:
        name_base(base_dir, saved)
        if lora.merge:
            merged = run_merge(base_dir, saved, partial_path(paths), probe_ids=corpus.train.ids_of(0).tolist())
            voice.event(
                "merged", difference=f"{merged.difference:.2g}", adapter=f"{merged.adapter:.2g}", dtype=merged.dtype
            )
    publish_final(paths, tokenizer_dir(paths))
    say_pointer(request, voice)


def repair_pointer(request: Request, voice: Voice) -> None:
    """Point the version to this finished run, if it was killed before it could; a newer run's pointer stays."""
    pointer = Path(request.data.version_final(request.version))
    shown = Path(os.readlink(pointer)).parent.name if pointer.is_symlink() else ""
    if not shown or _age(request, shown) < _age(request, request.paths.run_id):
        say_pointer(request, voice)


def _age(request: Request, run_id: str) -> tuple[int, str]:
    """Return what grows from run to run: the number that the box gave; the id begins with a clock's time."""
    spec = run_paths(request.data.data, request.version, run_id).supervisor_spec
    try:
        number = int(json.loads(Path(spec).read_text("utf-8"))["number"])
    except (OSError, ValueError, KeyError, TypeError):
        number = 0  # a run that no box started
    return number, run_id


def say_pointer(request: Request, voice: Voice) -> None:
    """Point the version to this run's result; a real folder found in that place is moved aside and named."""
    aside = point_version(request.paths, request.data.version_final(request.version))
    if aside is not None:
        voice.say(
            log_line("train", "a real folder lay at {name}/final, moved to {aside}", name=request.version, aside=aside)
        )
