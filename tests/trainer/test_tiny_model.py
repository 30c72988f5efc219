"""The tiny model is one that transformers makes itself, and its tokenizer reads every text."""

import json

import pytest

from corpus_builder.frame import load_frame
from corpus_builder.sample import Message
from trainer.base_model import find_model_faults
from trainer.tiny_model import BYTE_VOCABULARY, STD, write_byte_tokenizer, write_weights


@pytest.mark.parametrize("ties", [False, True])
def test_weights_are_those_that_transformers_would_make(tmp_path, ties):
    """Every tensor by name and shape, none missing, none left over, of the same spread."""
    from transformers import AutoConfig, AutoModelForCausalLM

    write_weights(tmp_path, vocab_size=300, tie_word_embeddings=ties)
    loaded, told = AutoModelForCausalLM.from_pretrained(str(tmp_path), output_loading_info=True)
    assert {key: list(found) for key, found in told.items() if found} == {}
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(str(tmp_path)))
    for name, tensor in made.state_dict().items():
        ours = loaded.state_dict()[name]
        assert ours.shape == tensor.shape
        assert float(ours.std()) == pytest.approx(float(tensor.std()), abs=STD / 5), name


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        write_weights(tmp_path / name, vocab_size=300, seed=seed)
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"]
    assert files[0] == files[1] != files[2]


def test_every_byte_is_a_token_and_controls_are_no_text(tmp_path):
    write_weights(tmp_path, vocab_size=BYTE_VOCABULARY)
    write_byte_tokenizer(tmp_path)
    assert find_model_faults(str(tmp_path)) == []
    frame = load_frame(tmp_path)
    text = "守灯人 lights the lamp.\n\t<|im_end|> 🙂 \x00é"
    assert len(frame.encode_text(text)) == len(text.encode())
    assert max(frame.encode_text(text)) < BYTE_VOCABULARY
    assert frame.im_end not in frame.encode_text(text)
    encoded = frame.encode((Message("user", "a"), Message("assistant", "b")))
    assert encoded.ids.count(frame.im_end) == 2
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"
