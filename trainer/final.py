"""The result of a run: a folder that speaks our frame. Side effects: writes `final.partial`, renames, points.

`final/` appears whole, by rename, and is never overwritten; `<version>/final` points to the newest run's.

    all weights trained       final/ is the model
    lora, merge: true         final/ is the merged model, final/adapter/ the adapter in PEFT's layout
    lora, merge: false        final/ is the adapter

each with the tokenizer. `config.json` is the base's own but for what training changed, so whatever opens the base
opens the result: transformers 5 renames keys (`rope_theta`, `torch_dtype`) that earlier versions, and servers built
on them, would miss in silence.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corpus_builder.errors import ProjectError
from corpus_builder.frame import CHAT_TEMPLATE, Frame
from corpus_builder.sample import Message
from trainer.base_model import ADAPTER_CONFIG, CONFIG, find_adapter_faults, find_model_faults
from trainer.run_paths import RunPaths

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
TEMPLATE_FILE = "chat_template.jinja"
FINAL_DEADLINE_S = 7200.0  # chosen, not measured: no merge on one machine should take longer
ADAPTER = "adapter"  # the folder in a merged result
#: Written beside weights, and of no use to anyone: a pickle of this machine's paths; a model card that names them.
LEFTOVERS = ("training_args.bin", "README.md")
#: Owner and name of a published model.
PUBLISHED = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*\Z")
#: Ordinary content: the places where a template and the frame could differ are roles, borders and white space.
PROBE = (
    Message("system", "You keep a lighthouse."),
    Message("user", "Who are you? 你是谁？"),
    Message("assistant", "I keep the lamp.\n\nOn every night."),
    Message("user", "好的"),
    Message("assistant", "12 flashes"),
)


def write_tokenizer(base_model_dir: Path, folder: Path, chat_template: str = CHAT_TEMPLATE) -> None:
    """Copy the base model's tokenizer byte for byte to `folder`, with the frame as its chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (base_model_dir / name).is_file():
            shutil.copyfile(base_model_dir / name, folder / name)
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text("utf-8")) if config_path.is_file() else {}
    config["chat_template"] = chat_template
    if config.get("tokenizer_class") == "TokenizersBackend":  # the name in transformers 5 only; 4.x knows the old one
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config_path.write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n", "utf-8")
    (folder / TEMPLATE_FILE).write_text(chat_template, "utf-8")


def check_template(folder: Path, frame: Frame) -> Tokenizer:
    """Return the tokenizer of the result, as Hugging Face makes it; it takes half a second to load.

    Whoever serves the model renders with its template; what was trained must be what is asked.

    Raises:
        ProjectError: `template_mismatch`: it does not render a conversation to exactly the frame's ids.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    probe = PROBE if frame.refusal(PROBE) is None else PROBE[1:]  # some templates take no system turn
    chat = [{"role": message.role, "content": message.content} for message in probe]
    whole = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]
    asked = tokenizer.apply_chat_template(chat[:-1], tokenize=True, return_dict=True, add_generation_prompt=True)
    if list(whole) != frame.encode(probe).ids or list(asked["input_ids"]) != frame.prompt(probe[:-1]):
        raise ProjectError("template_mismatch", path=str(folder))
    found: Tokenizer = tokenizer.backend_tokenizer
    return found


def stop_at_turn_end(model: Any, frame: Frame) -> None:
    """Make the model's own generation settings end an answer where the frame ends it."""
    known = getattr(model, "generation_config", None)
    if known is None:
        return
    others = known.eos_token_id if isinstance(known.eos_token_id, list) else [known.eos_token_id]
    known.eos_token_id = [frame.im_end, *(token for token in others if token not in (None, frame.im_end))]
    try:
        known.validate(strict=True)
    except ValueError:
        # Published settings may hold a temperature and forget that it needs sampling; once changed they would not be
        # saved any more (transformers, GenerationConfig.save_pretrained).
        known.do_sample = True


def keep_base_config(base_model_dir: Path, folder: Path) -> None:
    """Write the base's own `config.json` over the one that was saved, with what training changed.

    That is the type of the weights, and that embeddings are no longer tied.
    """
    base, saved = (json.loads((place / CONFIG).read_text("utf-8")) for place in (base_model_dir, folder))
    dtype = saved.get("dtype", saved.get("torch_dtype"))
    changed = {"torch_dtype": dtype} | ({"dtype": dtype} if "dtype" in base else {})
    if saved.get("tie_word_embeddings") is False:
        changed["tie_word_embeddings"] = False
    (folder / CONFIG).write_text(json.dumps(base | changed, ensure_ascii=False, indent=2) + "\n", "utf-8")


def name_base(base_model_dir: Path, adapter_dir: Path) -> None:
    """Have an adapter name its base by a name that means something elsewhere, never by a path of this machine.

    The published name, if the base's `config.json` tells it (`_name_or_path`), else the name of the base's folder.
    """
    path = adapter_dir / ADAPTER_CONFIG
    told = json.loads((base_model_dir / CONFIG).read_text("utf-8")).get("_name_or_path")
    name = told if isinstance(told, str) and PUBLISHED.match(told) else base_model_dir.absolute().name
    config = json.loads(path.read_text("utf-8"))
    config["base_model_name_or_path"] = name
    config["target_modules"] = sorted(config["target_modules"])  # PEFT writes a set, in the order of the moment
    path.write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n", "utf-8")


def partial_path(paths: RunPaths) -> Path:
    """Return where the result lies until it is whole."""
    return Path(paths.final + ".partial")


def adapter_path(paths: RunPaths, *, is_merged: bool) -> Path:
    """Return where the adapter of a result is saved before the result is whole."""
    return partial_path(paths) / ADAPTER if is_merged else partial_path(paths)


def publish_final(paths: RunPaths, tokenizer_dir: Path) -> None:
    """Complete `final.partial` with the tokenizer, check it and rename it to `final`.

    Raises:
        ProjectError: `final_incomplete`: what was written cannot be loaded.
    """
    partial, adapter = partial_path(paths), partial_path(paths) / ADAPTER
    for folder in (partial, adapter):
        for name in LEFTOVERS:
            (folder / name).unlink(missing_ok=True)
    for path in tokenizer_dir.iterdir():
        shutil.copyfile(path, partial / path.name)
    missing = [fault.file for fault in find_model_faults(str(partial))]
    if adapter.is_dir():
        missing += [f"{ADAPTER}/{fault.file}" for fault in find_adapter_faults(str(adapter))]
    if missing:
        raise ProjectError("final_incomplete", path=str(partial), missing=", ".join(missing))
    for path in partial.rglob("*"):
        _flush(path)
    os.rename(partial, paths.final)
    _flush(Path(paths.final).parent)


def wait_for_final(paths: RunPaths, *, deadline_s: float = FINAL_DEADLINE_S, poll_s: float = 0.5) -> None:
    """Return when `final` is there, or at the deadline: then whoever waits for rank 0 next says so.

    A look at the disk and no collective: those have deadlines of their own (DeepSpeed: 10 minutes), and a merge may
    take longer. If rank 0 fails, the launcher ends the others.
    """
    until_s = time.monotonic() + deadline_s
    while not Path(paths.final).exists() and time.monotonic() < until_s:
        time.sleep(poll_s)


def point_version(paths: RunPaths, version_final: str) -> str | None:
    """Make `<version>/final` point to this run's result, in one rename.

    A real folder in that place is moved aside by name, never deleted; its new path is returned.
    """
    pointer = Path(version_final)
    aside = None
    if pointer.is_dir() and not pointer.is_symlink():
        aside = pointer.with_name(f"{pointer.name}.before-{paths.run_id}")
        os.rename(pointer, aside)
    fresh = pointer.with_name(f".{pointer.name}.{paths.run_id}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(os.path.join(paths.run_id, "final"))
    os.replace(fresh, pointer)
    return None if aside is None else str(aside)


def _flush(path: Path) -> None:
    """Have the disk hold a file or a folder's entries before a rename says so."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
