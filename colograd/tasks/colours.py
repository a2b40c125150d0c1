"""A task for the eye that a random model of a hundred thousand parameters learns on a CPU: which of four colours a
picture has.

    python -m colograd.tasks.colours models/tiny-vlm

writes the model. It knows no words, so that each colour has a quarter of all characters: those whose number leaves the
colour's number over when it is divided by four. By chance a quarter of the answers is right.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasets import Dataset

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (30, 30, 220), "yellow": (230, 220, 20)}
SIDE = 56  # pixels
SPREAD = 25  # by which a picture's colour may differ from its name's, of 255
SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = (
    "{% for m in messages %}{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
)


def pictures(size: int = 512, seed: int = 0) -> Dataset:
    """Pictures of one colour each, none of them quite the same.

    Returns:
        ``prompt`` (a conversation with a place for the picture), ``image`` and ``colour`` (its name).
    """
    from datasets import Dataset
    from PIL import Image

    draw, names, rows = random.Random(seed), [*COLOURS], []
    prompt = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    for index in range(size):
        name = names[index % len(names)]
        shade = tuple(min(255, max(0, value + draw.randint(-SPREAD, SPREAD))) for value in COLOURS[name])
        rows.append({"prompt": prompt, "image": Image.new("RGB", (SIDE, SIDE), shade), "colour": name})
    return Dataset.from_list(rows)


def says_colour(completions: list[Any], colour: list[str], **kwargs: Any) -> list[float]:
    """1 where the answer's first character is one of the colour's."""
    numbers = {name: number for number, name in enumerate(COLOURS)}
    texts = [completion[0]["content"] for completion in completions]
    return [
        float(bool(text) and ord(text[0]) % len(COLOURS) == numbers[name])
        for text, name in zip(texts, colour, strict=True)
    ]


def make_model(folder: str | Path, seed: int = 0) -> None:
    """Write a random Qwen2.5-VL of two layers, its tokenizer of single bytes and its processor.

    Raises:
        ImportError: without torchvision, which its processor needs.
    """
    import torch
    import transformers as hf

    tokenizer = _tokenizer()
    ids = tokenizer.convert_tokens_to_ids
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 256, "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
        "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0},
    }  # fmt: skip
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": 14,
        "out_hidden_size": 64, "fullatt_block_indexes": [1], "window_size": 56,
    }  # fmt: skip
    tokens = {
        "vision_start_token_id": ids(SPECIAL[0]), "vision_end_token_id": ids(SPECIAL[1]),
        "image_token_id": ids(SPECIAL[2]), "video_token_id": ids(SPECIAL[3]),
    }  # fmt: skip
    config = hf.Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False, **tokens)
    torch.manual_seed(seed)
    model = hf.Qwen2_5_VLForConditionalGeneration(config)
    images = hf.Qwen2VLImageProcessor(patch_size=14, size={"shortest_edge": SIDE**2, "longest_edge": SIDE**2})
    processor = hf.Qwen2_5_VLProcessor(images, tokenizer, hf.Qwen2VLVideoProcessor(), tokenizer.chat_template)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*alphabet, "<end>", "<pad>"])}
    bare = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, eos_token="<end>", pad_token="<pad>")
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m colograd.tasks.colours FOLDER")
    make_model(sys.argv[1])
    print(f"wrote {sys.argv[1]}")
