"""A whole run on a model that does not speak ChatML: its own template from the first token to the served answer."""

import json
from pathlib import Path

import pytest

from corpus_builder.frame import load_frame, template_of
from corpus_builder.sample import Message
from tests.tiny_run import make_run, tiny_samples
from tests.tokenizers_real import OTHER_FORMS, other_tokenizer_json, write_other_folder
from trainer.base_model import find_model_faults

pytestmark = pytest.mark.e2e
ASKED = (Message("user", "Tell me about the lamp, number 0."),)


@pytest.fixture(scope="module", params=["llama3", "mistral"])
def trained(request, tmp_path_factory):
    """A run of one process until it knows its few answers by heart; the form's name, the run and how it ended."""
    form, folder = OTHER_FORMS[request.param], tmp_path_factory.mktemp(request.param)
    samples = tiny_samples(6)
    texts = [message.content for sample in samples for message in sample.messages]
    base = write_other_folder(folder / "base", form, other_tokenizer_json(form, texts))
    write_random_llama(base)
    run = make_run(
        folder / "data", base, samples, num_train_epochs=40, learning_rate=5e-3, tokens_per_step=100, max_seq_len=256
    )
    return request.param, run, run.launch(alone=True)


def write_random_llama(folder: Path) -> None:
    """Write a random Llama of two layers beside a tokenizer."""
    import torch
    from tokenizers import Tokenizer
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        LlamaForCausalLM(config).save_pretrained(folder)


def test_the_result_speaks_by_the_models_own_template(trained):
    name, run, ended = trained
    assert ended.exit_code == 0, ended.stderr[-4000:]
    final = Path(run.paths.final)
    assert find_model_faults(str(final)) == []
    assert template_of(final) == OTHER_FORMS[name].template
    config = json.loads((final / "tokenizer_config.json").read_text("utf-8"))
    assert config["chat_template"] == OTHER_FORMS[name].template
    assert not load_frame(final).is_chatml


def test_a_served_answer_ends_at_the_stop_token(trained):
    """transformers alone, as a server would: template, generation settings, no word of ours."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, run, _ = trained
    final = Path(run.paths.final)
    tokenizer, model = AutoTokenizer.from_pretrained(final), AutoModelForCausalLM.from_pretrained(final)
    stop = load_frame(final).stop
    assert model.generation_config.eos_token_id[0] == stop
    chat = [{"role": message.role, "content": message.content} for message in ASKED]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    assert prompt["input_ids"][0].tolist() == load_frame(final).prompt(ASKED)
    with torch.inference_mode():
        ids = model.generate(**prompt, do_sample=False, max_new_tokens=60, pad_token_id=stop)
    answer = ids[0, prompt["input_ids"].shape[1] :].tolist()
    assert answer[-1] == stop
    assert tokenizer.decode(answer[:-1]).strip() == "The lamp is mine. 晚安"


def test_the_suite_is_asked_in_the_same_form(trained):
    from trainer.accept import Answerer

    _, run, _ = trained
    assert Answerer(Path(run.paths.final)).answer(ASKED, max_new_tokens=60) == "The lamp is mine. 晚安"
