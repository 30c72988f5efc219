"""Samples -> flat arrays of ids with what is learned. Side effects: reads the samples file and its manifest.

Labels are right by construction (`rendered.py`) and proved on every sample by looking at the ids alone
(`label_check.py`). A sample that is not proved, that teaches nothing or that the model's template refuses is left out,
counted and named.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from corpus_builder.errors import Named, ProjectError
from corpus_builder.fast_tokens import FastTokens
from corpus_builder.frame import Frame
from corpus_builder.manifest import Manifest, check_gates, load_manifest
from corpus_builder.sample import SPLITS, Sample, parse_sample
from trainer.conversations import Conversations, gather
from trainer.encoded import EncodedCorpus, EncodedSet
from trainer.label_check import LabelCheck
from trainer.rendered import Renderer, make_renderer

MAX_DISAGREE_SHARE = 0.001  # more than this and the run stops before its first step (issue 4, item 1)
DISAGREE, NOTHING_TRAINED, REFUSED = "labels_disagree", "nothing_trained", "template_refuses_roles"
MANIFEST_SUFFIX = ".manifest.json"
_BLOCK_BYTES = 1 << 22  # read at once
_BLOCK_TOKENS = 1 << 18  # put together and checked at once: what is touched stays in the processor's cache
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def manifest_path(samples_path: Path) -> Path:
    """Return where the manifest of a samples file lies: `coding-sft.jsonl` -> `coding-sft.manifest.json`."""
    return samples_path.with_name(samples_path.stem + MANIFEST_SUFFIX)


@dataclass(frozen=True, slots=True)
class SamplesFile:
    """A samples file as it was found.

    `manifest`: None beside a foreign file that has none.
    """

    path: Path
    sha256: str
    manifest: Manifest | None


def check_samples(samples_path: Path, *, is_own: bool, meant_sha256: str | None = None) -> SamplesFile:
    """Return the samples file; where a manifest lies beside it, both belong together and its gates are open.

    Args:
        is_own: The file is the built corpus, not a `data_path`; then it must have a manifest.
        meant_sha256: Digest of the corpus that the run was started for: another setup may have come between.

    Raises:
        ProjectError: `config_unreadable`, `samples_changed`, `gate_failed`.
    """
    beside = manifest_path(samples_path)
    manifest = load_manifest(beside) if is_own or beside.exists() else None
    sha256 = _sha256(samples_path)
    if manifest is not None:
        if sha256 != manifest.samples_sha256 or meant_sha256 not in (None, sha256):
            raise ProjectError("samples_changed", path=str(samples_path))
        check_gates(manifest)
    return SamplesFile(samples_path, sha256, manifest)


def read_samples(file: SamplesFile) -> Iterator[Sample]:
    """Yield the samples of a file, in order.

    Raises:
        ProjectError: `config_unreadable`, `sample_invalid`, `zero_samples`; `samples_changed` at the end, where the
            bytes were not those that `check_samples` saw.
    """
    is_empty = True
    digest = hashlib.sha256()
    try:
        with file.path.open("rb", buffering=_BLOCK_BYTES) as opened:
            for number, line in enumerate(opened, start=1):
                digest.update(line)
                if not line.isspace():
                    is_empty = False
                    yield _parse(line, file.path, number)
    except (OSError, UnicodeDecodeError) as error:
        raise ProjectError("config_unreadable", path=str(file.path), reason=type(error).__name__) from error
    if is_empty:
        raise ProjectError("zero_samples", path=str(file.path))
    if digest.hexdigest() != file.sha256:
        raise ProjectError("samples_changed", path=str(file.path))


def _parse(line: bytes, samples_path: Path, number: int) -> Sample:
    sample = parse_sample(line, path=samples_path.name, line_number=number)
    if _SURROGATE.search(line):  # half a character, as only an escape can write it: no tokenizer reads that
        try:
            "".join(message.content for message in sample.messages).encode()
        except UnicodeEncodeError as error:
            reason = "half a surrogate pair"
            raise ProjectError("sample_invalid", path=Named(samples_path.name), line=number, reason=reason) from error
    return sample


def encode_corpus(
    samples: Iterable[Sample], frame: Frame, *, max_seq_len: int, tokens: FastTokens | None = None
) -> EncodedCorpus:
    """Return all samples as ids; each content is encoded once.

    Args:
        samples: Read once; they need not be in memory together.
        tokens: What encodes; knows afterwards by which engine, and why.

    Raises:
        ProjectError: `sample_too_long`; `labels_disagree` when more than 0.1 % of the samples do; `zero_samples`.
    """
    encoder = FastTokens(frame) if tokens is None else tokens
    talks = gather(samples)
    renderer = make_renderer(talks, frame, encoder)
    _check_lengths(talks, renderer.lengths, max_seq_len)
    reasons = dict.fromkeys(renderer.refused, REFUSED)
    teaches = np.zeros(len(talks), dtype=np.bool_)
    teaches[np.searchsorted(talks.turns, np.flatnonzero(talks.is_trained), side="right") - 1] = True
    reasons |= {sample: NOTHING_TRAINED for sample in np.flatnonzero(~teaches).tolist() if sample not in reasons}
    teaches[list(renderer.refused)] = False
    check = LabelCheck(talks, frame)
    sets = []
    for split in range(len(SPLITS)):
        chosen = np.flatnonzero(teaches & (talks.splits == split))
        found, wrong = _encode_set(talks, renderer, check, chosen, threads=encoder.threads)
        sets.append(found)
        reasons |= dict.fromkeys(wrong, DISAGREE)
    left_out = tuple((talks.id_of(sample), reasons[sample]) for sample in sorted(reasons))
    _check_left_out(left_out, len(talks))
    train, validation = sets
    if not len(train):
        raise ProjectError("zero_samples", path="samples")
    return EncodedCorpus(train, validation, left_out, len(talks), encoder.engine)


def _check_lengths(talks: Conversations, lengths: NDArray[np.int64], max_seq_len: int) -> None:
    for sample in np.flatnonzero(lengths > max_seq_len).tolist()[:1]:
        raise ProjectError(
            "sample_too_long", sample=talks.id_of(sample), tokens=int(lengths[sample]), limit=max_seq_len
        )


def _encode_set(
    talks: Conversations, renderer: Renderer, check: LabelCheck, samples: NDArray[np.int64], *, threads: int
) -> tuple[EncodedSet, list[int]]:
    """Return `samples` as one set, and those of them that are not in it since their labels are not proved."""
    lengths = renderer.lengths[samples]
    ends = np.cumsum(lengths)
    total = int(lengths.sum())
    ids, is_trained = np.empty(total, dtype=np.int32), np.empty(total, dtype=np.bool_)
    is_right = np.ones(len(samples), dtype=np.bool_)
    borders = np.flatnonzero(np.diff(ends // _BLOCK_TOKENS, prepend=-1)).tolist()

    def fill(block: tuple[int, int]) -> None:
        first, last = block
        rendered = renderer.render(samples[first:last])
        here = slice(int(ends[first] - lengths[first]), int(ends[last - 1]))
        ids[here], is_trained[here] = rendered.ids, rendered.is_trained
        is_right[first:last] = ~check.wrong(samples[first:last], rendered)

    with ThreadPoolExecutor(threads) as pool:  # numpy lets others run; no two blocks touch the same part of an array
        list(pool.map(fill, pairwise([*borders, len(samples)])))
    if not is_right.all():
        is_kept = np.repeat(is_right, lengths)
        ids, is_trained = ids[is_kept], is_trained[is_kept]
    kept = samples[is_right]
    found = EncodedSet(
        ids=ids,
        is_trained=is_trained,
        starts=np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(renderer.lengths[kept])]),
        weights=talks.weights[kept],
        class_indices=talks.class_indices[kept],
    )
    return found, samples[~is_right].tolist()


def _check_left_out(left_out: Sequence[tuple[str, str]], total: int) -> None:
    disagree = sum(reason == DISAGREE for _, reason in left_out)
    if disagree > MAX_DISAGREE_SHARE * total:
        raise ProjectError("labels_disagree", count=disagree, total=total)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise ProjectError("config_unreadable", path=str(path), reason=type(error).__name__) from error
    return digest.hexdigest()
