"""Real tokenizers for tests: Qwen's vocabulary out of PyPI's `dashscope`, and a tiny one trained on the spot.

Side effects: downloads one pinned wheel with pip, once, into the git-ignored cache folder.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

CACHE = Path(__file__).parents[1] / ".cache"
DASHSCOPE = "dashscope==2.0.2"  # Apache-2.0
VOCABULARY_MEMBER = "dashscope/resources/qwen.tiktoken"
VOCABULARY_SHA256 = "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186"

#: Source: Qwen2's tokenizer.json, pre_tokenizer.
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
#: Source: Qwen2.5's tokenizer_config.json, added_tokens_decoder; ids count from 151,643.
QWEN_ADDED = (
    *(f"<|{name}|>" for name in ("endoftext", "im_start", "im_end", "object_ref_start", "object_ref_end", "box_start",
      "box_end", "quad_start", "quad_end", "vision_start", "vision_end", "vision_pad", "image_pad", "video_pad")),
    "<tool_call>", "</tool_call>",
    *(f"<|{name}|>" for name in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep")),
)  # fmt: skip
#: What Qwen2.5's template does with plain conversations, in our own words; its default system prompt included.
QWEN_TEMPLATE = (
    "{%- if messages[0]['role'] != 'system' %}"
    "{{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
CHATML_ADDED = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def qwen_ranks() -> dict[bytes, int]:
    """Return Qwen's byte pairs with their ranks, 151,643 of them."""
    path = CACHE / "qwen.tiktoken"
    if not path.is_file():
        _fetch_vocabulary(path)
    lines = path.read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}


def _fetch_vocabulary(path: Path) -> None:
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", DASHSCOPE, "-d", scratch]
        subprocess.run(command, check=True, capture_output=True, timeout=300)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            data = archive.read(VOCABULARY_MEMBER)
        assert hashlib.sha256(data).hexdigest() == VOCABULARY_SHA256
        partial = Path(scratch) / "vocabulary"
        partial.write_bytes(data)
        os.replace(partial, path)


def byte_alphabet() -> dict[int, str]:
    """Return the printable character by which byte-level BPE writes each byte.

    Source: GPT-2's encoder.py, bytes_to_unicode.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}


def split_token(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """Return the two parts whose merge made `token`: all merges of lower rank applied to its bytes."""
    limit = ranks[token]
    parts = [bytes([byte]) for byte in token]
    while len(parts) > 2:
        pairs = [(ranks.get(a + b, limit), at) for at, (a, b) in enumerate(pairwise(parts))]
        rank, at = min(pairs)
        assert rank < limit
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]


def qwen_tokenizer_json() -> str:
    """Return a `tokenizer.json` of the Qwen2.5 family, made of its real vocabulary; built once."""
    path = CACHE / "qwen-tokenizer.json"
    if not path.is_file():
        CACHE.mkdir(exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(_build_qwen(), ensure_ascii=False), "utf-8")
        os.replace(partial, path)
    return path.read_text("utf-8")


def _build_qwen() -> dict[str, object]:
    ranks = qwen_ranks()
    alphabet = byte_alphabet()

    def spelled(token: bytes) -> str:
        return "".join(alphabet[byte] for byte in token)

    merges = [split_token(token, ranks) for token in sorted(ranks, key=ranks.__getitem__) if len(token) > 1]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [_added(token, len(ranks) + at) for at, token in enumerate(QWEN_ADDED)],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": QWEN_PATTERN}, "behavior": "Isolated", "invert": False},
                byte_level,
            ],
        },
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {spelled(token): rank for token, rank in ranks.items()},
            "merges": [[spelled(left), spelled(right)] for left, right in merges],
        },
    }


def _added(token: str, token_id: int) -> dict[str, object]:
    is_control = token.startswith("<|")
    return {
        "id": token_id, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False, "special": is_control,
    }  # fmt: skip


def tiny_tokenizer_json(texts: Iterable[str], *, vocab_size: int = 400) -> str:
    """Return a ChatML byte-level `tokenizer.json` trained on `texts`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in CHATML_ADDED],
        show_progress=False,
    )
    tokenizer.train_from_iterator(list(texts), trainer)
    return str(tokenizer.to_str())


def write_tokenizer_folder(folder: Path, tokenizer_json: str, template: str) -> Path:
    """Write the tokenizer half of a model folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json, "utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return folder


@dataclass(frozen=True)
class OtherForm:
    """How a family of models that is not ChatML speaks: its template, its control tokens, its kind of tokenizer.

    `strips`: control tokens that take the white space after them, as Phi-3's do. `words`: added tokens that are no
    control tokens, as Gemma's line breaks are. `refuses`: what the template does not render.
    """

    template: str
    controls: tuple[str, ...]
    kind: str
    eos: str
    bos: str = ""
    strips: bool = False
    words: tuple[str, ...] = ()
    refuses: tuple[str, ...] = ()


#: In our own words, each with what makes its family's own template hard.
OTHER_FORMS = {
    "llama3": OtherForm(
        "{% for message in messages %}"
        "{% set text = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
        " + message['content'] | trim + '<|eot_id|>' %}"
        "{% if loop.first %}{% set text = bos_token + text %}{% endif %}{{ text }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "bytes", eos="<|eot_id|>", bos="<|begin_of_text|>",
    ),
    # A system turn of its own, with the date where it is told one.
    "llama3-dated": OtherForm(
        "{{- bos_token }}"
        "{%- if strftime_now is defined %}{%- set today = strftime_now('%d %b %Y') %}"
        "{%- else %}{%- set today = '26 Jul 2024' %}{%- endif %}"
        "{%- if messages[0]['role'] == 'system' %}{%- set given = messages[0]['content'] | trim %}"
        "{%- set messages = messages[1:] %}{%- else %}{%- set given = '' %}{%- endif %}"
        "{%- if tools is not none %}{{- 'TOOLS' }}{%- endif %}"
        "{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + today + '\n\n' + given + '<|eot_id|>' }}"
        "{%- for message in messages %}"
        "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
        "{{- message['content'] | trim + '<|eot_id|>' }}"
        "{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "bytes", eos="<|eot_id|>", bos="<|begin_of_text|>",
    ),
    # No generation prompt; the system turn is put before the first question; the roles must alternate.
    "mistral": OtherForm(
        "{%- if messages[0]['role'] == 'system' %}{%- set given = messages[0]['content'] + '\n\n' %}"
        "{%- set turns = messages[1:] %}{%- else %}{%- set given = '' %}{%- set turns = messages %}{%- endif %}"
        "{{- bos_token }}"
        "{%- for message in turns %}"
        "{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{- raise_exception('roles must alternate') }}{%- endif %}"
        "{%- if message['role'] == 'user' %}"
        "{{- '[INST] ' + (given if loop.first else '') + message['content'] + '[/INST]' }}"
        "{%- else %}{% generation %}{{- ' ' + message['content'] + eos_token }}{% endgeneration %}{%- endif %}"
        "{%- endfor %}",
        ("<s>", "</s>", "[INST]", "[/INST]"), "metaspace", eos="</s>", bos="<s>", refuses=("two users",),
    ),
    # The tags are no control tokens, the tokenizer puts a space after each of those; a space before the stop.
    "llama2": OtherForm(
        "{% if messages[0]['role'] == 'system' %}{% set given = messages[0]['content'] %}"
        "{% set turns = messages[1:] %}{% else %}{% set given = false %}{% set turns = messages %}{% endif %}"
        "{% for message in turns %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}{% endif %}"
        "{% if loop.first and given %}{% set content = '<<SYS>>\n' + given + '\n<</SYS>>\n\n' + message['content'] %}"
        "{% else %}{% set content = message['content'] %}{% endif %}"
        "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
        "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}"
        "{% endfor %}",
        ("<s>", "</s>"), "prepend", eos="</s>", bos="<s>", refuses=("two users",),
    ),
    # `model` for the assistant; a system turn is refused; line breaks are words of the vocabulary.
    "gemma": OtherForm(
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
        "{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
        "{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
        "{% endif %}"
        "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}",
        ("<bos>", "<start_of_turn>", "<end_of_turn>"), "split", eos="<end_of_turn>", bos="<bos>",
        words=("\n\n", "\t\t"), refuses=("system", "two users"),
    ),
    # No beginning; control tokens that swallow the line break after them.
    "phi3": OtherForm(
        "{% for message in messages %}"
        "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
        ("<s>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "prepend", eos="<|endoftext|>", bos="<s>", strips=True,
    ),
    # Tags that are plain text; the stop is the end of the sequence.
    "zephyr": OtherForm(
        "{% for message in messages %}\n"
        "{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n"
        "{% endif %}\n"
        "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n"
        "{% endfor %}",
        ("<s>", "</s>"), "metaspace", eos="</s>", bos="<s>",
    ),
    # Knows ChatML's two tokens and speaks otherwise.
    "phi4": OtherForm(
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '<|im_sep|>' + message['content'] + '<|im_end|>' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}",
        (*CHATML_ADDED, "<|im_sep|>"), "bytes", eos="<|endoftext|>", bos="<|endoftext|>",
    ),
}  # fmt: skip
#: Source: Llama 3's tokenizer.json, pre_tokenizer.
LLAMA3_PATTERN = QWEN_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def other_tokenizer_json(form: OtherForm, texts: Iterable[str], *, vocab_size: int = 600) -> str:
    """Return a `tokenizer.json` of a form's kind, trained on `texts`: by bytes, or by words as SentencePiece does."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    is_bytes = form.kind == "bytes"
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    model = models.BPE(ignore_merges=True) if is_bytes else models.BPE(unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(model)
    if is_bytes:
        split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if is_bytes else [],
        special_tokens=[
            *(AddedToken(piece, special=piece == "<unk>", normalized=False) for piece in ([] if is_bytes else pieces)),
            *(AddedToken(token, special=True, normalized=False, rstrip=form.strips) for token in form.controls),
            *(AddedToken(word, special=True, normalized=False) for word in form.words),
        ],
        show_progress=False,
    )
    tokenizer.train_from_iterator(list(texts), trainer)
    packed = json.loads(tokenizer.to_str())
    packed["added_tokens"] = [token for token in packed["added_tokens"] if not token["content"].startswith("<0x")]
    for token in packed["added_tokens"]:
        token["special"] = token["content"] not in form.words
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    if form.kind == "prepend":  # Llama 2: a space before every text between control tokens
        packed["pre_tokenizer"] = None
        packed["normalizer"] = {
            "type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces],
        }  # fmt: skip
    elif form.kind == "split":  # Gemma: no space is put anywhere
        packed["normalizer"] = spaces
        packed["pre_tokenizer"] = {
            "type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False,
        }  # fmt: skip
    elif form.kind == "metaspace":  # Mistral: a space at the very beginning
        packed["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    return json.dumps(packed, ensure_ascii=False)


def write_other_folder(folder: Path, form: OtherForm, tokenizer_json: str) -> Path:
    """Write the tokenizer half of a model folder of another form."""
    write_tokenizer_folder(folder, tokenizer_json, form.template)
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    config |= {"eos_token": form.eos} | ({"bos_token": form.bos} if form.bos else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    return folder
