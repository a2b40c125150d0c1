"""Teacher model of on-policy distillation: loading, checks, and the teacher's values for packed rows.

If the teacher is an adapter of the policy's base model, the policy's model may run with the adapter's values (see
`_values_for`). Then no second model is loaded."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from ...batch import TEACHER, PackedRow
from ...config import GRPOConfig
from ...policy.loading import Policy, from_name, outline, to_pack
from ...policy.logprobs import PolicyForward, evaluation_mode, products_in_float32
from ...policy.lora import adapter_folder, packed_weights, unwrap
from ...policy.row_proof import choose_rows
from ...policy.second_models import FrozenModel, Kind, offloads, own_logprobs, prepared, values_in_place
from ...policy.supported import Wanted, check_installed, features
from ...runtime import cpu_products, registry
from .head import TeacherHead, label_states, label_top_tokens

# fields of PEFT's configuration that set the scale of the adapter's product
SCALE = ("lora_alpha", "r", "use_rslora", "use_dora", "alpha_pattern", "rank_pattern")


class Teacher(FrozenModel):
    of_policy = False

    def __init__(self, config: GRPOConfig, model: Any, offload: bool, head: TeacherHead | None = None) -> None:
        super().__init__(model, config.device, offload)
        self.name, self.head, self.top = str(config.teacher_model_name_or_path), head, config.distillation_top_k

    def describe(self) -> str:
        dtype, packed = str(self.model.dtype).removeprefix("torch."), len(packed_weights(unwrap(self.model)))
        also = f", {packed} matrices quantised" if packed else ""
        size = f"{unwrap(self.model).num_parameters() / 1e6:,.0f} M parameters, {dtype}{also}"
        return f"teacher: {self.name}, {size}, {self.where()}"


class OtherAdapter(Teacher):
    of_policy = True

    def __init__(self, config: GRPOConfig, model: Any, values: dict[str, torch.Tensor]) -> None:
        super().__init__(config, model, False, TeacherHead.of(unwrap(model)))
        parameters = dict(model.named_parameters())
        self.values = [(parameters[key], value.to(parameters[key])) for key, value in values.items()]

    def describe(self) -> str:
        nbytes = sum(value.nbytes for _, value in self.values)
        return f"teacher: the policy's base with the adapter {self.name}, {nbytes / 2**20:,.1f} MiB"

    @contextmanager
    def present(self) -> Iterator[Any]:
        with values_in_place(self.values), evaluation_mode(self.model):
            yield self.model


class _Source:
    def __init__(self, config: GRPOConfig, policy: Policy) -> None:
        self.name = str(config.teacher_model_name_or_path)
        arguments: dict[str, Any] = dict(config.teacher_model_init_kwargs or {})  # type: ignore[arg-type]
        if arguments.get("dtype") is None and arguments.get("torch_dtype") is None:
            arguments["dtype"] = str(policy.model.dtype).removeprefix("torch.")
        if config.teacher_model_revision is not None:
            arguments["revision"] = config.teacher_model_revision
        self.loading = copy.copy(config)
        self.loading.model_init_kwargs = arguments
        self.revision = arguments.get("revision")
        self.trust = bool(arguments.get("trust_remote_code", config.trust_remote_code))
        saved = adapter_folder(self.name)
        self.adapter = "" if saved is None else self.name
        # Folder or Hub id of the model without adapter.
        self.base = self.name if saved is None else str(saved.get("base_model_name_or_path") or "")
        if not self.base:
            raise ValueError(
                f"teacher_model_name_or_path {self.name!r} holds an adapter that doesn't name its base: set "
                "base_model_name_or_path in its adapter_config.json."
            )
        self.path = self.adapter or self.base

    @property
    def quantization(self) -> dict[str, Any] | None:
        """Quantization settings, as in a checkpoint's config.json. None: not quantized."""
        offers = (of(self.configuration(), self.loading, self.path) for of in registry.hooks("quantization"))
        return next(filter(None, offers), None)

    def configuration(self) -> Any:
        return AutoConfig.from_pretrained(self.base, revision=self.revision, trust_remote_code=self.trust)

    def outline(self) -> Any:
        dtype = self.loading.torch_dtype()
        if not isinstance(dtype, torch.dtype):
            dtype = getattr(self.configuration(), "dtype", None) or torch.float32
        return _outline(self.base, dtype, self.trust, self.revision)


_outline = functools.lru_cache(maxsize=8)(outline)


def configs_of(config: GRPOConfig) -> dict[str, GRPOConfig]:
    """Return a configuration per teacher. A teacher that is set without a name has the name ""."""
    configs = {name: copy.copy(config) if name else config for name in config.teachers}
    for name in filter(None, configs):
        configs[name].teacher_model_name_or_path = config.teachers[name]
    return configs


def check_teacher(policy: Policy, config: GRPOConfig, samples: bool = True) -> Policy:
    for each in configs_of(config).values():
        source = _Source(each, policy)
        model = source.outline()
        _check_tokens(source, model, policy)
        kind, own = model.config.model_type, unwrap(policy.model).config.model_type
        if policy.processor is not None and kind != own:
            raise ValueError(
                f"The policy is {own}, but teacher {source.name!r} is {kind}, a model type that may process images "
                f"differently: choose a teacher of the policy's model type, {own}."
            )
        is_packed = source.quantization is not None
        wanted = Wanted(source.configuration(), source.loading, source.path, has_adapter=True, has_images=False)
        check_installed(wanted)
        for feature in registry.hooks_of("quantized", "model_feature"):
            feature().check(wanted)
        if is_packed and config.offload_teacher:
            raise ValueError(
                "offload_teacher is true, but a quantised teacher can't leave its device: set offload_teacher: false, "
                "or remove the teacher's quantisation."
            )
        if config.cuts_weights and (is_packed or source.adapter) and not config.offload_teacher:
            what = "quantised" if is_packed else "an adapter on its base"
            raise ValueError(
                f"The teacher {source.name!r} is {what}, but `sharding: fsdp` divides only teachers without "
                "quantisation and adapter. Set sharding: gradients, or choose another teacher."
            )
    return policy


def check_teacher_context(config: GRPOConfig, policy: Policy, tokens: int) -> None:
    for each in configs_of(config).values():
        source = _Source(each, policy)
        most = getattr(source.outline().config.get_text_config(), "max_position_embeddings", None)
        if most is not None and tokens > most:
            raise ValueError(
                f"A prompt with its completion may have {tokens:,} tokens, but teacher {source.name!r} reads "
                f"at most {most:,} (max_position_embeddings): set vllm_max_model_length to {most} or less."
            )


def _check_tokens(source: _Source, model: Any, policy: Policy) -> None:
    """Raise a ValueError unless every token id of the policy means the same token in the teacher's tokenizer."""
    own, rows = (unwrap(model).get_output_embeddings().weight.shape[0] for model in (policy.model, model))
    if rows < own:
        raise ValueError(
            f"The teacher {source.name!r} has {rows:,} tokens in its vocabulary, and the policy {own:,}, so that the "
            "policy may sample a token that the teacher doesn't know: choose a teacher with at least as many tokens."
        )
    if source.base == policy.path and source.revision is None:
        return
    has_own = bool(source.adapter) and os.path.isfile(os.path.join(source.adapter, "tokenizer_config.json"))
    path, revision = (source.adapter, None) if has_own else (source.base, source.revision)
    try:
        theirs = AutoTokenizer.from_pretrained(path, revision=revision, trust_remote_code=source.trust).get_vocab()
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"The teacher {source.name!r} has no tokenizer that can be loaded ({reason}), so that its tokens can't be "
            "compared with the policy's: put the tokenizer's files into the teacher's folder."
        ) from None
    ours = policy.tokenizer.get_vocab()
    if others := [token for token, index in ours.items() if theirs.get(token) != index]:
        first = min(others, key=ours.__getitem__)
        there = "none" if first not in theirs else f"id {theirs[first]}"
        raise ValueError(
            f"The teacher {source.name!r} has another tokenizer than the policy. Of the policy's {len(ours):,} tokens, "
            f"{len(others):,} have another id or no id in the teacher's tokenizer. For example, {first!r} has id "
            f"{ours[first]} in the policy's tokenizer, and {there} in the teacher's. A teacher scores the policy's "
            "token ids: choose a teacher of the policy's model family."
        )


def teacher_bytes(config: GRPOConfig, policy: Policy) -> int:
    """Return the teacher's bytes on one device. If FSDP shards the weights, return the sum over all ranks' devices."""
    source = _Source(config, policy)
    copies = config.world_size if config.cuts_weights else 1  # With FSDP the plan divides the result by the ranks.
    if _values_for(source, policy) is not None:
        return os.path.getsize(os.path.join(source.adapter, "adapter_model.safetensors")) * copies
    found = source.outline()
    head = TeacherHead.of(found).nbytes if config.distillation_kl == "exact" else 0
    if offloads(config, config.offload_teacher):
        return head * copies
    packed = to_pack(found, source.quantization or {})
    whole = sum(packed.get(parameter, parameter.nbytes) for parameter in found.parameters())
    return whole + head * copies if config.cuts_weights else whole


def teacher_of(config: GRPOConfig, policy: Policy) -> Teacher | OtherAdapter:
    source = _Source(config, policy)
    if (values := _values_for(source, policy)) is not None:
        return OtherAdapter(config, policy.model, values)
    try:
        model: Any = from_name(source.base, source.loading, adapter=source.adapter)
    except ValueError as error:
        raise ValueError(f"teacher_model_name_or_path {source.name!r} can't be loaded: {error}") from None
    for feature in features():
        feature.on_load(model, source.base, source.loading)
    if source.adapter:
        import peft

        model = peft.PeftModel.from_pretrained(model, source.adapter)
    if config.on_cpu:
        cpu_products.take_over(model)
    if config.cast_lm_head_to_fp32:
        products_in_float32(model)
    model.requires_grad_(False).eval()
    if config.on_cpu:
        choose_rows(model)  # on a GPU, `choose_rows` runs later, when the teacher is there
    offload = offloads(config, config.offload_teacher)
    stays = offload or config.cuts_weights
    if stays:  # Offloading and FSDP move only parameters.
        for buffer in model.buffers():
            buffer.data = buffer.data.to(config.device)
    else:
        model.to(config.device)
    exact = config.distillation_kl == "exact"
    head = TeacherHead.of(unwrap(model), config.device if stays else None) if exact else None
    if offload:
        for parameter in model.parameters():
            parameter.data = parameter.data.pin_memory()
    return Teacher(config, model, offload, head)


def _values_for(source: _Source, policy: Policy) -> dict[str, torch.Tensor] | None:
    """Return the values of a teacher's adapter, by the policy's parameter names.

    None: the policy's model can't run as this teacher."""
    file = os.path.join(source.adapter, "adapter_model.safetensors")
    if policy.adapter is None or source.base != policy.path or not (source.adapter and os.path.isfile(file)):
        return None
    if source.loading.teacher_model_init_kwargs or source.revision is not None:
        return None
    name = policy.adapter.name
    saved, own = adapter_folder(source.adapter) or {}, policy.model.peft_config[name].to_dict()
    if any((saved.get(field) or None) != (own.get(field) or None) for field in SCALE):
        return None
    values = load_file(file)
    if source.loading.distillation_kl == "exact" and any("lm_head" in key for key in values):
        return None  # the exact KL reads the head while the policy's adapter is active, not the teacher's
    known = {key.replace(f".{name}.", "."): (key, p) for key, p in policy.model.named_parameters() if p.requires_grad}
    if values.keys() != known.keys() or any(values[key].shape != p.shape for key, (_, p) in known.items()):
        return None
    return {known[key][0]: value for key, value in values.items()}


UNTAUGHT = float("inf")  # marks tokens without a teacher's log-probability, because their prompt names no teacher


def _states(second: Any, model: Any, row: PackedRow, temperature: float) -> torch.Tensor:
    return PolicyForward(model, temperature)(prepared(row), label_states)[0].cpu()


def _top(second: Any, model: Any, row: PackedRow, temperature: float) -> torch.Tensor:
    return PolicyForward(model, temperature)(prepared(row), functools.partial(label_top_tokens, second.top))[0].cpu()


def _of_its_groups(
    field: str, read: Callable[..., torch.Tensor], second: Any, model: Any, row: PackedRow, temperature: float,
    name: str,
) -> torch.Tensor:  # fmt: skip
    """Compute a teacher's values for a packed row. A teacher with a ``name`` scores only prompts that name it."""
    if not name:
        return read(second, model, row, temperature)
    lengths = [sum(len(rollout.completion_ids) for rollout in part.rollouts) for part in row.parts]
    values = row.scores.get(field)
    values = torch.full((sum(lengths),), UNTAUGHT, device=row.device) if values is None else values.clone()
    places = [*zip(row.parts, values.split(lengths), strict=True)]
    if own := [(part, place) for part, place in places if str(part.example.get(TEACHER) or "") == name]:
        parts, places_of = zip(*own, strict=True)
        said = read(second, model, PackedRow(parts, row.mask_truncated, row.device), temperature)
        for place, of_part in zip(places_of, said.split([*map(len, places_of)]), strict=True):
            place.copy_(of_part)
    return values


LOGPROBS, STATES, TOP = (
    Kind(field, "teacher", teacher_of, teacher_bytes, functools.partial(_of_its_groups, field, read), configs_of)
    for field, read in (("teacher_logprobs", own_logprobs), ("teacher_states", _states), ("teacher_top", _top))
)
