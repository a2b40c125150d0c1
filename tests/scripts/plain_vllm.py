"""Log-probabilities of a prompt's tokens as JSON, by vLLM without Colograd, from a model folder.

python plain_vllm.py FOLDER IDS.json OUT.json DTYPE [ADAPTER [IMAGE ...]]

The ids have one placeholder for each image; the output has as many values for it as vLLM made tokens. Three parts are
Colograd's code: layers that vLLM computes wrongly on a CPU (see `building`), embeddings that vLLM leaves out of Gemma
3n's text, and attention to images in both directions for Gemma 3 and the large Gemma 4.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def mended() -> contextlib.AbstractContextManager[None]:
    """Correct vLLM's layers for CPUs; return the context for building a text engine."""
    from colograd.engine.building import MODEL_BUILDER, build_gemma, mend_cpu_layers, patched

    mend_cpu_layers()
    return patched(MODEL_BUILDER, build_gemma)


def gemma() -> contextlib.AbstractContextManager[None]:
    """Find Gemma's classes; return the context for building its engine with images on a CPU."""
    from colograd.extensions.images.engine.bidirectional import both_ways
    from colograd.extensions.images.engine.features import find_gemma3

    find_gemma3()
    return both_ways()


def main(folder: str, ids: str, out: str, dtype: str, adapter: str = "", *images: str) -> None:
    from PIL import Image
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    if images:
        from colograd.extensions.images.towers import find_processors

        find_processors()  # transformers requires torchvision for Idefics3's
    tokens = json.loads(Path(ids).read_text())
    with gemma() if "gemma" in Path(folder, "config.json").read_text() and images else mended():
        llm = LLM(
            folder,
            dtype=dtype,
            enforce_eager=True,
            kv_cache_memory_bytes=2**26,
            max_model_len=256 if images else len(tokens) + 1,
            enable_lora=bool(adapter),
            limit_mm_per_prompt={"image": len(images), "video": 0} if images else {},
        )
    pictures = {"multi_modal_data": {"image": [Image.open(path) for path in images]}} if images else {}
    (output,) = llm.generate(
        [{"prompt_token_ids": tokens, **pictures}],
        SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
        lora_request=LoRARequest("adapter", 1, adapter) if adapter else None,
    )
    entries = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
    Path(out).write_text(json.dumps([entry[token].logprob for entry, token in entries]))


if __name__ == "__main__":
    main(*sys.argv[1:])
