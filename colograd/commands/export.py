"""``colograd export CHECKPOINT FOLDER``: an ordinary model folder from a checkpoint.

A checkpoint's weights are whole, however its run was sharded, and are copied. An adapter is merged into its base, and a
quantised base is dequantised.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..runtime import process

ADAPTER = "adapter_config.json"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the folder; the exit status."""
    parser = argparse.ArgumentParser(prog="colograd export", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=Path, help="a checkpoint-N, or a run's output_dir for its newest one")
    parser.add_argument("folder", type=Path, help="where the model goes; it must not be there yet")
    options = parser.parse_args(argv)
    process.quiet_logs(verbose=False)
    source, note = export(options.checkpoint, options.folder)
    print(f"exported {source} to {options.folder}{note and f' ({note})'}")
    return 0


def export(checkpoint: Path, folder: Path) -> tuple[Path, str]:
    """Write the model of a checkpoint, or of a run's newest checkpoint, into a new folder, whole or not at all.

    Returns:
        The checkpoint, and a note on the precision of a merge (empty: the weights were copied).

    Raises:
        ValueError: no checkpoint, a damaged one, or a folder that exists.
    """
    from ..checkpoint.folders import STATE, check, open_to_readers
    from ..checkpoint.search import find_resume

    newest = find_resume("auto", str(checkpoint))
    source = Path(newest) if newest else checkpoint
    if not (source / "trainer_state.json").is_file():
        raise ValueError(f"{checkpoint} is neither a checkpoint nor a run's folder with one in it.")
    if folder.exists():
        raise ValueError(f"{folder} is there already: name a folder that isn't.")
    check(source)
    aside = folder.with_name(f".{folder.name}.incomplete")
    shutil.rmtree(aside, ignore_errors=True)
    note = ""
    if (source / ADAPTER).is_file():
        note = _merge(source, aside)
    else:
        shutil.copytree(source, aside, ignore=shutil.ignore_patterns(*STATE))
    open_to_readers(aside)
    aside.rename(folder)
    return source, note


def _merge(source: Path, folder: Path) -> str:
    """Save the base with the adapter added, rounded once to the base's dtype, or to the dtype in which a quantised base
    was trained. Returns a note on this."""
    import torch
    import transformers as hf
    from peft import AutoPeftModelForCausalLM, PeftConfig, PeftModel

    from ..policy import images, quantized

    hf.utils.logging.disable_progress_bar()
    base = str(PeftConfig.from_pretrained(source).base_model_name_or_path)
    noted, base_config = quantized.beside(source), hf.AutoConfig.from_pretrained(base)
    seeing = images.takes_images(base_config)
    kind: Any = hf.AutoModelForImageTextToText if seeing else hf.AutoModelForCausalLM
    reader: Any = hf.AutoProcessor if seeing else hf.AutoTokenizer
    if seeing:
        images.find_processors()

    def adapted(dtype: torch.dtype, **given: Any) -> Any:
        if not seeing:
            return AutoPeftModelForCausalLM.from_pretrained(source, dtype=dtype, **given)
        return PeftModel.from_pretrained(kind.from_pretrained(base, dtype=dtype, **given), str(source))

    if noted is None:
        model, dtype = adapted(torch.float32), base_config.dtype
        merged, of_base = model.merge_and_unload().to(dtype), ""
    else:
        settings, dtype = noted
        packed = quantized.saved_in(base_config) is not None
        given = quantized.load_arguments(None if packed else settings, torch.device("cpu"))
        model = adapted(dtype, **given)
        merged, of_base = _dense(model, base_config, kind), f"the {quantized.name_of(settings)} base's values and "
    merged.save_pretrained(folder)
    reader.from_pretrained(source).save_pretrained(folder)
    name = str(dtype).removeprefix("torch.")
    return f"{of_base}the adapter, added in float32 and rounded once to {name}"


def _dense(adapted: Any, base_config: Any, kind: Any) -> Any:
    """The dense model, of transformers' class ``kind``, that a PeftModel on a quantised base computes, in its dtype."""
    import torch
    from transformers.core_model_loading import WeightRenaming

    from ..policy.images import has_tower
    from ..policy.lora import adapted_layers, base_name, trained_copies
    from ..policy.quantized_layers import packed_weights

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
    if has_tower(base_config):  # saved under the names that the base's files have, which vLLM knows
        found_by = getattr(adapted.get_base_model(), "_weight_conversions", None) or []
        model._weight_conversions = [each for each in found_by if isinstance(each, WeightRenaming)]
    return model
