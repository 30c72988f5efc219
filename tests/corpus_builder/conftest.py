"""Fixtures of the corpus builder's tests."""

import pytest

from tests.corpus_builder.small_world import make_world


@pytest.fixture
def world(tmp_path, chatml_model_dir):
    """A repository with documents and tools, dialogs beside it, and a function that writes requests."""
    return make_world(tmp_path, chatml_model_dir)
