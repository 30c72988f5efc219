"""However often a download is cut or killed, and wherever: the same file, and nothing beside it."""

import pytest

from controller.boxside import parts
from tests.fetching import BLOCK, cut_again_and_again, kill_again_and_again, serving_zip


@pytest.mark.soak
def test_cut_or_killed_at_random_places_it_is_the_same_file(rounds, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "BLOCK_BYTES", BLOCK)
    with serving_zip(tmp_path) as (server, sha256):
        for number, draw in enumerate(rounds):
            cut_again_and_again(server, sha256, tmp_path / f"cut-{number}/zip", draw)
            kill_again_and_again(server, sha256, tmp_path / f"killed-{number}/zip", draw, most=10)
