"""A random model of two layers, and a tokenizer of single bytes: what trains where only the way counts.

Needs numpy and safetensors, no torch: written in a moment. The same seed gives the same bytes. Side effects: writes
the files it says.

    write_weights(folder, vocab_size=259)     config.json model.safetensors: Qwen2, 64 wide
    write_byte_tokenizer(folder)              tokenizer.json tokenizer_config.json: ChatML over 256 bytes
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from corpus_builder.frame import CHAT_TEMPLATE
from corpus_builder.token_bytes import byte_alphabet

HIDDEN, INNER, LAYERS, HEADS, KEY_HEADS = 64, 128, 2, 4, 2
STD = 0.02  # transformers' own initialisation
IM_END = "<|im_end|>"
CONTROLS = ("<|endoftext|>", "<|im_start|>", IM_END)
BYTE_VOCABULARY = len(CONTROLS) + 256


def write_weights(folder: Path, *, vocab_size: int, seed: int = 3, positions: int = 512, **config: Any) -> None:
    """Write `config.json` and `model.safetensors` of a random Qwen2 in 32 bits.

    Args:
        positions: The longest conversation, in tokens.
        config: More keys of the configuration; `tie_word_embeddings=True` leaves the head out.
    """
    import numpy as np
    from safetensors.numpy import save_file

    values = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "max_position_embeddings": positions,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **config,
    }
    generator = np.random.default_rng(seed)
    tensors = {}
    for name, shape in _shapes(vocab_size, has_head=not values["tie_word_embeddings"]):
        if name.endswith("norm.weight"):
            tensors[name] = np.ones(shape, np.float32)
        elif name.endswith(".bias"):
            tensors[name] = np.zeros(shape, np.float32)
        else:
            tensors[name] = STD * generator.standard_normal(shape, np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values, indent=1), "utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _shapes(vocab_size: int, *, has_head: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor, as transformers' Qwen2 names them."""
    narrow = HIDDEN // HEADS * KEY_HEADS
    yield "model.embed_tokens.weight", (vocab_size, HIDDEN)
    for number in range(LAYERS):
        layer = f"model.layers.{number}"
        for name, width in (("q_proj", HIDDEN), ("k_proj", narrow), ("v_proj", narrow)):
            yield f"{layer}.self_attn.{name}.weight", (width, HIDDEN)
            yield f"{layer}.self_attn.{name}.bias", (width,)
        yield f"{layer}.self_attn.o_proj.weight", (HIDDEN, HIDDEN)
        yield f"{layer}.mlp.gate_proj.weight", (INNER, HIDDEN)
        yield f"{layer}.mlp.up_proj.weight", (INNER, HIDDEN)
        yield f"{layer}.mlp.down_proj.weight", (HIDDEN, INNER)
        yield f"{layer}.input_layernorm.weight", (HIDDEN,)
        yield f"{layer}.post_attention_layernorm.weight", (HIDDEN,)
    yield "model.norm.weight", (HIDDEN,)
    if has_head:
        yield "lm_head.weight", (vocab_size, HIDDEN)


def write_byte_tokenizer(folder: Path) -> None:
    """Write a ChatML tokenizer in which each byte is a token, BYTE_VOCABULARY ids in all."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    alphabet = byte_alphabet()
    bytes_in_order = sorted(alphabet, key=alphabet.__getitem__)
    vocabulary = {token: number for number, token in enumerate([*CONTROLS, *bytes_in_order])}
    added = [
        {"id": vocabulary[token], "content": token, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True} for token in CONTROLS
    ]  # fmt: skip
    model: dict[str, Any] = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": vocabulary, "merges": [],
    }  # fmt: skip
    whole = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level, "model": model,
    }  # fmt: skip
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE, "eos_token": IM_END}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(whole, ensure_ascii=False), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
