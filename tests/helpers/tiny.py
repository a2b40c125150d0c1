"""A model and a task that are small enough for a test, and real enough for vLLM.

Reward workers import this module, so it imports torch and datasets inside functions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import launching

from colograd.runtime import process

if TYPE_CHECKING:
    import torch
    from datasets import Dataset

PATIENCE = 1000  # A test that takes more seconds hangs.

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
# ... and with tools: calls and answers are shown, and every turn ends with the end token.
TOOL_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer() -> Any:
    """Make a tokenizer of bytes, an end token and a padding token: 258 entries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate([*alphabet, "<end>", "<pad>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(
    folder: Path,
    family: str = "llama",
    tied: bool = True,
    layers: int = 2,
    context: int = 256,
    heads: int = 2,
    keys: int = 1,
    width: int = 64,
) -> Path:
    """Save a random model with head size 32, which vLLM's CPU attention takes."""
    import torch
    import transformers as hf

    tokenizer = make_tokenizer()
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    torch.manual_seed(0)
    if family == "llama":
        model: Any = hf.LlamaForCausalLM(hf.LlamaConfig(head_dim=32, **shape))
    elif family == "qwen2":
        model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**shape))
    elif family == "qwen3":
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(head_dim=32, **shape))
    elif family == "lfm2":
        blocks = {"layer_types": ["conv", "full_attention"] * (layers // 2), "conv_dim": 64, "block_dim": 64}
        model = hf.Lfm2ForCausalLM(hf.Lfm2Config(block_auto_adjust_ff_dim=False, **blocks, **shape))
    elif family in EXPERTS:
        model = EXPERTS[family](shape)
    else:
        assert family == "gemma3", family
        window = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * (layers // 2)}
        model = hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(head_dim=32, query_pre_attn_scalar=32, **window, **shape))
    with torch.no_grad():  # With the usual 0.02 samples wouldn't depend on the weights.
        for parameter in model.parameters():
            parameter.mul_(3.0) if parameter.dim() >= 2 else parameter.add_(torch.rand_like(parameter) * 0.1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def head_only(weight: torch.Tensor, bias: torch.Tensor, scale: float, softcap: float) -> Any:
    """Make a head, and the configuration of its logits."""
    text = SimpleNamespace(logits_scaling=1 / scale, final_logit_softcapping=softcap)
    head, config = SimpleNamespace(weight=weight, bias=bias), SimpleNamespace(get_text_config=lambda: text)
    return SimpleNamespace(config=config, get_output_embeddings=lambda: head)


def _qwen3_moe(shape: dict[str, Any]) -> Any:
    """Qwen3 with experts in all layers but the first."""
    import transformers as hf

    routing = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]}
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(head_dim=32, **routing, **shape))


def _mixtral(shape: dict[str, Any]) -> Any:
    import transformers as hf

    routing = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    return hf.MixtralForCausalLM(hf.MixtralConfig(head_dim=32, **routing, **shape))


def _glm4_moe(shape: dict[str, Any]) -> Any:
    """GLM 4 with sigmoid scores, an untrained correction, a shared expert, and a first layer without experts."""
    import transformers as hf

    routing = {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
        "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "first_k_dense_replace": 1,
    }  # fmt: skip
    model = hf.Glm4MoeForCausalLM(hf.Glm4MoeConfig(head_dim=32, partial_rotary_factor=0.5, **routing, **shape))
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.uniform_(-0.1, 0.1)
    return model


def _gpt_oss(shape: dict[str, Any]) -> Any:
    """GPT-OSS with attention sinks, windows in every other layer, and biases in the experts."""
    import transformers as hf

    routing = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 128}
    return hf.GptOssForCausalLM(hf.GptOssConfig(head_dim=32, **routing, **shape))


def _qwen2_moe(shape: dict[str, Any]) -> Any:
    """Qwen2 with a gated shared expert."""
    import transformers as hf

    routing = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return hf.Qwen2MoeForCausalLM(hf.Qwen2MoeConfig(shared_expert_intermediate_size=64, **routing, **shape))


def _olmoe(shape: dict[str, Any]) -> Any:
    import transformers as hf

    return hf.OlmoeForCausalLM(hf.OlmoeConfig(num_experts=4, num_experts_per_tok=2, **shape))


EXPERTS = {
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "qwen2_moe": _qwen2_moe,
    "olmoe": _olmoe,
}


def prompts(size: int = 16) -> Dataset:
    """Make conversations of different lengths, with a column for the reward."""
    from datasets import Dataset

    return Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": f"{'count ' * (i % 3)}{i}"}], "answer": chr(97 + i % 26)}
            for i in range(size)
        ]
    )


def vowels(completions: list[Any], **kwargs: Any) -> list[float]:
    """Return the share of bytes below 'm', which differs between random completions."""
    texts = [c[0]["content"] if isinstance(c, list) else c for c in completions]
    return [sum(ord(char) % 7 for char in text) / (6 * max(len(text), 1)) for text in texts]


def small_letters(completions: list[Any], **kwargs: Any) -> list[float]:
    """Return the share of a completion's 16 places that hold a small letter: about a tenth at random."""
    return [sum("a" <= char <= "z" for char in completion[0]["content"]) / 16 for completion in completions]


def config(output_dir: str | Path, **changes: Any) -> Any:
    """Make a GRPOConfig for four steps of float32 training on two threads."""
    from colograd import GRPOConfig

    settings: dict[str, Any] = {
        "output_dir": str(output_dir),
        "model_init_kwargs": {"dtype": "float32"},
        "bf16": False,
        "num_generations": 4,
        "prompts_per_step": 4,
        "max_completion_length": 12,
        "learning_rate": 1e-3,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 7,
    }
    return GRPOConfig(**(settings | changes))


def trainer_arguments(**sources: Any) -> Any:
    """Make the arguments of a trainer that choose a rollout source."""
    from colograd.rollout.features import SOURCES, TrainerArguments

    given = dict.fromkeys(TrainerArguments.__dataclass_fields__) | {"replaced": frozenset(), "samples": True}
    return TrainerArguments(**given | {"sources": dict.fromkeys(SOURCES) | sources})  # type: ignore[arg-type]


def optimizer_state(checkpoint: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Read the flat optimizer state by parameter name, of a run without sharding."""
    from safetensors.torch import load_file

    state: dict[str, dict[str, torch.Tensor]] = {}
    for entry, value in load_file(checkpoint / "optimizer-00000-of-00001.safetensors").items():
        name, _, key = entry.rsplit("|", 2)
        state.setdefault(name, {})[key] = value
    return state


# One sequence at a time: the last bits of an engine's log-probabilities depend on the other sequences of a batch. Where
# a part of a round is sampled after a resume, only this gives the bits of the whole round.
ONE_BY_ONE = {"vllm_engine_kwargs": {"max_num_seqs": 1}}


# for `carry_over`: an eighth of the tokens ends a completion
CARRYING: dict[str, Any] = {
    "carry_over": 0.6, "generation_kwargs": {"stop_token_ids": [*range(3, 256, 8)]}, "max_completion_length": 48,
    "max_steps": 6, "save_strategy": "steps", "save_steps": 2, "journal": "keep", "learning_rate": 3e-3,
    "vllm_importance_sampling_mode": "token_truncate",
}  # fmt: skip


def clean_environment() -> dict[str, str]:
    """Environment of a subprocess without the rank variables that an engine in this process may have set."""
    drop = (
        *process.RANK_VARIABLES,
        process.RANK_OF_ONE,
        "COLOGRAD_SINGLE_PROCESS",
        "OMP_NUM_THREADS",
        launching.ADDRESS,
    )
    return {name: value for name, value in os.environ.items() if name not in drop}


def remembered_groups(trainer: Any) -> list[Any]:
    """Return a list that gets the groups that a trainer generates."""
    seen: list[Any] = []
    generate = trainer.generate

    def remembering(prompts: Any) -> Iterator[Any]:
        for group in generate(prompts):
            seen.append(group)
            yield group

    trainer.generate = remembering
    return seen


def recipe(model: Any, **changes: Any) -> dict[str, Any]:
    """Make a recipe for a tiny model, which is read in the folder of this file."""
    found = {
        "model_name_or_path": str(model),
        "dtype": "float32",
        "bf16": False,
        "dataset_name": "tiny:prompts",
        "reward_funcs": ["tiny:vowels"],
        "num_generations": 4,
        "prompts_per_step": 4,
        "max_completion_length": 12,
        "max_steps": 2,
        "gradient_checkpointing": False,
    }
    return found | changes
