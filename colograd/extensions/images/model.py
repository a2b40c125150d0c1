"""Vision-language models: checks at start, the processor, and a vision tower that is frozen or trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...config import GRPOConfig
from ...memory.shape import Lengths, Shape, kept_by_layers
from ...policy.supported import ModelFeature, Wanted
from ...policy.towers import TEXT_FIRST, has_tower, in_tower, reads_text_alone, takes_images
from .towers import find_processors, freeze_tower, see_both_ways


class Images(ModelFeature):
    def check(self, wanted: Wanted) -> None:
        model_config = wanted.model_config
        if not takes_images(model_config) or (model_config.model_type in TEXT_FIRST and not wanted.has_images):
            return
        kind, text = model_config.model_type, model_config.get_text_config()
        name = "mm_tokens_per_image" if hasattr(model_config, "mm_tokens_per_image") else "default_output_length"
        tokens = getattr(model_config, name, 0) or getattr(model_config.vision_config, name, 0)
        window = getattr(text, "sliding_window", None)
        if see_both_ways(model_config) and window and tokens > window:
            raise ValueError(
                f"{kind} has {name} {tokens}, more than its sliding_window, {window}. In vLLM the tokens of an image "
                "don't all attend to each other if the image has more tokens than the window. Choose a model with "
                "fewer tokens per image or a larger window."
            )
        given: dict[str, Any] = dict(wanted.config.vllm_engine_kwargs or {})  # type: ignore[arg-type]
        part = int(given.get("long_prefill_token_threshold") or 0)
        if see_both_ways(model_config) and 0 < part < tokens:
            raise ValueError(
                f"vllm_engine_kwargs has `long_prefill_token_threshold: {part}`, but an image of {kind} has {tokens} "
                f"tokens, which the engine must read in one step: set at least {tokens}, or remove this argument."
            )
        if getattr(text, "hidden_size_per_layer_input", None) and text.pad_token_id != 0:
            raise ValueError(
                f"{kind} has pad_token_id {text.pad_token_id}. Image tokens get this token's per-layer embeddings in "
                "transformers, but token 0's in vLLM: set pad_token_id to 0, or choose another model."
            )
        settings = {
            "torch_compile": wanted.config.torch_compile,
            "use_liger_kernel": wanted.config.use_liger_kernel,
            "vllm_engine_kwargs: {mm_processor_kwargs}": "mm_processor_kwargs" in given,
        }
        for name, is_set in settings.items():
            if is_set:
                raise ValueError(
                    f"{name} isn't available for vision-language models in this version ({kind}): remove it."
                )

    def processor(self, model: Any, path: str, given: Any, config: GRPOConfig) -> Any:
        if not takes_images(model.config) or reads_text_alone(model):
            if config.freeze_vision_tower:
                raise ValueError(
                    f"freeze_vision_tower is true, but a {type(model).__name__} reads no images in this run: set "
                    "freeze_vision_tower: false."
                )
            return None
        if config.freeze_vision_tower:
            freeze_tower(model)
        if hasattr(given, "image_processor"):
            return given
        from transformers import AutoProcessor

        find_processors()
        revision = (config.model_init_kwargs or {}).get("revision")  # type: ignore[union-attr]
        try:
            found = AutoProcessor.from_pretrained(path, revision=revision, trust_remote_code=config.trust_remote_code)
        except (OSError, ValueError, ImportError) as error:
            reason = " ".join(str(error).split())[:300]
            raise ValueError(
                f"The processor of {path!r} can't be loaded ({reason}). Processors that also read videos (Qwen's, "
                "Gemma 4's, SmolVLM2's) need torchvision, in the build that fits torch (see docs/guide/images.md). "
                "SmolVLM2's also needs num2words. If the folder has no processor, copy the processor's files from the "
                "base model."
            ) from None
        if not hasattr(found, "image_processor"):
            raise ValueError(f"{path!r} has no image processor: copy the base model's, or pass a processing_class.")
        return found

    def why_rows_stay_whole(self, model: Any) -> str:
        reads_images = takes_images(model.config) and not reads_text_alone(model)
        return f"{type(model).__name__} reads images" if reads_images else ""


@dataclass(frozen=True, slots=True)
class Tower:
    """Size of a trained vision tower, to estimate its activation memory."""

    shape: Shape
    patches: float  # patches per image token

    @classmethod
    def of(cls, model: Any) -> Tower | None:
        """Return the size of a model's trained vision tower, or None if the tower is frozen or missing."""
        config = model.config
        if not has_tower(config) or getattr(config, "vision_config", None) is None:
            return None
        if not any(parameter.requires_grad for name, parameter in model.named_parameters() if in_tower(name)):
            return None
        vision = config.vision_config

        def size(*names: str) -> int:  # a size's name differs between model families
            return next((int(found) for name in names if (found := getattr(vision, name, None))), 0)

        hidden, heads = size("hidden_size", "embed_dim"), size("num_attention_heads", "num_heads") or 1
        inner = size("intermediate_size") or 4 * hidden
        shape = Shape(size("num_hidden_layers", "depth"), hidden, inner, hidden, hidden, hidden // heads, 0)
        names = (vision, "spatial_merge_size"), (config, "spatial_merge_size"), (config, "scale_factor")
        merged = next((side for of, name in names if (side := getattr(of, name, None))), None)
        patches = 1.0
        if pooled := getattr(vision, "pooling_kernel_size", None) or merged:
            patches = float(pooled) ** 2
        elif ratio := getattr(config, "downsample_ratio", None):
            patches = float(ratio) ** -2
        elif tokens := getattr(config, "mm_tokens_per_image", None):
            patches = float((vision.image_size // vision.patch_size) ** 2 / tokens)
        return cls(shape, patches)

    def bytes(self, tokens: int, lengths: Lengths, itemsize: int, checkpointing: int) -> int:
        """Estimate the tower's activation bytes for a row, as if all prompt tokens were image tokens."""
        patches = self.patches * tokens * lengths.prompts_share(tokens)
        return int(patches * sum(kept_by_layers(self.shape, itemsize, checkpointing)))


tower_of = Tower.of
