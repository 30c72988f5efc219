"""The recipe page: sources -> samples, reports and manifest. Run as `python -m corpus_builder.build REQUEST.json`.

Side effects: reads the sources, writes the four files and the cache beside them, logs to stdout; a failure is one line
on stderr (`errors.format_error_line`). The four are written beside their places and moved there when all are on the
disk: a build that a full disk or a kill ends leaves the corpus that was there. A corpus without a manifest is none: of
a wish that is refused none stays, and else the earlier one goes first, the new one comes last. Where nothing changed
nothing is written.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from corpus_builder.assemble import Assembler
from corpus_builder.cache import Cache, builder_digest, cache_dir, digest_of
from corpus_builder.collect import Collector, class_of, log
from corpus_builder.duplicates import Duplicates, find_duplicates, held_out
from corpus_builder.errors import Named, ProjectError, Value, format_error_line
from corpus_builder.findings import contradiction_findings, duplicate_findings, receipt_findings
from corpus_builder.frame import Frame, load_frame
from corpus_builder.full_report import Showcase, format_full_report
from corpus_builder.gates import judge_gates
from corpus_builder.groups import Groups
from corpus_builder.ledger import Ledger
from corpus_builder.manifest import Manifest, check_gates, format_manifest
from corpus_builder.prepare import Preparer, is_compared
from corpus_builder.private_file import DISK_FULL, disk_full, write_partial
from corpus_builder.process import Prepared, Processor
from corpus_builder.report import format_report
from corpus_builder.request import Request, load_request
from corpus_builder.samples_file import SamplesFile
from corpus_builder.suite import Suite
from corpus_builder.unchanged import find_built, look_at, save_built

#: Keys of a plan that no single file depends on; each source is in the keys of its own files.
_ELSEWHERE: dict[str, Any] = {
    **dict.fromkeys(("name", "repo_root", "dialog_dir", "archive", "sources", "gates"), True),
    **dict.fromkeys(("system_prompt_share", "validation_share"), True),
    "checks": {"duplicates", "near_duplicate_similarity"},
}


def build(request: Request) -> Manifest:
    """Build the corpus and return its manifest; samples, reports and manifest are written, whatever the gates say.

    Raises:
        ProjectError: the wish cannot be met; then there is no manifest.
    """
    try:
        return _build(request)
    except ProjectError:
        request.manifest.unlink(missing_ok=True)
        raise


def _build(request: Request) -> Manifest:
    plan = request.plan
    look = look_at(request)
    frame = load_frame(request.base_model_dir)
    collector = Collector(request)
    tasks = collector.tasks()
    log("corpus", "{count} file(s) to read", count=len(tasks))

    # Before anything slow: the model's template may refuse a system prompt.
    system_tokens = frame.system_cost(plan.system_prompt) if plan.system_prompt else 0
    cache = Cache(cache_dir(request.samples), _settings(request, frame))
    processor = Processor(Preparer(plan, frame, max_seq_len=request.max_seq_len, suite=request.suite), cache)
    ledger = Ledger()
    files: list[Prepared] = []
    copies: list[int] = []
    for task in tasks:
        prepared = processor.process(task)
        copies.append(ledger.enter(prepared.summary))
        files.append(Prepared(replace(prepared.summary, marks=()), prepared.entry))
        _log_file(task.tag, files[-1], copies[-1])
    log("corpus", "read {made} file(s), {kept} unchanged", made=len(cache.made), kept=len(tasks) - len(cache.made))
    _check_suite(request.suite, files)

    duplicates = _duplicates(request, ledger, files)
    prompts = ledger.contradictions()
    findings = [
        *receipt_findings((file.summary for file in files), plan.checks.policies),
        *(duplicate_findings(ledger, duplicates) if plan.checks.duplicates else ()),
        *contradiction_findings(ledger, prompts),
    ]

    assembler = Assembler(plan, max_seq_len=request.max_seq_len, system_tokens=system_tokens)
    for source in plan.sources:
        assembler.expect(class_of(source))
    sides = iter(held_out(ledger, duplicates.groups, plan.validation_share))
    showcase = Showcase(_samples_by_class(files))
    with SamplesFile(request.samples) as samples:
        for file, copied in zip(files, copies, strict=True):
            samples.write(showcase.passing(assembler.add(file, copies=copied, sides=sides)))

    classes = assembler.classes()
    gates = judge_gates(
        plan,
        soul=collector.soul,
        samples={name: account.samples for name, account in classes.items()},
        rounds={file.summary.file.name: file.summary.rounds for file in files if _is_dialog(file)},
        dialogs=sum(file.summary.notes.get("dialogs", 1) for file in files if _is_dialog(file)),
    )
    manifest = Manifest(
        plan_name=plan.name,
        plan_digest=hashlib.sha256(json.dumps(plan.model_dump(mode="json"), sort_keys=True).encode()).hexdigest(),
        tokenizer=frame.digest,
        max_seq_len=request.max_seq_len,
        files=tuple(assembler.files),
        missing=tuple(collector.missing),
        classes=classes,
        gates=gates,
        samples_sha256=samples.sha256,
        findings=tuple(findings),
        contradictory_prompts=len(prompts),
    )
    _swap_in(
        samples,
        {
            request.report: format_report(manifest, request.lang),
            request.full_report: format_full_report(manifest, request.lang, showcase.shown, frame),
            request.manifest: format_manifest(manifest),
        },
    )
    cache.save()
    save_built(request, look, manifest)
    _log_totals(manifest)
    return manifest


def _swap_in(samples: SamplesFile, texts: dict[Path, str]) -> None:
    """Put the samples and the texts, the manifest last, where they belong, once all of them are on the disk."""
    written: dict[Path, Path] = {}
    try:
        for path, text in texts.items():
            written[path] = write_partial(text, path)
    except OSError:
        for partial in written.values():
            partial.unlink()
        samples.drop()
        raise
    manifest = list(texts)[-1]
    manifest.unlink(missing_ok=True)
    samples.place()
    for path, partial in written.items():
        os.replace(partial, path)


def _settings(request: Request, frame: Frame) -> str:
    """Return the digest of all that matters to each file."""
    suite = request.suite.model_dump(mode="json") if request.suite is not None else None
    plan = request.plan.model_dump(mode="json", exclude=_ELSEWHERE)
    return digest_of([builder_digest(), frame.digest, request.max_seq_len, plan, suite, is_compared(request.plan)])


def _samples_by_class(files: Sequence[Prepared]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for file in files:
        counts[file.summary.file.sample_class] += file.summary.samples
    return counts


def _is_dialog(file: Prepared) -> bool:
    return file.summary.file.sample_class == "relation" and file.summary.samples > 0


def _duplicates(request: Request, ledger: Ledger, files: Sequence[Prepared]) -> Duplicates:
    """Return what says the same; it is looked for where it is to be reported, or decides about the split."""
    if not request.plan.checks.duplicates and not request.plan.validation_share:
        return Duplicates(Groups(0))
    return find_duplicates(
        ledger,
        [file.entry for file in files],
        similarity=request.plan.checks.near_duplicate_similarity,
        sketches_path=cache_dir(request.samples) / "sketches.bin",
    )


def _check_suite(suite: Suite | None, files: Sequence[Prepared]) -> None:
    """Raise `suite_not_unseen` if the corpus asks a question of the suite."""
    found = {number for file in files for number in file.summary.suite_questions}
    if suite is not None and found:
        numbers = ", ".join(str(number) for number in sorted(found))
        log("corpus", "questions of the suite in the corpus: {numbers}", numbers=numbers)
        raise ProjectError("suite_not_unseen", suite=suite.name, count=len(found))


def _log_file(tag: str, file: Prepared, copies: int) -> None:
    summary = file.summary
    values: dict[str, Value] = {
        "path": Named(summary.file.name), "read": summary.units_read, "samples": summary.samples,
        "encoding": summary.file.encoding,
    }  # fmt: skip
    noticed = {**summary.drops, **summary.notes, **({"copies": copies} if copies else {})}
    counted = "".join(f", {name} {count}" for name, count in noticed.items())
    log(tag, "{path}: {read} unit(s) -> {samples} sample(s), {encoding}" + counted, **values)
    if summary.file.is_guessed:
        sentence = "warning: the encoding of {path} is a guess: {encoding}"
        log(tag, sentence, path=values["path"], encoding=values["encoding"])
    for speaker in summary.unknown_speakers:
        log(tag, "no speaker of the plan: {speaker}", speaker=Named(speaker))


def _log_totals(manifest: Manifest) -> None:
    for name, account in manifest.classes.items():
        log(
            "corpus",
            "{name}: {samples} sample(s), {unique} unique, {tokens} tokens, {trained} trained, {lost} lost",
            name=name, samples=account.samples, unique=account.unique, tokens=account.tokens,
            trained=account.trained_tokens, lost=account.lost_tokens,
        )  # fmt: skip
    for kind, count in manifest.found().items():
        log("corpus", "found {kind}: {count}", kind=kind, count=count)
    for gate in manifest.gates:
        log(
            "corpus", "gate {name}: {verdict}, {found} found, {wanted} wanted",
            name=gate.name, verdict=gate.verdict, found=f"{gate.found:g}", wanted=f"{gate.wanted:g}",
        )  # fmt: skip


def find_unchanged(request: Request) -> Manifest | None:
    """Return the head of the manifest that is there if a build would only make it again; the log says so."""
    look = look_at(request)
    head = find_built(request, look)
    if head is not None:
        log("corpus", "nothing to do: {count} file(s) are as they were", count=look.files)
        _log_totals(head)
    return head


def check_fit(manifest: Manifest, samples: Path) -> None:
    """Raise `zero_samples` or `gate_failed` unless the corpus may be trained on."""
    if manifest.total_samples == 0:
        raise ProjectError("zero_samples", path=str(samples))
    check_gates(manifest)


def main(argv: Sequence[str]) -> int:
    """Build the corpus of the request in `argv[0]` and return the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")  # whatever the box's locale is
    try:
        request = load_request(Path(argv[0]))
        check_fit(find_unchanged(request) or build(request), request.samples)
    except ProjectError as error:
        return _tell(error)
    except OSError as error:
        if error.errno not in DISK_FULL:
            raise
        return _tell(disk_full(request.samples.parent, _size(request.samples)))
    return 0


def _tell(error: ProjectError) -> int:
    print(format_error_line(error), file=sys.stderr, flush=True)
    return error.exit_code


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
