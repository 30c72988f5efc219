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
import gc
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from corpus_builder.config import validate
from corpus_builder.errors import ProjectError, format_error_line
from corpus_builder.fast_tokens import FastTokens
from corpus_builder.frame import Frame, load_frame
from corpus_builder.log_lines import log_line
from trainer.arguments import Schedule, check_trackers, join_ranks, training_arguments
from trainer.base_model import check_base_model
from trainer.build_locks import EXTENSIONS_DIR, drop_stale_locks, extensions_dir
from trainer.checkpoints import (
    ResumePoint,
    check_room_for_result,
    delete_unusable,
    find_resume_point,
    read_mark,
)
from trainer.corpus_cache import open_corpus
from trainer.device import Place, choose_attention, choose_precision, find_device, find_place
from trainer.encode import check_samples
from trainer.encoded import EncodedCorpus, EncodedSet
from trainer.final import (
    adapter_path,
    check_template,
    keep_base_config,
    name_base,
    partial_path,
    point_version,
    publish_final,
    stop_at_turn_end,
    wait_for_final,
    write_tokenizer,
)
from trainer.first_batch import write_first_batch
from trainer.looks import check_held_out, looks_of
from trainer.merge import run_merge
from trainer.methods import check_methods, check_targets, count_parameters
from trainer.packing import Packing, one_each, pack, why_no_packing
from trainer.recipe import FEW_STEPS, MIN_STEPS, Recipe
from trainer.run_paths import DataPaths, RunPaths, run_paths
from trainer.shared_buffers import drop_dead_buffers, drop_own_buffers
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


def train(request: Request, place: Place) -> None:
    """Train one run; everything it writes is in the run's folder and its version's."""
    recipe, paths = request.recipe, request.paths
    base_dir = Path(recipe.base_model_dir)
    check_base_model(recipe.base_model_dir)
    voice = Voice(place)
    frame = load_frame(base_dir)
    corpus = load_corpus(request, frame, place, voice)
    is_packed = packs_rows(recipe, voice)
    packing = pack_rows(corpus.train, recipe, voice) if is_packed else one_each(len(corpus.train))
    schedule = Schedule(recipe, rows=len(packing), tokens=corpus.train.tokens, ranks=place.ranks)
    check_steps(schedule.steps, recipe, voice)
    check_held_out(corpus.validation, recipe, place)
    resume_point = find_resume_point(Path(paths.checkpoints), request.resume_from, place)
    say_skipped(resume_point, voice)

    # What the recipe and the corpus say is checked by now; from here on it costs the import of torch and more.
    device = find_device(recipe.device, place)
    precision = choose_precision(recipe.precision, device)
    voice.event("precision", precision=precision.name, device=device.kind, reason=precision.reason)
    attention = choose_attention(recipe.attn_implementation, device, precision)
    check_methods(recipe, device, precision)
    check_trackers(recipe.report_to)
    if recipe.lora is not None:
        check_targets(base_dir, recipe.lora)
    join_ranks(device, place)
    if place.is_first:
        prepare_folders(request, frame, corpus, resume_point)

    # TrainingArguments before the model: they switch zero.Init on.
    arguments = training_arguments(
        recipe, schedule, output_dir=Path(paths.checkpoints), device=device, precision=precision, place=place
    )
    from trainer.callbacks import Border, Report, train_guarded
    from trainer.dataset import Collator, DealtOrder, Rows
    from trainer.head_loss import why_no_head_loss
    from trainer.held_out import find_held_out, load_best
    from trainer.loss import WeightedTrainer
    from trainer.model import load_model, pad_id

    gc.freeze()  # what was imported stays: no later collection looks through it
    gc.enable()
    model = load_model(
        base_dir, precision=precision, place=place, attention=attention, lora=recipe.lora, seed=recipe.seed
    )
    trained, parameters = count_parameters(model)
    voice.say(log_line("train", "{trained} of {all} parameters are trained", trained=trained, all=parameters))
    collate = Collator(
        pad_id(frame.controls, frame.im_end),
        is_packed=is_packed,
        is_flat=is_packed and model.config._attn_implementation == "flash_attention_2",
    )
    held_out = find_held_out(corpus.validation, recipe, place, collate=collate, is_packed=is_packed)
    looks = looks_of(None if resume_point.path is None else read_mark(resume_point.path))
    border = Border(recipe, paths, place, voice, held_out=held_out, looks=looks)
    report = Report(recipe, voice, border.seen, attempt=read_attempt(Path(paths.supervisor)))
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
        collate=collate,
        callbacks=[border, report],
    )
    border.trainer = report.trainer = trainer
    if (reason := why_no_head_loss(model)) is not None:
        voice.say(log_line("train", "whole logits of the trained positions are made: {reason}", reason=reason))
    began_s = time.monotonic()
    voice.event(
        "started", ranks=place.ranks, steps=schedule.steps, accumulation=schedule.accumulation, rows=len(packing)
    )
    if resume_point.path is not None:
        voice.event("resumed", step=resume_point.step, run=resume_point.path.parent.name)
    train_guarded(trainer, border, resume_point.path)

    if border.stopped is not None:
        voice.event("stop_requested", mode=border.stopped, step=trainer.state.global_step)
        return
    if recipe.load_best_model_at_end and (best := load_best(trainer, Path(paths.checkpoints), border.last_loss)):
        voice.say(log_line("train", "the result is {name}, the best by held-out loss", name=best.name))
    if place.is_first:
        only_trained = recipe.lora is not None and not recipe.lora.merge
        check_room_for_result(Path(paths.checkpoints), model, only_trained=only_trained)
    stop_at_turn_end(trainer.model, frame)
    save_result(trainer, request, corpus, place, voice)
    voice.event("final_saved", step=trainer.state.global_step)
    voice.event("finished", step=trainer.state.global_step, seconds=round(time.monotonic() - began_s))


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


def load_corpus(request: Request, frame: Frame, place: Place, voice: Voice) -> EncodedCorpus:
    """Return the encoded samples and say their account; every sample that is left out is named."""
    data_path = request.recipe.data_path
    samples_path = Path(data_path or request.data.samples)
    meant = request.samples_sha256 if data_path is None else None
    samples = check_samples(samples_path, is_own=data_path is None, meant_sha256=meant)
    if samples.manifest is None:
        voice.say(log_line("train", "no manifest beside the samples: their origin and gates are unknown"))
    corpus = open_corpus(
        samples,
        frame,
        Path(request.data.encoded),
        tokens=FastTokens(frame, threads=request.recipe.map_num_proc),
        max_seq_len=request.recipe.max_seq_len,
        place=place,
        voice=voice,
    )
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


def packs_rows(recipe: Recipe, voice: Voice) -> bool:
    """Return whether rows are packed; where the recipe wants it and the model can't, say why and go on without."""
    if not recipe.packing:
        return False
    reason = why_no_packing(json.loads((Path(recipe.base_model_dir) / "config.json").read_text("utf-8")))
    if reason is not None:
        voice.say(log_line("train", "rows are not packed: {reason}", reason=reason))
    return reason is None


def pack_rows(samples: EncodedSet, recipe: Recipe, voice: Voice) -> Packing:
    """Return which samples share a row, and say how full the rows are."""
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


def say_skipped(resume_point: ResumePoint, voice: Voice) -> None:
    """Name each newer checkpoint that cannot be gone on from, and why."""
    for path, fault in resume_point.skipped:
        voice.event("checkpoint_skipped", step=path.name.rpartition("-")[2], fault=fault.kind)
        sentence = "{name} cannot be used: {fault}; going on from the one before"
        voice.say(log_line("train", sentence, name=path.name, fault=str(fault)))


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


def repair_pointer(request: Request, voice: Voice) -> None:
    """Point the version to this finished run, if it was killed before it could; a newer run's pointer stays."""
    pointer = Path(request.data.version_final(request.version))
    shown = Path(os.readlink(pointer)).parent.name if pointer.is_symlink() else ""
    if shown < request.paths.run_id:  # run ids begin with their time
        say_pointer(request, voice)


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
    gc.disable()  # a million objects are imported and none is garbage: a twelfth of the start, until the model comes
    os.umask(0o077)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault(EXTENSIONS_DIR, extensions_dir(sys.executable))
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    place = find_place()
    if place.is_launched:  # else every rank takes all cores, and CPU Adam's threads fight each other
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // place.ranks)))
    else:
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # else transformers would wrap all GPUs in DataParallel
    (recipe_path,) = (word for word in argv if not word.startswith("--local_rank"))
    try:
        request = load_request(Path(recipe_path))
        if place.is_first:
            say_dropped_locks(Voice(place))
            drop_dead_buffers()
        if not Path(request.paths.final).exists():
            train(request, place)
        elif place.is_first:
            repair_pointer(request, Voice(place))
    except ProjectError as error:
        return fail(error, place)
    return 0


def say_dropped_locks(voice: Voice) -> None:
    """Let no rank wait for ever for a build that was killed."""
    for name in drop_stale_locks(os.environ[EXTENSIONS_DIR]):
        voice.say(log_line("train", "the lock of a build of {name} that was killed is gone", name=name))


def leave(exit_code: int) -> NoReturn:
    """End this process now, with all that it said written.

    Not by the interpreter's own way out: there torch's communication threads may be destroyed while they run, and a
    run that has ended well would abort ("terminate called without an active exception", seen with gloo).
    """
    if exit_code == 0 and "torch" in sys.modules:
        from torch import distributed

        if distributed.is_available() and distributed.is_initialized():
            distributed.barrier()  # a rank that leaves early would end the others' last collective
            drop_own_buffers()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
