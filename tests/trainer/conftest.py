"""Fixtures of the trainer's tests: real tokenizers and a tiny model, each made once."""

from pathlib import Path

import pytest

from corpus_builder.frame import Frame, load_frame, template_of
from tests.tiny_run import tiny_samples, write_base_model
from tests.tokenizers_real import CACHE, QWEN_TEMPLATE, qwen_tokenizer_json, write_tokenizer_folder


@pytest.fixture(scope="session")
def qwen_dir(tmp_path_factory) -> Path:
    """A model folder's tokenizer half with Qwen2.5's real vocabulary."""
    return write_tokenizer_folder(tmp_path_factory.mktemp("qwen"), qwen_tokenizer_json(), QWEN_TEMPLATE)


@pytest.fixture(scope="session")
def smollm2_dir(tmp_path_factory) -> Path:
    """The demo model's tokenizer, with the template that it ships."""
    import transformers

    from controller.demo_model import write_tokenizer

    folder = write_tokenizer(CACHE / "demo-model")
    if int(transformers.__version__.split(".")[0]) >= 5:
        return folder
    from trainer.final import write_tokenizer as rewrite_tokenizer

    # transformers 5 may have written it, with a class that 4.x does not know.
    readable = tmp_path_factory.mktemp("smollm2")
    rewrite_tokenizer(folder, readable, template_of(folder))
    return readable


@pytest.fixture(scope="session")
def qwen_frame(qwen_dir) -> Frame:
    return load_frame(qwen_dir)


@pytest.fixture(scope="session")
def smollm2_frame(smollm2_dir) -> Frame:
    return load_frame(smollm2_dir)


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory) -> Path:
    """A random two-layer model with a tokenizer trained on the tiny samples."""
    return write_base_model(tmp_path_factory.mktemp("tiny") / "base", tiny_samples())
