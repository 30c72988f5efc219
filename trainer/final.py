"""The result of a run: a model folder that speaks our frame. Side effects: writes `final.partial`, renames, points.

`final/` appears whole, by rename, and is never overwritten; `<version>/final` points to the newest run's.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from corpus_builder.errors import ProjectError
from corpus_builder.frame import CHAT_TEMPLATE, Frame
from corpus_builder.sample import Message
from trainer.base_model import find_model_faults
from trainer.run_paths import RunPaths

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
TEMPLATE_FILE = "chat_template.jinja"
#: Ordinary content: the places where a template and the frame could differ are roles, borders and white space.
PROBE = (
    Message("system", "You keep a lighthouse."),
    Message("user", "Who are you? 你是谁？"),
    Message("assistant", "I keep the lamp.\n\nOn every night."),
    Message("user", "好的"),
    Message("assistant", "12 flashes"),
)


def write_tokenizer(base_model_dir: Path, folder: Path) -> None:
    """Copy the base model's tokenizer byte for byte to `folder`, with the frame as its chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in TOKENIZER_FILES:
        if (base_model_dir / name).is_file():
            shutil.copyfile(base_model_dir / name, folder / name)
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text("utf-8")) if config_path.is_file() else {}
    config["chat_template"] = CHAT_TEMPLATE
    if config.get("tokenizer_class") == "TokenizersBackend":  # the name in transformers 5 only; 4.x knows the old one
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config_path.write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n", "utf-8")
    (folder / TEMPLATE_FILE).write_text(CHAT_TEMPLATE, "utf-8")


def check_template(folder: Path, frame: Frame) -> None:
    """Raise `template_mismatch` unless Hugging Face renders a conversation to exactly the frame's ids.

    Whoever serves the model renders with its template; what was trained must be what is asked.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    chat = [{"role": message.role, "content": message.content} for message in PROBE]
    whole = tokenizer.apply_chat_template(chat, tokenize=True, return_dict=True)["input_ids"]
    asked = tokenizer.apply_chat_template(chat[:2], tokenize=True, return_dict=True, add_generation_prompt=True)
    if list(whole) != frame.encode(PROBE).ids or list(asked["input_ids"]) != frame.prompt(PROBE[:2]):
        raise ProjectError("template_mismatch", path=str(folder))


def stop_at_turn_end(model: Any, frame: Frame) -> None:
    """Make the model's own generation settings end an answer where the frame ends it."""
    known = getattr(model, "generation_config", None)
    if known is None:
        return
    others = known.eos_token_id if isinstance(known.eos_token_id, list) else [known.eos_token_id]
    known.eos_token_id = [frame.im_end, *(token for token in others if token not in (None, frame.im_end))]


def partial_path(paths: RunPaths) -> Path:
    """Return where the result lies until it is whole."""
    return Path(paths.final + ".partial")


def publish_final(paths: RunPaths, tokenizer_dir: Path) -> None:
    """Complete `final.partial` with the tokenizer, check it and rename it to `final`.

    Raises:
        ProjectError: `final_incomplete`: what was written cannot be loaded.
    """
    partial = partial_path(paths)
    (partial / "training_args.bin").unlink(missing_ok=True)  # a pickle of this machine's paths
    for path in tokenizer_dir.iterdir():
        shutil.copyfile(path, partial / path.name)
    faults = find_model_faults(str(partial))
    if faults:
        raise ProjectError("final_incomplete", path=str(partial), missing=", ".join(fault.file for fault in faults))
    for path in partial.iterdir():
        _flush(path)
    os.rename(partial, paths.final)
    _flush(Path(paths.final).parent)


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
