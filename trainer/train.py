"""The recipe page: one run from one `recipe.json`. What `deepspeed` launches, or one plain process.

    deepspeed --num_gpus 4 --module trainer.train RUN_FOLDER/recipe.json
    python -m trainer.train RUN_FOLDER/recipe.json          one process, without DeepSpeed

recipe.json = {"recipe": {...}, "origins": {key: origin}, "data": str, "version": str, "run_id": str,
               "samples_sha256": null | of the corpus that is meant, "resume_from": null | a checkpoint folder}

Exit 0 with `final/` present: trained. Exit 0 without it: stopped on request, the checkpoint is complete. Else the
code of the `ProjectError` whose ZY_ERROR line is on stderr. Heavy libraries are imported when called: the
environment must be set before torch is.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from corpus_builder.config import validate
from corpus_builder.errors import ProjectError, format_error_line
from corpus_builder.frame import Frame, load_frame
from corpus_builder.log_lines import log_line
from trainer.arguments import Schedule, join_ranks, training_arguments
from trainer.base_model import check_base_model
from trainer.checkpoints import delete_incomplete, find_resume_point
from trainer.device import Place, choose_precision, find_device, find_place
from trainer.encode import check_samples, encode_corpus, read_samples
from trainer.encoded import EncodedCorpus, EncodedSet
from trainer.final import check_template, partial_path, point_version, publish_final, stop_at_turn_end, write_tokenizer
from trainer.first_batch import write_first_batch
from trainer.packing import Packing, one_each, pack
from trainer.recipe import FEW_STEPS, MIN_STEPS, Recipe
from trainer.run_paths import DataPaths, RunPaths, run_paths
from trainer.voice import Voice

FIRST_ROWS = 4  # samples shown in first-batch.txt
#: How long a failed rank waits for rank 0 to say the same error; the launcher ends it as soon as rank 0 has.
SILENCE_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What `recipe.json` says."""

    recipe: Recipe
    data: DataPaths
    paths: RunPaths
    version: str
    resume_from: str | None
    samples_sha256: str | None = None


def load_request(path: Path) -> Request:
    """Return the request in `recipe.json`; raise `config_unreadable` or `config_invalid`."""
    try:
        packed = json.loads(path.read_text("utf-8"))
        data, version, run_id = packed["data"], packed["version"], packed["run_id"]
        tree = packed["recipe"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ProjectError("config_unreadable", path=str(path), reason=type(error).__name__) from error
    return Request(
        recipe=validate(Recipe, tree, where=str(path)),
        data=DataPaths(data),
        paths=run_paths(data, version, run_id),
        version=version,
        resume_from=packed.get("resume_from"),
        samples_sha256=packed.get("samples_sha256"),
    )


def train_argv(recipe: Recipe, recipe_path: str, python: str, *, master_port: int | None = None) -> list[str]:
    """Return the command that trains `recipe_path` on all ranks of the recipe."""
    port = [] if master_port is None else ["--master_port", str(master_port)]
    launcher = [python, "-m", "deepspeed.launcher.runner", "--num_gpus", str(recipe.ranks), *port]
    return [*launcher, "--module", "trainer.train", recipe_path]


def train(request: Request, place: Place) -> None:
    """Train one run; everything it writes is in the run's folder and its version's."""
    recipe, paths = request.recipe, request.paths
    base_dir = Path(recipe.base_model_dir)
    check_base_model(recipe.base_model_dir)
    voice = Voice(place)
    frame = load_frame(base_dir)
    corpus = load_corpus(request, frame, voice)
    packing = pack_rows(corpus.train, recipe, voice)
    schedule = Schedule(recipe, rows=len(packing), tokens=corpus.train.tokens, ranks=place.ranks)
    check_steps(schedule.steps, recipe, voice)
    resume_point = find_resume_point(Path(paths.checkpoints), request.resume_from)

    # What the recipe and the corpus say is checked by now; from here on it costs the import of torch and more.
    device = find_device(recipe.device, place)
    precision = choose_precision(recipe.precision, device)
    voice.event("precision", precision=precision.name, device=device.kind, reason=precision.reason)
    join_ranks(device, place)
    if place.is_first:
        prepare_folders(request, frame, corpus)

    # TrainingArguments before the model: they switch zero.Init on.
    arguments = training_arguments(
        recipe, schedule, output_dir=Path(paths.checkpoints), device=device, precision=precision, place=place
    )
    from trainer.callbacks import Border, Report
    from trainer.dataset import Collator, DealtOrder, Rows
    from trainer.loss import WeightedTrainer
    from trainer.model import load_model, pad_id

    model = load_model(base_dir, precision=precision, place=place)
    border = Border(recipe, paths, place, voice)
    report = Report(recipe, voice, attempt=read_attempt(Path(paths.supervisor)))
    trainer = WeightedTrainer(
        model=model,
        args=arguments,
        rows=Rows(corpus.train, packing),
        order=DealtOrder(
            len(packing),
            ranks=place.ranks,
            rank=place.rank,
            batch_size=recipe.per_device_train_batch_size,
            seed=recipe.seed,
        ),
        collate=Collator(pad_id(frame.controls, frame.im_end), is_packed=recipe.packing),
        callbacks=[border, report],
    )
    border.trainer = report.trainer = trainer
    began_s = time.monotonic()
    voice.event(
        "started", ranks=place.ranks, steps=schedule.steps, accumulation=schedule.accumulation, rows=len(packing)
    )
    if resume_point is not None:
        voice.event("resumed", step=resume_point.name.rpartition("-")[2], run=resume_point.parent.name)
    trainer.train(resume_from_checkpoint=None if resume_point is None else str(resume_point))

    if border.stopped is not None:
        voice.event("stop_requested", mode=border.stopped, step=trainer.state.global_step)
        return
    stop_at_turn_end(trainer.model, frame)
    trainer.save_model(str(partial_path(paths)))
    if place.is_first:
        publish_final(paths, tokenizer_dir(paths))
        say_pointer(request, voice)
    voice.event("final_saved", step=trainer.state.global_step)
    voice.event("finished", step=trainer.state.global_step, seconds=round(time.monotonic() - began_s))


def load_corpus(request: Request, frame: Frame, voice: Voice) -> EncodedCorpus:
    """Return the encoded samples and say their account; every sample that is left out is named."""
    data_path = request.recipe.data_path
    samples_path = Path(data_path or request.data.samples)
    meant = request.samples_sha256 if data_path is None else None
    if check_samples(samples_path, is_own=data_path is None, meant_sha256=meant) is None:
        voice.say(log_line("train", "no manifest beside the samples: their origin and gates are unknown"))
    corpus = encode_corpus(read_samples(samples_path), frame, max_seq_len=request.recipe.max_seq_len)
    for sample, reason in corpus.left_out:
        voice.say(log_line("train", "left out sample {sample}: {reason}", sample=sample, reason=reason))
    voice.say(
        log_line(
            "train",
            "{read} samples read: {rows} trained, {out} left out, {validation} held out; "
            "{tokens} tokens, {trained} of them learned",
            read=corpus.read,
            rows=len(corpus.train),
            out=len(corpus.left_out),
            validation=len(corpus.validation),
            tokens=corpus.train.tokens,
            trained=corpus.train.trained_tokens,
        )
    )
    voice.event("labels_checked", samples=len(corpus.train), left_out=len(corpus.left_out))
    return corpus


def pack_rows(samples: EncodedSet, recipe: Recipe, voice: Voice) -> Packing:
    """Return which samples share a row, and say how full the rows are."""
    if not recipe.packing:
        return one_each(len(samples))
    packing = pack(samples.lengths, recipe.max_seq_len)
    filled = samples.tokens / (len(packing) * recipe.max_seq_len)
    voice.event("packed", samples=len(samples), rows=len(packing), filled=f"{filled:.4f}")
    return packing


def check_steps(steps: int, recipe: Recipe, voice: Voice) -> None:
    """Warn below FEW_STEPS optimizer steps; raise `few_steps` below MIN_STEPS unless the recipe allows it."""
    if steps < MIN_STEPS and not recipe.allow_few_steps:
        raise ProjectError("few_steps", steps=steps, least=MIN_STEPS, tokens_per_step=recipe.tokens_per_step)
    if steps < FEW_STEPS:
        sentence = "only {steps} optimizer steps; under {few} the model may learn little: lower tokens_per_step"
        voice.say(log_line("train", sentence, steps=steps, few=FEW_STEPS))


def prepare_folders(request: Request, frame: Frame, corpus: EncodedCorpus) -> None:
    """Make the run's folders, prove the template that will be saved, and write the first batch for a person's eye."""
    recipe, paths = request.recipe, request.paths
    link_output(recipe, paths)
    Path(paths.checkpoints).mkdir(parents=True, exist_ok=True)
    delete_incomplete(Path(paths.checkpoints))
    shutil.rmtree(partial_path(paths), ignore_errors=True)  # of an attempt that was killed while it saved
    write_tokenizer(Path(recipe.base_model_dir), tokenizer_dir(paths))
    check_template(tokenizer_dir(paths), frame)
    from trainer.dataset import epoch_order

    first = epoch_order(len(corpus.train), seed=recipe.seed, epoch=0)[:FIRST_ROWS]
    write_first_batch(corpus.train, first, Path(recipe.base_model_dir), Path(paths.first_batch))


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


def say_pointer(request: Request, voice: Voice) -> None:
    """Point the version to this run's result; a real folder found in that place is moved aside and named."""
    aside = point_version(request.paths, request.data.version_final(request.version))
    if aside is not None:
        voice.say(
            log_line("train", "a real folder lay at {name}/final, moved to {aside}", name=request.version, aside=aside)
        )


def read_attempt(supervisor_path: Path) -> int:
    """Return the number of this attempt as the supervisor counts, 1 where there is none."""
    try:
        return int(json.loads(supervisor_path.read_text("utf-8"))["attempts"][-1]["attempt"])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return 1


def fail(error: ProjectError, place: Place) -> int:
    """Say why this rank ends and return its exit code; other ranks leave the word to rank 0 while it lives."""
    if not place.is_first:
        time.sleep(SILENCE_S)
    print(format_error_line(error), file=sys.stderr, flush=True)
    return error.exit_code


def main(argv: Sequence[str]) -> int:
    """Train the run of a recipe file; launchers may add `--local_rank=N`, which the environment says as well."""
    os.umask(0o077)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    place = find_place()
    if place.is_launched:  # else every rank takes all cores, and CPU Adam's threads fight each other
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // place.ranks)))
    else:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # else transformers would wrap all GPUs in DataParallel
    (recipe_path,) = (word for word in argv if not word.startswith("--local_rank"))
    try:
        request = load_request(Path(recipe_path))
        if not Path(request.paths.final).exists():
            train(request, place)
    except ProjectError as error:
        return fail(error, place)
    return 0


def leave(exit_code: int) -> NoReturn:
    """End this process now, with all that it said written.

    Not by the interpreter's own way out: there torch's communication threads may be destroyed while they run, and a
    run that has ended well would abort ("terminate called without an active exception", seen with gloo).
    """
    if exit_code == 0 and "torch" in sys.modules:
        from torch import distributed

        if distributed.is_available() and distributed.is_initialized():
            distributed.barrier()  # a rank that leaves early would end the others' last collective
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
