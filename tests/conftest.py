"""Fixtures that several floors share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from corpus_builder.frame import Frame
from tests.agent_box import AgentBox, agent_box
from tests.tokenizers_real import tiny_tokenizer_json


@pytest.fixture(scope="session")
def chatml_tokenizer_json() -> str:
    """A real byte-level BPE with ChatML's control tokens, trained on a few sentences: no download."""
    return tiny_tokenizer_json(
        ["The keeper lights the lamp at dusk, and the lamp flashes. " * 4, "守灯人在黄昏点灯，海鸥陪着她。" * 4],
        vocab_size=420,
    )


@pytest.fixture(scope="session")
def frame(chatml_tokenizer_json: str) -> Frame:
    """The chat frame over that tokenizer."""
    return Frame(chatml_tokenizer_json)


@pytest.fixture(scope="session")
def chatml_model_dir(tmp_path_factory: pytest.TempPathFactory, chatml_tokenizer_json: str) -> Path:
    """A model folder with that tokenizer and no weights: all that the corpus builder needs."""
    folder = tmp_path_factory.mktemp("chatml-model")
    (folder / "tokenizer.json").write_text(chatml_tokenizer_json, "utf-8")
    return folder


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentBox]:
    """A machine that the agent stands for: asked as over SSH, on this one."""
    with agent_box(tmp_path, sys.executable, monkeypatch) as made:
        yield made
