"""A task with images for a tiny model with random weights, learnable on a CPU: name the colour of a square.

python -m colograd.apps.quickstart.colours --output models/colours
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import output_folder

if TYPE_CHECKING:
    from datasets import Dataset

COLOURS = {
    "red": (220, 30, 30), "green": (30, 180, 40), "blue": (40, 60, 220), "yellow": (230, 220, 40),
    "white": (245, 245, 245), "black": (10, 10, 10),
}  # fmt: skip
SIDE = 32
QUESTION = "which colour ?"
SPECIAL = ("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}<image>{% else %}{{ p['text'] }}{% endif %} {% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def colours(size: int = 512, seed: int = 0) -> Dataset:
    """Draw images of a square in one of six colours. The square's size and place, and the grey background, vary."""
    import datasets
    from PIL import Image

    if size < 1:
        raise ValueError(f"colours: size is {size}, but must be at least 1: raise it.")
    draw, rows = random.Random(seed), []
    for _ in range(size):
        name, grey, side = draw.choice([*COLOURS]), draw.randint(90, 170), draw.randint(12, 24)
        picture = Image.new("RGB", (SIDE, SIDE), (grey, grey, grey))
        left, top = draw.randint(0, SIDE - side), draw.randint(0, SIDE - side)
        shade = tuple(min(255, max(0, part + draw.randint(-10, 10))) for part in COLOURS[name])
        picture.paste(shade, (left, top, left + side, top + side))
        rows.append({"prompt": [{"role": "user", "content": QUESTION}], "image": picture, "answer": name})
    text = datasets.Value("string")
    messages = [{"role": text, "content": text}]
    features = datasets.Features(prompt=messages, image=datasets.Image(), answer=text)
    return datasets.Dataset.from_list(rows, features)


def names_the_colour(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """Reward 1 if the completion's first word is the colour's name, else 0."""
    said = [completion[0]["content"].split() for completion in completions]
    return [float(words[:1] == [name]) for words, name in zip(said, answer, strict=True)]


def make_model(folder: Path, seed: int = 0) -> None:
    """Save a two-layer Idefics3 with random weights, and a processor with a vocabulary of the task's words."""
    import torch
    import transformers as hf
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    words = ["<unk>", "<end>", "<pad>", "<user>", "<assistant>", *QUESTION.split(), *COLOURS]
    fast = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"unk_token": "<unk>", "eos_token": "<end>", "pad_token": "<pad>"}
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=fast, **names)
    tokenizer.add_special_tokens({"additional_special_tokens": [*SPECIAL, "<user>", "<assistant>"]})
    tokenizer.chat_template = TEMPLATE
    edge = {"longest_edge": SIDE}
    pixels = Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)
    processor = hf.Idefics3Processor(pixels, tokenizer, image_seq_len=4, chat_template=TEMPLATE)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    layers = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"model_type": "llama", "vocab_size": len(tokenizer), "head_dim": 32, "num_key_value_heads": 1}
    torch.manual_seed(seed)
    config = hf.Idefics3Config(
        text_config={**layers, **text, **ends, "max_position_embeddings": 128, "tie_word_embeddings": False},
        vision_config={**layers, "image_size": SIDE, "patch_size": SIDE // 4}, scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids(SPECIAL[0]), tie_word_embeddings=False, **ends,
    )  # fmt: skip
    model = hf.Idefics3ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(3.0)  # At the usual scale, 0.02, a model this narrow would learn slowly.
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def main() -> None:
    output = output_folder("colours", "colours")
    make_model(output)
    print(f"colours: {output} made (a random Idefics3 of two layers)")


if __name__ == "__main__":
    main()
