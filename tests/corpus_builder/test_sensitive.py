"""Secrets and personal data: what is found, and what only looks like it. No value here is anybody's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corpus_builder.sensitive import PERSONAL, SECRETS, find_sensitive, is_bank_card, is_id_card, is_phone

KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXk\nAAAA==\n-----END OPENSSH PRIVATE KEY-----"
FOUND = {
    "private_key": [
        KEY,
        KEY.replace("\n", "\\n"),
        "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBg\n",
        "-----BEGIN PGP PRIVATE KEY BLOCK-----\n\nlQdGBF\n-----END PGP PRIVATE KEY BLOCK-----",
    ],
    "access_key": [
        "AKIA" + "IOSFODNN7EXAMPLE",
        "AKID" + "z8krbsJ5yKBZQpn74WFkmLPx3gnPhESA",
        "LTAI" + "5tQnKxExample7abcd",
        "AIza" + "SyA1234567890abcdefghijklmnopqrstuv",
    ],
    "token": [
        "ghp_" + "a1B2" * 9,
        "hf_" + "aB3d" * 9,
        "sk-" + "proj-a1B2c3D4e5F6g7H8i9",
        "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeK",
        "glpat-" + "a1B2c3D4e5F6g7H8i9J0",
    ],
    "email": ["keeper@light.example.org", "a.b+c@d-e.cn"],
    "phone": ["13912345678", "+8613912345678", "139 1234 5678", "139-1234-5678"],
    "id_card": ["11010519491231002X", "440308199901010012"],
    "bank_card": ["6222021234567890128", "4111 1111 1111 1111", "378282246310005"],
    "ip_address": ["8.8.8.8", "2001:4860:4860::8888"],
}
SURROUNDINGS = ["{}", "（{}）", "see {}.", "密钥：{}，好", "a\n{}\nb", '"{}"']


@pytest.mark.parametrize("around", SURROUNDINGS)
@pytest.mark.parametrize(("kind", "value"), [(kind, value) for kind, values in FOUND.items() for value in values])
def test_value_is_found_where_it_stands(kind, value, around):
    text = around.format(value)
    spans = [(text[span.start : span.end], span.kind) for span in find_sensitive(text)]
    assert spans == [(value.strip(), kind)]


@pytest.mark.parametrize(
    ("text", "value", "kind"),
    [
        ("postgres://keeper:hunter2@db:5432/x", "hunter2", "url_password"),
        ("https://u:p%40ss@example.org/", "p%40ss", "url_password"),
        ("SecretKey: Gu5t9xGARNpq86cd98joQYCN3EXAMPLE", "Gu5t9xGARNpq86cd98joQYCN3EXAMPLE", "access_key"),
        ('"access_key_secret": "aB3dE5fG7hI9jK1lM3"', "aB3dE5fG7hI9jK1lM3", "access_key"),
        ("Authorization: Bearer a1B2c3D4e5F6g7H8i9J0", "a1B2c3D4e5F6g7H8i9J0", "token"),
        ("access_token=a1B2c3D4e5F6g7H8i9J0", "a1B2c3D4e5F6g7H8i9J0", "token"),
    ],
)
def test_value_with_a_name_is_found_alone(text, value, kind):
    assert [(text[span.start : span.end], span.kind) for span in find_sensitive(text)] == [(value, kind)]


@pytest.mark.parametrize(
    "text",
    [
        "12345678901",  # no mobile segment
        "id 139123456789012345678901",  # longer than any
        "x13912345678",
        "110105194912310021",  # wrong check digit
        "110105199902301234",  # no such day
        "6222021234567890123",  # Luhn fails
        "192.168.1.10 127.0.0.1 203.0.113.7 1.2.3 999.1.1.1 1.2.3.4.5",
        "10:22:33 a::b fe80::1",
        "api_key: your_api_key_goes_here",
        "secret_key = xxxxxxxxxxxxxxxxxxxx",
        "https://example.org/a:b@c user@host",
        "-----BEGIN PUBLIC KEY-----\nMIIBIjANBg\n-----END PUBLIC KEY-----",
        "sk-learn is a library, hf_hub too",
        "2025-05-03 10:22:33.123456",
    ],
)
def test_what_only_looks_like_it_is_left_alone(text):
    assert find_sensitive(text) == ()


def test_check_digits():
    assert is_id_card("11010519491231002X")
    assert not is_id_card("110105194912310020")
    assert is_bank_card("4111111111111111")
    assert not is_bank_card("4111111111111112")
    assert is_phone("8613912345678")
    assert not is_phone("12912345678")


@given(st.text(alphabet=st.sampled_from("0123456789 -@.:/AKIAghp_eyJ-BEGIN PRIVATE KEY\n好"), max_size=300))
def test_findings_are_in_order_and_never_overlap(text):
    spans = find_sensitive(text)
    ends = [0, *(span.end for span in spans)]
    assert all(end <= span.start < span.end <= len(text) for end, span in zip(ends, spans, strict=False))
    assert {span.kind for span in spans} <= {*SECRETS, *PERSONAL}


@pytest.mark.parametrize("text", ["a" * 200_000, "1 " * 100_000, "a.b" * 70_000 + "@", ":" * 100_000, "=key:" * 40_000])
@pytest.mark.timeout(20)
def test_long_runs_take_no_longer_than_their_length(text):
    assert all(0 <= span.start < span.end <= len(text) for span in find_sensitive.__wrapped__(text))
