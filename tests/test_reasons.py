"""Every reason that the code names is a sentence in both languages."""

import re

import pytest

from corpus_builder.errors import Named, ProjectError
from corpus_builder.say import LANGUAGES, REASON, error_lines, say, spoken
from tests.test_architecture import ROOT, sources

NAMED_IN_CODE = sorted(
    {key for path in sources() for key in re.findall(r"\"reason\.[a-z0-9_]+", path.read_text("utf-8"))}
)


@pytest.mark.parametrize("lang", LANGUAGES)
def test_every_reason_is_a_sentence(lang):
    keys = {key.lstrip('"') for key in NAMED_IN_CODE}
    assert len(keys) >= 40, ROOT
    assert [key for key in sorted(keys) if say(key, lang) == key] == []


def test_reasons_inside_a_value_are_said_in_the_language():
    error = ProjectError(
        "known_hosts_invalid", reason="reason.in_line 3: reason.host_key_cut; reason.in_line 4: reason.port"
    )
    assert "行 3: 密钥不完整; 行 4: " in error_lines(error, "zh")[0]
    assert not REASON.search(error_lines(error, "en")[0])


def test_names_and_numbers_are_left_alone():
    assert spoken(Named("reason.port"), "en") == "reason.port"
    assert spoken(22, "en") == 22
