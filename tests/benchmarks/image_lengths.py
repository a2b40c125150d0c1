"""How long the tokens of a row with an image take to count: processed, as it is trained on, and by its image's size.

    python tests/benchmarks/image_lengths.py [--rows 10]

Idefics3's processor, as SmolVLM's checkpoints set it: 13 tiles of 512 x 512 pixels, and a single one. Prints a Markdown
table of processor milliseconds a row, both ways in turn. The rows are JPEG files of noise.
"""

from __future__ import annotations

import argparse
import functools
import io
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

import picture_tools
import tiny_images
import torch
from figures import table
from PIL import Image

from colograd.extensions.images.data import ImageReader

PROMPT = [{"role": "user", "content": "what is it?"}]
ARGUMENTS = {"add_generation_prompt": True}
TILE, TILES = 512, {"13 tiles": 2048, "one tile": 512}  # longest edge of a scaled image
SIZES = [(640, 480), (1600, 1200)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=10)
    rows = parser.parse_args().rows
    torch.set_num_threads(1)
    found = []
    for name, edge in TILES.items():
        reader = reader_of(edge)
        for width, height in SIZES:
            row = {"prompt": PROMPT, "images": [{"bytes": jpeg(width, height)}]}
            tokens = len(reader.read(row, ARGUMENTS, "row"))
            assert reader.count(row, ARGUMENTS, "row") == tokens
            calls = (functools.partial(each, row, ARGUMENTS, "row") for each in (reader.read, reader.count))
            taken = milliseconds(rows, *calls)
            found.append([name, f"{width} x {height}", str(tokens), *(f"{each:.1f}" for each in taken)])
    print(table(["processor", "JPEG", "tokens", "processed, ms", "counted, ms"], found, text_columns=2))


def reader_of(edge: int) -> ImageReader:
    from transformers import Idefics3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    model, processor = picture_tools.processor_of("idefics3")
    places = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    processor.tokenizer.add_special_tokens({"additional_special_tokens": [*tiny_images.IDEFICS3, *places]})
    pixels = Idefics3ImageProcessorPil(size={"longest_edge": edge}, max_image_size={"longest_edge": TILE})
    template = processor.tokenizer.chat_template
    whole = Idefics3Processor(pixels, processor.tokenizer, image_seq_len=64, chat_template=template)
    return ImageReader(whole, model.config.image_token_id)


def jpeg(width: int, height: int) -> bytes:
    file, pixels = io.BytesIO(), torch.randint(0, 255, (height // 8, width // 8, 3), dtype=torch.uint8)
    Image.fromarray(pixels.numpy()).resize((width, height)).save(file, "JPEG")
    return file.getvalue()


def milliseconds(times: int, *calls: Callable[[], Any]) -> list[float]:
    """Return the mean processor milliseconds of each call."""
    taken = [0.0 for _ in calls]
    for _ in range(times):
        for index, call in enumerate(calls):
            started = time.process_time()
            call()
            taken[index] += time.process_time() - started
    return [1000 * each / times for each in taken]


if __name__ == "__main__":
    main()
