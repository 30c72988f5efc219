"""Samples -> rows of ids, labels and a weight. Side effects: reads the samples file and its manifest.

Labels are right by construction (`frame.py`) and checked on every sample by a scan of the ids (`mask.py`). A
sample on which both disagree, or that teaches nothing, is left out, counted and named.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path

import numpy as np

from corpus_builder.errors import ProjectError
from corpus_builder.frame import Frame, Segment
from corpus_builder.manifest import Manifest, check_gates, load_manifest
from corpus_builder.mask import build_assistant_mask
from corpus_builder.sample import CLASSES, SPLITS, Sample, parse_sample
from trainer.encoded import EncodedCorpus, EncodedSet

MAX_DISAGREE_SHARE = 0.001  # more than this and the run stops before its first step (issue 4, item 1)
DISAGREE, NOTHING_TRAINED = "labels_disagree", "nothing_trained"
MANIFEST_SUFFIX = ".manifest.json"


def manifest_path(samples_path: Path) -> Path:
    """Return where the manifest of a samples file lies: `coding-sft.jsonl` -> `coding-sft.manifest.json`."""
    return samples_path.with_name(samples_path.stem + MANIFEST_SUFFIX)


def check_samples(samples_path: Path, *, is_own: bool, meant_sha256: str | None = None) -> Manifest | None:
    """Return the manifest beside the samples, None where a foreign file has none.

    Args:
        is_own: The file is the built corpus, not a `data_path`; then it must have a manifest.
        meant_sha256: Digest of the corpus that the run was started for: another setup may have come between.

    Raises:
        ProjectError: `config_unreadable`, `samples_changed`, `gate_failed`.
    """
    beside = manifest_path(samples_path)
    if not is_own and not beside.exists():
        return None
    manifest = load_manifest(beside)
    if _sha256(samples_path) != manifest.samples_sha256 or meant_sha256 not in (None, manifest.samples_sha256):
        raise ProjectError("samples_changed", path=str(samples_path))
    check_gates(manifest)
    return manifest


def read_samples(samples_path: Path) -> list[Sample]:
    """Return the samples of a file, in order; raise `config_unreadable`, `sample_invalid` or `zero_samples`."""
    try:
        with samples_path.open(encoding="utf-8") as file:
            samples = [
                parse_sample(line, path=samples_path.name, line_number=number)
                for number, line in enumerate(file, 1)
                if line.strip()
            ]
    except (OSError, UnicodeDecodeError) as error:
        raise ProjectError("config_unreadable", path=str(samples_path), reason=type(error).__name__) from error
    if not samples:
        raise ProjectError("zero_samples", path=str(samples_path))
    return samples


def encode_corpus(samples: Sequence[Sample], frame: Frame, *, max_seq_len: int) -> EncodedCorpus:
    """Return all samples as ids; each content is encoded once, all in one batch.

    Raises:
        ProjectError: `sample_too_long`; `labels_disagree` when more than 0.1 % of the samples do; `zero_samples`.
    """
    ids_of = _encode_contents(samples, frame)
    sets: dict[str, _SetBuilder] = {split: _SetBuilder() for split in SPLITS}
    left_out: list[tuple[str, str]] = []
    for sample in samples:
        segments = frame.segments(sample.messages, ids_of)
        reason = _reason_to_leave_out(sample, segments, frame, max_seq_len)
        if reason is None:
            sets[sample.split].add(sample, segments)
        else:
            left_out.append((sample.id, reason))
    _check_left_out(left_out, len(samples))
    train, validation = (sets[split].build() for split in SPLITS)
    if not len(train):
        raise ProjectError("zero_samples", path="samples")
    return EncodedCorpus(train, validation, tuple(left_out), len(samples), "tokenizers")


class _SetBuilder:
    """Collects the samples of one split."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._is_trained: list[bool] = []
        self._starts, self._weights, self._classes = [0], [], []  # type: ignore[var-annotated]

    def add(self, sample: Sample, segments: Sequence[Segment]) -> None:
        for segment in segments:
            self._ids.extend(segment.ids)
            self._is_trained.extend([segment.is_trained] * len(segment.ids))
        self._starts.append(len(self._ids))
        self._weights.append(sample.weight)
        self._classes.append(CLASSES.index(sample.sample_class))

    def build(self) -> EncodedSet:
        return EncodedSet(
            ids=np.array(self._ids, dtype=np.int32),
            is_trained=np.array(self._is_trained, dtype=np.bool_),
            starts=np.array(self._starts, dtype=np.int64),
            weights=np.array(self._weights, dtype=np.float32),
            class_indices=np.array(self._classes, dtype=np.int8),
        )


def _encode_contents(samples: Iterable[Sample], frame: Frame) -> Callable[[str], Sequence[int]]:
    contents = list(dict.fromkeys(message.content for sample in samples for message in sample.messages))
    return dict(zip(contents, frame.encode_texts(contents), strict=True)).__getitem__


def _reason_to_leave_out(sample: Sample, segments: Sequence[Segment], frame: Frame, max_seq_len: int) -> str | None:
    """Return why a sample can't be trained, None when it can."""
    ids = tuple(chain.from_iterable(part.ids for part in segments))
    if len(ids) > max_seq_len:
        raise ProjectError("sample_too_long", sample=sample.id, tokens=len(ids), limit=max_seq_len)
    if not scan_agrees(ids, segments, frame):
        return DISAGREE
    return None if any(part.is_trained for part in segments) else NOTHING_TRAINED


def scan_agrees(ids: Sequence[int], segments: Sequence[Segment], frame: Frame) -> bool:
    """Whether a scan of `ids` finds exactly the assistant turns that `segments` were made of."""
    made = list(chain.from_iterable([part.is_answer] * len(part.ids) for part in segments))
    header = frame.headers["assistant"][1:]
    return build_assistant_mask(ids, im_start=frame.im_start, im_end=frame.im_end, assistant_header=header) == made


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
