"""`GRPOConfig`: how a run samples, scores, trains and reports. TRL 1.16's names and meanings wherever the thing is
the same.

Normalised once, in ``__post_init__``: ``gradient_accumulation_steps`` is folded into ``per_device_train_batch_size``
(which then means *completions per rank and optimizer step*), because micro-batches are cut by tokens, not by rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from transformers import TrainingArguments

from ..parallel.layout import RankLayout
from ..runtime import process
from .check import best_metric, check_launcher, check_values, fold_batch, token_budget
from .names import names_checked


@names_checked
@dataclass
class GRPOConfig(TrainingArguments):
    """Arguments of `GRPOTrainer`. The fields of `transformers.TrainingArguments` apply too.

    After construction ``prompts_per_step`` (global), ``per_device_train_batch_size`` (completions per rank and step)
    and ``steps_per_generation`` (optimizer steps whose prompts are sampled together) hold their final values; the
    trainer settles ``optim: auto`` and ``bf16`` when it knows the policy's dtype.

    Raises:
        ValueError: at construction, with the value, the rule and the remedy.
    """

    notes: ClassVar[Sequence[str]] = ()  # of the instance: what `names_checked` has to say of names that were given
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *TrainingArguments._VALID_DICT_FIELDS,
        "model_init_kwargs",
        "generation_kwargs",
        "chat_template_kwargs",
        "vllm_engine_kwargs",
    ]

    # -- defaults that differ from TrainingArguments (as in TRL, except `optim`)
    learning_rate: float = field(default=1e-6, metadata={"help": "Peak learning rate of AdamW."})
    logging_steps: float = field(default=10, metadata={"help": "Log every so many optimizer steps."})
    gradient_checkpointing: bool = field(
        default=True,
        metadata={"help": "Recompute activations in the backward pass: less memory, about 20 %% more time."},
    )
    bf16: bool | None = field(
        default=None,
        metadata={
            "help": "With `dtype: float32`, run the forward under bfloat16 autocast: on unless set to false, as in "
            "TRL. With the default bfloat16 policy there is nothing to cast and the value has no effect."
        },
    )
    remove_unused_columns: bool | None = field(
        default=False,
        metadata={"help": "Leave the reward functions the column `prompt` alone (and so an answer's column out)."},
    )
    optim: str = field(
        default="auto",
        metadata={
            "help": "`auto`: `adamw_split` for a bfloat16 policy, `adamw_torch` otherwise. `adamw_split`: AdamW on "
            "an exact float32 master kept as the bfloat16 parameter and a 16-bit remainder; "
            "`optim_args: compiled=true` (or `false`) makes it one compiled pass, the default on a GPU. Or any "
            "optimizer name of transformers."
        },
    )

    # -- the model
    model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Keyword arguments of `from_pretrained`, when the model is given by name."}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Allow code that comes with a model."})
    disable_dropout: bool = field(default=False, metadata={"help": "Set every dropout probability to 0."})

    # -- prompts and groups
    num_generations: int | None = field(default=8, metadata={"help": "G: completions per prompt; at least 2."})
    prompts_per_step: int | None = field(
        default=None,
        metadata={
            "help": "Prompts (groups) per optimizer step over all ranks, in place of TRL's product "
            "`per_device_train_batch_size * gradient_accumulation_steps * ranks / num_generations`."
        },
    )
    steps_per_generation: int | None = field(
        default=None,
        metadata={
            "help": "TRL's meaning: batches of `per_device_train_batch_size` sampled together; default "
            "`gradient_accumulation_steps`, that is one optimizer step per generation. A divisor of it is that too: "
            "what one step trains on is sampled by the same weights, so it is sampled together."
        },
    )
    generation_batch_size: int | None = field(
        default=None, metadata={"help": "TRL's alternative to `steps_per_generation`: completions sampled together."}
    )
    num_iterations: int = field(default=1, metadata={"help": "Times each generation's batches are trained on."})
    shuffle_dataset: bool | None = field(default=True, metadata={"help": "Shuffle the prompts, anew in each epoch."})
    max_prompt_tokens: int | None = field(
        default=None,
        metadata={"help": "Longest prompt; default: the engine's context less `max_completion_length`."},
    )
    overlong_prompts: str = field(
        default="drop", metadata={"help": "Prompts over the limit: `drop` (counted, said once) or `error`."}
    )
    chat_template_path: str | None = field(
        default=None,
        metadata={"help": "A file with a chat template to use in place of the tokenizer's; saved with the model."},
    )
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Keyword arguments of the chat template."}
    )

    # -- sampling
    max_completion_length: int | None = field(default=512, metadata={"help": "Tokens a completion may have."})
    temperature: float = field(default=1.0, metadata={"help": "Sampling temperature; the loss uses the same."})
    top_p: float = field(default=1.0, metadata={"help": "Nucleus sampling; 1.0 is off."})
    top_k: int = field(default=0, metadata={"help": "Top-k sampling; 0 is off."})
    min_p: float | None = field(default=None, metadata={"help": "Minimum probability relative to the top token's."})
    repetition_penalty: float = field(default=1.0, metadata={"help": "Penalty on tokens already present; 1.0 is off."})
    generation_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "More `vllm.SamplingParams`, such as `stop`, `stop_token_ids`, `bad_words` or `structured_outputs` "
            "(a mapping: `{json: <schema>}`, `{regex: ...}`, `{choice: [...]}`)."
        },
    )

    # -- evaluation
    num_generations_eval: int | None = field(
        default=None,
        metadata={
            "help": "Completions per prompt in `evaluate`; default `num_generations`, or 1 where evaluation is greedy."
        },
    )
    temperature_eval: float | None = field(
        default=None, metadata={"help": "Temperature in `evaluate`; default `temperature`, 0 is greedy."}
    )
    max_completion_length_eval: int | None = field(
        default=None, metadata={"help": "Tokens a completion may have in `evaluate`; default `max_completion_length`."}
    )

    pass_threshold_eval: float = field(
        default=1.0, metadata={"help": "Weighted reward from which a completion counts as a pass in `eval_pass@k`."}
    )
    loss_eval: bool = field(
        default=False,
        metadata={
            "help": "Run the policy's forward on what `evaluate` sampled, for `eval_loss`, the entropy and TRL's other "
            "metrics of the loss. TRL always does."
        },
    )

    # -- the engine
    use_vllm: bool = field(default=True, metadata={"help": "Kept for TRL's files: generation always runs in vLLM."})
    vllm_mode: str = field(default="colocate", metadata={"help": "Kept for TRL's files: always `colocate`."})
    vllm_gpu_memory_utilization: float | None = field(
        default=None,
        metadata={
            "help": "Share of a GPU's memory for the engine: its weights, its activations and the KV cache. Unset, the "
            "KV cache is planned: what policy, gradients, optimizer and a micro-batch leave, up to what one generation "
            "can use (TRL takes 0.3 of the GPU, whatever the model)."
        },
    )
    vllm_max_model_length: int | None = field(
        default=None,
        metadata={"help": "The engine's context in tokens; default: the model's, or what is needed if less."},
    )
    vllm_model_impl: str = field(
        default="auto",
        metadata={
            "help": "`vllm`: its own implementation of the model; `transformers`: that of transformers, in vLLM; "
            "`auto`: its own where it has one (TRL's default, `vllm`, is an error where it has none)."
        },
    )
    vllm_tensor_parallel_size: int = field(
        default=1, metadata={"help": "Ranks that share one engine. Only 1 in this version."}
    )
    vllm_enable_sleep_mode: bool = field(
        default=False,
        metadata={
            "help": "On a GPU, give the KV cache's memory back while the policy trains. The engine's weights stay (TRL "
            "moves or discards them too). Does nothing on a CPU."
        },
    )
    offload_optimizer: bool = field(
        default=False,
        metadata={
            "help": "On a GPU, keep the optimizer's state in pinned host memory while the engine samples. Does nothing "
            "on a CPU."
        },
    )
    vllm_structured_outputs_regex: str | None = field(
        default=None, metadata={"help": "A regular expression that every completion matches."}
    )
    vllm_engine_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Anything else for `vllm.LLM`, such as `max_num_seqs`, `enforce_eager`, `kv_cache_memory_bytes` "
            "or `dtype` (default: the policy's)."
        },
    )

    # -- rewards and advantages
    reward_weights: list[float] | None = field(
        default=None, metadata={"help": "One weight per reward function; default 1 each."}
    )
    reward_workers: int = field(
        default=0,
        metadata={
            "help": "Processes per rank that call reward functions while the engine decodes. 0: they run in the "
            "trainer's process, between two engine steps. `async` functions always run beside the engine."
        },
    )
    reward_timeout: float | None = field(
        default=None,
        metadata={
            "help": "Seconds that one call of a reward function may take. A late one is an abstention, and its worker "
            "is replaced; one that runs in the trainer's process ends the run."
        },
    )
    reward_on_error: str = field(
        default="raise",
        metadata={"help": "A reward function that fails ends the run (`raise`), or has no opinion (`abstain`)."},
    )
    max_tool_calling_iterations: int | None = field(
        default=None, metadata={"help": "Rounds of tool calls in one completion; default: as many as its tokens allow."}
    )
    tool_workers: int = field(
        default=0,
        metadata={
            "help": "Processes per rank that run tools. 0: each runs in a thread of the trainer's process. An "
            "environment's methods always do, and `async` tools on an event loop."
        },
    )
    tool_timeout: float | None = field(
        default=None,
        metadata={
            "help": "Seconds that one call of a tool may take. The answer to a late one is an error, which the model "
            "sees; its worker is replaced, its thread left to itself."
        },
    )
    reward_call: str = field(
        default="group",
        metadata={
            "help": "What one call of a reward function gets: the completions of a prompt (`group`), or all of the "
            "rank's generation (`all`), for functions that compare across prompts."
        },
    )
    dynamic_sampling: bool = field(
        default=False,
        metadata={
            "help": "Draw further prompts until a step has its number of groups with a reward difference (DAPO). "
            "Reward metrics are of all that was sampled."
        },
    )
    dynamic_sampling_max_rounds: int = field(
        default=10,
        metadata={"help": "How often further prompts are drawn at most; then the step trains on fewer groups."},
    )
    scale_rewards: str = field(
        default="group",
        metadata={
            "help": "Divide advantages by the standard deviation of the group's rewards (`group`, or TRL's `true`), of "
            "those of all groups of the step on all ranks (`batch`), or not at all (`none`, `false`)."
        },
    )
    multi_objective_aggregation: str = field(
        default="sum_then_normalize",
        metadata={
            "help": "Several reward functions: sum the weighted rewards, then normalise (`sum_then_normalize`); or "
            "normalise each function's in the group, sum, and scale over the step (`normalize_then_sum`, GDPO), where "
            "`scale_rewards` has no part, as in TRL."
        },
    )
    advantage_baseline: str = field(
        default="mean",
        metadata={
            "help": "What a completion is compared with: the `mean` of its group, or of the others in it "
            "(`leave_one_out`, RLOO)."
        },
    )
    mask_truncated_completions: bool = field(
        default=False, metadata={"help": "Leave completions that hit the token limit out of the loss."}
    )

    # -- the objective
    loss_type: str = field(
        default="dapo",
        metadata={
            "help": "`dapo`, `grpo`, `bnpo`, `dr_grpo`, `luspo`, `cispo`, `sapo`, `vespo`, or the import path of a "
            "class of your own; see docs/losses.md."
        },
    )
    importance_sampling_level: str = field(
        default="token",
        metadata={"help": "The importance ratio of each `token`, or its mean over the `sequence` (GSPO)."},
    )
    epsilon: float = field(default=0.2, metadata={"help": "Lower clip range of the importance ratio."})
    epsilon_high: float | None = field(
        default=None,
        metadata={
            "help": "Upper clip range; default `epsilon`. Of `cispo`: the bound of the ratio itself (5.0 is usual)."
        },
    )
    delta: float | None = field(default=None, metadata={"help": "Upper bound of the ratio in two-sided clipping."})
    sapo_temperature_pos: float = field(
        default=1.0, metadata={"help": "`sapo`: how fast the gate closes, for positive advantages."}
    )
    sapo_temperature_neg: float = field(default=1.05, metadata={"help": "`sapo`: the same, for the others."})
    vespo_k_pos: float = field(
        default=2.0, metadata={"help": "`vespo`: how much small ratios are weighted down, for advantages from 0 up."}
    )
    vespo_lambda_pos: float = field(default=3.0, metadata={"help": "`vespo`: how much large ratios are, for the same."})
    vespo_k_neg: float = field(default=3.0, metadata={"help": "`vespo`: as `vespo_k_pos`, for negative advantages."})
    vespo_lambda_neg: float = field(
        default=2.0, metadata={"help": "`vespo`: as `vespo_lambda_pos`, for negative advantages."}
    )
    beta: float = field(
        default=0.0, metadata={"help": "KL coefficient; 0: no KL term and no reference model. See docs/reference.md."}
    )
    use_bias_correction_kl: bool = field(
        default=True, metadata={"help": "Multiply the KL term by the importance ratio: its gradient is then unbiased."}
    )
    top_entropy_quantile: float = field(
        default=1.0,
        metadata={
            "help": "Share of the step's tokens, those of highest entropy, that the policy loss takes; 1 is all. A "
            "step of several micro-batches then needs one more forward."
        },
    )
    entropy_coef: float = field(
        default=0.0, metadata={"help": "Coefficient of the mean entropy of the step's tokens in the loss (a bonus)."}
    )
    use_adaptive_entropy: bool = field(
        default=False,
        metadata={
            "help": "Move `entropy_coef` after each step, up where the entropy is at most `entropy_target` and down "
            "elsewhere; it applies only where the step before was at or below the target."
        },
    )
    entropy_coef_min: float = field(default=0.0, metadata={"help": "Lower bound of the adaptive coefficient."})
    entropy_coef_max: float = field(default=1.0, metadata={"help": "Upper bound of the adaptive coefficient."})
    entropy_coef_delta: float = field(default=0.005, metadata={"help": "By how much it moves in a step."})
    entropy_target: float = field(
        default=0.2, metadata={"help": "Mean entropy of a token, in nats, below which the adaptive bonus acts."}
    )
    off_policy_mask_threshold: float | None = field(
        default=None,
        metadata={
            "help": "Leave out completions with a negative advantage whose mean log sampler - log policy probability "
            "is above this (DeepSeek-V3.2); 0.5, say."
        },
    )
    vllm_importance_sampling_correction: bool = field(
        default=True, metadata={"help": "Weigh the loss by trainer over sampler probability, to undo their mismatch."}
    )
    vllm_importance_sampling_mode: str = field(
        default="sequence_mask",
        metadata={"help": "`token_truncate`, `token_mask`, `sequence_truncate` or `sequence_mask`, as in TRL."},
    )
    vllm_importance_sampling_clip_max: float | None = field(
        default=3.0, metadata={"help": "Upper bound of that ratio."}
    )
    vllm_importance_sampling_clip_min: float | None = field(
        default=None, metadata={"help": "Lower bound of that ratio."}
    )

    # -- the reference model, where `beta` isn't 0
    sync_ref_model: bool = field(
        default=False,
        metadata={"help": "Mix the policy into the reference model every `ref_model_sync_steps` steps (TR-DPO)."},
    )
    ref_model_mixup_alpha: float = field(
        default=0.6, metadata={"help": "Share of the policy in that mixture; 1 replaces the reference."}
    )
    ref_model_sync_steps: int = field(default=512, metadata={"help": "Optimizer steps between two mixtures."})
    offload_reference: bool = field(
        default=False,
        metadata={
            "help": "On a GPU, keep the reference model in pinned host memory but while its log-probabilities are "
            "computed. Does nothing on a CPU, nor for LoRA, which has no second model."
        },
    )

    # -- the training path
    max_tokens_per_microbatch: int | str | None = field(
        default="auto",
        metadata={
            "help": "Tokens in one forward and backward. `auto`: on a GPU measured before the first step, on a CPU "
            "4096. It is halved for the rest of the run where memory runs out; the update doesn't depend on it."
        },
    )
    balance_ranks: bool = field(
        default=True,
        metadata={
            "help": "After scoring, move groups (their token ids) from the rank whose training would take longest to "
            "others, where that shortens the step by more than a tenth. The update is the same up to rounding."
        },
    )
    weights: str = field(
        default="auto",
        metadata={
            "help": "How the engine gets new weights: `shared` (the policy's parameters are views of the engine's), "
            "`copied` (one pass over the bytes), `adapter` (LoRA: the adapter's tensors only) or `auto` (shared where "
            "that can be had; adapter for LoRA where vLLM serves it, else copied and merged on the way)."
        },
    )

    # -- people
    log_completions: bool = field(
        default=False,
        metadata={
            "help": "Write every completion to `completions/completions_<step>.parquet` (`colograd show` prints it), "
            "print a sample now and then, and send that step's to wandb or trackio. Of an evaluation too."
        },
    )
    log_completions_steps: int | None = field(
        default=None, metadata={"help": "Steps between two tables, printed and sent; default `logging_steps`."}
    )
    num_completions_to_print: int | None = field(default=None, metadata={"help": "Rows of the table; default all."})
    log_completions_hub_repo: str | None = field(
        default=None,
        metadata={"help": "A dataset on the Hub to which the files of `log_completions` go, every two minutes."},
    )
    log_unique_prompts: bool = field(default=False, metadata={"help": "Show and send one completion per prompt only."})
    verbose: bool = field(default=False, metadata={"help": "Let vLLM and transformers log as they like."})

    def __post_init__(self) -> None:
        check_launcher()
        optim, self.optim = self.optim, "adamw_torch"  # transformers checks names and doesn't know ours
        if not torch.accelerator.is_available():
            self.use_cpu = True  # ranks on a CPU wouldn't find each other
        autocast, self.bf16 = self.bf16, False  # likewise: what it means depends on the policy's dtype
        self.metric_for_best_model = best_metric(self)
        super().__post_init__()
        self.optim, self.bf16 = optim, autocast
        spelt: dict[Any, str] = {"true": "group", "false": "none"}  # TRL's, on the command line too
        self.scale_rewards = spelt.get(str(self.scale_rewards).lower(), self.scale_rewards)
        self.epsilon_high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        self.max_tokens_per_microbatch = token_budget(self.max_tokens_per_microbatch, self.on_cpu)
        self.logging_nan_inf_filter = False  # a NaN loss must be seen
        given: dict[str, Any] | None = getattr(self, "gradient_checkpointing_kwargs", None)
        self.gradient_checkpointing_kwargs = {"use_reentrant": False, **(given or {})}
        check_values(self)
        fold_batch(self)

    def settle_precision(self, dtype: torch.dtype) -> None:
        """Resolve ``optim`` and ``bf16``, once the policy is loaded and its dtype known."""
        if dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"The policy's dtype is {str(dtype).removeprefix('torch.')}, but policies train in bfloat16 or "
                "float32: set dtype, or convert the model."
            )
        if self.optim == "auto":
            self.optim = "adamw_split" if dtype == torch.bfloat16 else "adamw_torch"
        self.bf16 = self.bf16 is not False and dtype == torch.float32  # None: on, as in TRL
        self.mixed_precision = "bf16" if self.bf16 else "no"

    @property
    def policy_dtype(self) -> str:
        """`bfloat16`, `float32` or `auto`: what the user asked for. Where nothing was said: `bfloat16`, or TRL's
        `float32` for an optimizer that was named and keeps no float32 master of bfloat16 weights."""
        kwargs: dict[str, Any] = self.model_init_kwargs or {}  # type: ignore[assignment]
        given = kwargs["dtype"] if kwargs.get("dtype") is not None else kwargs.get("torch_dtype")  # its old name
        default = "bfloat16" if self.optim in ("auto", "adamw_split") else "float32"
        return default if given is None else str(given).removeprefix("torch.")

    @property
    def groups_per_rank(self) -> int:
        """Groups of one optimizer step on one rank."""
        return self.per_device_train_batch_size // self.num_generations

    @property
    def round_length(self) -> int:
        """Optimizer steps between two generations."""
        return self.steps_per_generation * self.num_iterations  # type: ignore[operator]

    @property
    def layout(self) -> RankLayout:
        """This rank's place among the others."""
        return RankLayout(
            self.process_index, self.world_size, self.vllm_tensor_parallel_size, process.local_world_size()
        )

    @property
    def on_cpu(self) -> bool:
        """Whether the policy trains on the CPU."""
        return bool(self.device.type == "cpu")

    def torch_dtype(self) -> torch.dtype | str:
        """The dtype argument for `from_pretrained`.

        Raises:
            ValueError: there is no such dtype.
        """
        found = "auto" if self.policy_dtype == "auto" else getattr(torch, self.policy_dtype, None)
        if not isinstance(found, str | torch.dtype):
            raise ValueError(f"dtype {self.policy_dtype!r} isn't one: choose bfloat16, float32 or auto.")
        return found

    def eval_generations(self) -> int:
        """Completions per prompt in `evaluate`."""
        greedy = self.temperature_eval == 0
        return int(self.num_generations_eval or (1 if greedy else self.num_generations) or 1)
