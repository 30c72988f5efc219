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
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from corpus_builder.errors import ProjectError, format_error_line
from corpus_builder.frame import load_frame
from corpus_builder.log_lines import log_line
from trainer.arguments import Schedule, check_trackers, join_ranks, training_arguments
from trainer.base_model import check_base_model
from trainer.build_locks import EXTENSIONS_DIR, drop_stale_locks, extensions_dir
from trainer.checkpoints import ResumePoint, check_room_for_result, find_resume_point, read_mark
from trainer.device import Place, choose_attention, choose_precision, find_device, find_place
from trainer.final import stop_at_turn_end
from trainer.looks import check_held_out, looks_of
from trainer.material import check_steps, load_corpus, pack_rows, packs_rows
from trainer.methods import check_methods, check_targets, count_parameters
from trainer.packing import one_each
from trainer.request import Request, load_request, read_attempt
from trainer.result import prepare_folders, repair_pointer, save_result
from trainer.shared_buffers import drop_dead_buffers, drop_own_buffers
from trainer.voice import Voice

#: How long a failed rank waits for rank 0 to say the same error; the launcher ends it as soon as rank 0 has.
SILENCE_S = 20.0


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


def say_skipped(resume_point: ResumePoint, voice: Voice) -> None:
    """Name each newer checkpoint that cannot be gone on from, and why."""
    for path, fault in resume_point.skipped:
        voice.event("checkpoint_skipped", step=path.name.rpartition("-")[2], fault=fault.kind)
        sentence = "{name} cannot be used: {fault}; going on from the one before"
        voice.say(log_line("train", sentence, name=path.name, fault=str(fault)))


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
