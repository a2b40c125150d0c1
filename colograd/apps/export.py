"""``colograd export CHECKPOINT FOLDER`` writes a checkpoint's model into a new folder, without training state."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..runtime import process, registry

ADAPTER = "adapter_config.json"
WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json", ADAPTER,
)  # fmt: skip
RECORD = ("_*", ".*", "checkpoint-*", "completions", "report.html")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="colograd export", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("checkpoint", type=Path, help="a checkpoint-N, or a run's output_dir: its saved model, else its newest one")
    add("folder", type=Path, help="where the model goes; it must not be there yet")
    merging = "merge an adapter into its base, which is the default; --no-merge: the adapter's own files"
    add("--merge", action=argparse.BooleanOptionalAction, default=True, help=merging)
    add("--push", metavar="REPO", help="then bring the folder to this model on the Hub (NAME or ME/NAME)")
    add("--private", action="store_true", help="a model that --push makes on the Hub is a private one")
    options = parser.parse_args(argv)
    process.quiet_logs(verbose=False)
    import huggingface_hub as hub

    from ..checkpoint.folders import check

    folder, source = options.folder, Path(model_folder(str(options.checkpoint)) or options.checkpoint)
    if not (source / "trainer_state.json").is_file():
        raise ValueError(f"{options.checkpoint} has no checkpoint: give a checkpoint's folder, or a run that has one.")
    if folder.exists():
        raise ValueError(f"{folder} exists already: name a new folder.")
    check(source)
    if repo := options.push:  # The Hub may refuse the repository, so it is created before the export.
        with _on_the_hub(f"the model {repo!r} can't be made on the Hub"):
            repo = hub.create_repo(repo, private=options.private or None, exist_ok=True).repo_id
    note = export(source, folder, options.merge)
    print(f"exported {source} to {folder}{note and f' ({note})'}")
    if repo:
        with _on_the_hub(f"{folder} can't be pushed to {repo}"):
            print(f"pushed to {hub.upload_folder(repo_id=repo, folder_path=folder).repo_url}")
    return 0


def model_folder(folder: str) -> str | None:
    """Return the path of a folder's newest model: the folder itself, or its newest checkpoint. None: no model."""
    from ..checkpoint.folders import complete_steps
    from ..checkpoint.reading import STATE_FILE

    saved = any(os.path.isfile(os.path.join(folder, name)) for name in WEIGHTS)
    steps = complete_steps(folder)
    if saved and steps:  # If a finished run was resumed, its checkpoints may be newer than its saved model.
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
            saved = json.loads(Path(folder, STATE_FILE).read_text())["global_step"] >= max(steps)
    return folder if saved else os.path.join(folder, f"checkpoint-{max(steps)}") if steps else None


@contextlib.contextmanager
def _on_the_hub(problem: str) -> Iterator[None]:
    from httpx import HTTPError

    try:
        yield
    except (OSError, ValueError, HTTPError) as error:
        raise ValueError(
            f"{problem} ({type(error).__name__}: {' '.join(str(error).split())}). Pushing needs a connection "
            "and a token with write permission: run `hf auth login`, or set HF_TOKEN. Or remove --push, and push the "
            "exported folder later with `hf upload REPO FOLDER`."
        ) from None


def export(source: Path, folder: Path, merge: bool = True) -> str:
    """Write a checkpoint's model into a new folder, completely or not at all.

    Return a note on precision if an adapter was merged, else an empty text.
    """
    from ..checkpoint.folders import STATE, open_to_readers

    aside = folder.with_name(f".{folder.name}.incomplete")
    shutil.rmtree(aside, ignore_errors=True)
    note = ""
    if merge and (source / ADAPTER).is_file():
        note = _merge(source, aside)
    else:
        shutil.copytree(source, aside, ignore=shutil.ignore_patterns(*STATE, *RECORD))
    open_to_readers(aside)
    aside.rename(folder)
    return note


def _merge(source: Path, folder: Path) -> str:
    """Merge the adapter into its base (sums in float32, rounded once to the base's dtype), and write the model."""
    import torch
    import transformers as hf
    from peft import PeftConfig, PeftModel

    from ..policy import towers
    from ..policy.supported import BASE_QUANTIZATION

    hf.utils.logging.disable_progress_bar()
    saved = PeftConfig.from_pretrained(source)
    base: dict[str, Any] = {"revision": saved.revision, "pretrained_model_name_or_path": saved.base_model_name_or_path}
    base_config = hf.AutoConfig.from_pretrained(**base)
    seeing = towers.takes_images(base_config)
    kind: Any = hf.AutoModelForImageTextToText if seeing else hf.AutoModelForCausalLM
    has_processor = base_config.model_type not in towers.TEXT_FIRST or (source / hf.utils.PROCESSOR_NAME).is_file()
    reader: Any = hf.AutoProcessor if seeing and has_processor else hf.AutoTokenizer
    if seeing:
        registry.require("images", f"{base_config.model_type}, a model that reads images,", "export on a whole install")
        from ..extensions.images.towers import find_processors

        find_processors()

    def adapted(dtype: torch.dtype, **given: Any) -> Any:
        return PeftModel.from_pretrained(kind.from_pretrained(**base, dtype=dtype, **given), str(source))

    if not (source / BASE_QUANTIZATION).is_file():
        model, dtype = adapted(torch.float32), base_config.dtype
        merged, of_base = model.merge_and_unload().to(dtype), ""
    else:
        registry.require("quantized", f"{source}, an adapter on a quantised base,", "export on a whole install")
        from ..extensions.quantized import checkpoints as quantized

        noted = quantized.beside(source)
        assert noted is not None
        settings, dtype = noted
        packed = quantized.saved_in(base_config) is not None
        given = quantized.load_arguments(None if packed else settings, torch.device("cpu"))
        model = adapted(dtype, **given)
        merged, of_base = _dense(model, base_config, kind), f"the {quantized.name_of(settings)} base's values and "
    merged.save_pretrained(folder)
    reader.from_pretrained(source).save_pretrained(folder)
    return f"{of_base}the adapter, added in float32 and rounded once to {str(dtype).removeprefix('torch.')}"


def _dense(adapted: Any, base_config: Any, kind: Any) -> Any:
    """Convert a PeftModel on a quantised base to an unquantised model with the adapter merged.

    The new model's outputs equal the PeftModel's, up to rounding.
    """
    import torch
    from transformers.core_model_loading import WeightRenaming

    from ..policy.lora import adapted_layers, base_name, packed_weights, trained_copies
    from ..policy.towers import has_tower

    if hasattr(base_config, "quantization_config"):
        del base_config.quantization_config
    model: Any = kind.from_config(base_config, dtype=adapted.dtype)
    layers = {layer.parameter: layer for layer in adapted_layers(adapted)}
    packed, copies = packed_weights(adapted), dict(trained_copies(adapted))
    found = {base: name for name, _ in adapted.named_parameters() if (base := base_name(name)) is not None}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in layers:
                parameter.copy_(layers[name].merged())
            elif name in copies:
                parameter.copy_(copies[name])
            else:
                own = found[name]
                parameter.copy_(packed[own].values() if own in packed else adapted.get_parameter(own))
        for name, buffer in model.named_buffers():
            buffer.copy_(adapted.get_base_model().get_buffer(name))
    model.generation_config = adapted.get_base_model().generation_config
    if has_tower(base_config):  # Save a vision model's parameters under the base files' names, as vLLM needs.
        found_by = getattr(adapted.get_base_model(), "_weight_conversions", None) or []
        model._weight_conversions = [each for each in found_by if isinstance(each, WeightRenaming)]
    return model
