"""What a run trains on: its samples encoded and proven, which of them share a row, and whether that is enough.

Side effects: reads the samples, writes the cache of what was encoded (corpus_cache.py), says lines.
"""

from __future__ import annotations

import json
from pathlib import Path

from corpus_builder.errors import ProjectError
from corpus_builder.fast_tokens import FastTokens
from corpus_builder.frame import Frame
from corpus_builder.log_lines import log_line
from trainer.corpus_cache import open_corpus
from trainer.device import Place
from trainer.encode import check_samples
from trainer.encoded import EncodedCorpus, EncodedSet
from trainer.packing import Packing, pack, why_no_packing
from trainer.recipe import FEW_STEPS, MIN_STEPS, Recipe
from trainer.request import Request
from trainer.voice import Voice


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
