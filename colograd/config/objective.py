"""Settings of rewards, tools, agents, advantages, the loss and its terms, the KL reference and distillation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..runtime import registry
from .conflicts import DRAFTS, check_conflicts, value_of
from .knob import agents, distillation, knob, reference, tools
from .sampling import TRUNCATING, SamplingKnobs, shaping

SECONDS: dict[str, Any] = {"above": 0, "remedy": "leave it out for no limit"}


@dataclass
class RewardKnobs:
    """Settings of rewards, tools and agents."""

    reward_weights: list[float] | None = knob(None, "One weight per reward function; default 1 each.")
    reward_workers: int | None = knob(None, at_least=0)
    """Processes per rank that call reward functions while the engine decodes; `async` functions always run during
    decoding. 0: the trainer's process, between two engine steps. Unset: 0 on a CPU; on a GPU up to 4, for functions of
    modules only, because closures and functions of a script may keep state."""
    reward_timeout: float | None = knob(None, **SECONDS)
    """Seconds that one call of a reward function may take. A late call abstains and its worker is replaced; in the
    trainer's process it ends the run."""
    reward_on_error: str = knob("raise", one_of=("raise", "abstain"))
    """A failing reward function ends the run (`raise`) or abstains (`abstain`)."""
    reward_call: str = knob("group", one_of=("group", "all"))
    """Arguments of one call of a reward function: the completions of a prompt (`group`), or the rank's whole generation
    (`all`)."""
    tool_workers: int = tools(0, at_least=0)
    """Processes per rank that run tools. 0: threads of the trainer's process. Environments' methods always run in
    threads, `async` tools on an event loop."""
    tool_timeout: float | None = tools(None, **SECONDS)
    """Seconds that one call of a tool may take. The model reads a late call's answer as an error; its worker is
    replaced, or its thread abandoned."""
    max_tool_calling_iterations: int | None = tools(None, at_least=1)
    """Rounds of tool calls in one completion; default: limited by its tokens only."""
    main_thread_tools: list[str] | None = tools(None)
    """Names of tools, environment classes or factories that only work in the main thread (e.g. with `signal.alarm`):
    they run between two steps of the engine."""
    agent_timeout: float | None = agents(1800.0, **SECONDS)
    """Seconds that one session of an agent may take. A late command is killed; a late function's thread is
    abandoned."""
    agent_sessions: int | None = agents(None, at_least=1)
    """Sessions of an agent at once on a rank; default: as many as the engine decodes at once."""
    agent_requests: int = agents(256, "Requests of one session of an agent, at most.", at_least=1)
    agent_parallel: int = agents(64, "Open completions of one session of an agent, at most.", at_least=1)
    agent_sampling: str = agents("refuse", one_of=("refuse", "untrained"))
    """Requests of an agent with another temperature, top_p or the like would bias the update: answer HTTP 400
    (`refuse`), or answer without training on it (`untrained`)."""
    agent_on_error: str = agents("raise", one_of=("raise", "abstain"))
    """A session that raises, dies or is late: end the run (`raise`), or don't train on its group (`abstain`)."""
    agent_tool_parser: str | None = agents(None)
    """vLLM's parser of an agent's tool calls; default: from the chat template; empty: none."""
    agent_reasoning_parser: str | None = agents(None)
    """vLLM's parser of an agent's reasoning; default: from the chat template; empty: none."""


@dataclass
class AdvantageKnobs:
    """Settings of advantages."""

    dynamic_sampling: bool = knob(False, extension="dynamic_sampling")
    """Draw more prompts until a step has its number of groups with a reward difference (DAPO). Reward metrics cover all
    samples."""
    dynamic_sampling_max_rounds: int = knob(10, at_least=1, extension="dynamic_sampling")
    """Maximum number of further draws; then the step trains on fewer groups."""
    scale_rewards: str = knob(
        "group", one_of=("group", "batch", "batch_centered", "mean", "none"),
        spellings={"true": "group", "false": "none"},
    )  # fmt: skip
    """Divide advantages by the standard deviation of the group's rewards (`group`, or TRL's `true`), of the step's
    rewards (`batch`), of the step's rewards minus their group's mean (`batch_centered`), by the group's mean (`mean`,
    MaxRL), or by nothing (`none`, `false`); see docs/losses.md."""
    multi_objective_aggregation: str = knob("sum_then_normalize", one_of=("sum_then_normalize", "normalize_then_sum"))
    """Several reward functions: sum, then normalise (`sum_then_normalize`); or normalise each in the group, sum, and
    scale over the step (`normalize_then_sum`, GDPO), without `scale_rewards`, as in TRL."""
    advantage_baseline: str = knob("mean", one_of=("mean", "leave_one_out"))
    """Baseline of a completion: the `mean` of its group, or the mean of the other completions (`leave_one_out`,
    RLOO)."""
    mask_truncated_completions: bool = knob(False)
    """Leave completions that hit the token limit or were ended by `repetition_detection` out of the loss."""


LOSSES = ("dapo", "bnpo", "grpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo", "gmpo", "dppo")
POSITIVE: dict[str, Any] = {"above": 0, "remedy": "1.0 is usual"}
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask")


@dataclass
class ObjectiveKnobs(SamplingKnobs):
    """Settings of the loss."""

    loss_type: str = knob("dapo", one_of=LOSSES, or_path=True)
    """`dapo`, `grpo`, `bnpo`, `dr_grpo`, `luspo`, `cispo`, `sapo`, `vespo`, `gmpo`, `dppo`, or the import path of a
    class of your own; see docs/losses.md."""
    importance_sampling_level: str = knob("token", one_of=("token", "sequence"))
    """One importance ratio per `token`, or per `sequence`: the geometric mean over the completion (GSPO-token, with
    each token's own gradient and advantage)."""
    epsilon: float = knob(0.2, at_least=0)
    """Lower clip range of the importance ratio. `gmpo`: of its logarithm (0.4 is usual); `dppo`: of the probability."""
    epsilon_high: float | None = knob(None, at_least=0)
    """Upper clip range; default `epsilon`. `cispo`: the bound of the ratio (5.0 is usual)."""
    delta: float | None = knob(None, "Upper bound of the ratio in two-sided clipping.", at_least=0)
    sapo_temperature_pos: float = knob(1.0, **POSITIVE)
    """`sapo`: temperature of the gate for positive advantages; higher closes faster."""
    sapo_temperature_neg: float = knob(1.05, "`sapo`: the same for the other advantages.", **POSITIVE)
    vespo_k_pos: float = knob(2.0, at_least=0)
    """`vespo`: exponent that weights small ratios down, for advantages from 0 up."""
    vespo_lambda_pos: float = knob(3.0, at_least=0)
    """`vespo`: coefficient that weights large ratios down, for advantages from 0 up."""
    vespo_k_neg: float = knob(3.0, "`vespo`: as `vespo_k_pos`, for negative advantages.", at_least=0)
    vespo_lambda_neg: float = knob(2.0, "`vespo`: as `vespo_lambda_pos`, for negative advantages.", at_least=0)
    top_entropy_quantile: float = knob(1.0, at_least=0, at_most=1, remedy="1.0 turns it off")
    """Share of the step's tokens, from the highest entropy down, in the policy loss; 1: all. A step of several
    micro-batches needs one more forward."""
    entropy_coef: float = knob(0.0, "Coefficient of the mean entropy of the step's tokens in the loss (a bonus).")
    use_adaptive_entropy: bool = knob(False)
    """Raise `entropy_coef` after each step with an entropy of at most `entropy_target`, and lower it after the others.
    It applies only after steps at or below the target."""
    entropy_coef_min: float = knob(0.0, "Lower bound of the adaptive coefficient.")
    entropy_coef_max: float = knob(1.0, "Upper bound of the adaptive coefficient.")
    entropy_coef_delta: float = knob(0.005, "Change of the adaptive coefficient per step.", at_least=0)
    entropy_target: float = knob(0.2, "Mean entropy of a token, in nats, below which the adaptive bonus acts.")
    router_aux_loss_coef: float | None = knob(None, at_least=0)
    """Coefficient of a mixture of experts' load-balancing loss; default: the model's own (often 0.001)."""
    vllm_importance_sampling_correction: bool = knob(True)
    """Weigh the loss by trainer over sampler probability, to correct their mismatch."""
    vllm_importance_sampling_mode: str = knob("sequence_mask", one_of=CORRECTIONS)
    """`token_truncate`, `token_mask`, `sequence_truncate` or `sequence_mask`, as in TRL; or `geometric_mask`, which
    leaves out completions by the geometric mean of their tokens' ratios."""
    vllm_importance_sampling_clip_max: float | None = knob(3.0, "Upper bound of that ratio.")
    vllm_importance_sampling_clip_min: float | None = knob(None)
    """Lower bound of that ratio; default: none, or with `geometric_mask` 1 / the upper bound."""
    off_policy_mask_threshold: float | None = knob(None)
    """Leave out completions with a negative advantage and a mean log sampler - log policy probability above this
    (DeepSeek-V3.2), e.g. 0.5."""

    def _check_conflicts_and_bias(self) -> list[str]:
        """Turn off `vllm_importance_sampling_correction` if settings such as `top_p` would bias its ratios.

        The correction stays on if vLLM records which tokens `top_k`, `top_p` and `min_p` keep. Return log lines.
        """
        changes, drafts = shaping(vars(self)), value_of(self, DRAFTS) is not None
        names = ", ".join(f"{name} {value!r}" for name, value in changes.items())
        truncates, corrects = {*changes} <= {*TRUNCATING}, names and self.vllm_importance_sampling_correction
        # vLLM can record which tokens top_k, top_p and min_p keep. The trainer's softmax is then over these tokens, so
        # that the ratio of trainer to sampler probability is right.
        recorded = truncates and "top_k" in changes and not drafts and "kept_tokens" in registry.installed()
        biased = corrects and not recorded
        check_conflicts(self, {"the sampler's distribution": f"changed by {names}" if biased else ""})
        if not corrects:
            return []
        if recorded:
            return [
                f"config: {names} truncates the sampler's distribution: the tokens that are left are recorded, and the "
                "loss is of the distribution over them"
            ]
        self.vllm_importance_sampling_correction = False
        reason = ", as drafts don't tell which tokens are left" if drafts else ""
        if truncates and not drafts:
            reason = " (with a top_k, of 1024 say, which bounds what is recorded, it can stay)"
        return [
            f"config: {names} changes the distribution that the sampler draws from, which would bias its correction: "
            f"vllm_importance_sampling_correction is off{reason}"
        ]

    @property
    def replays_truncation(self) -> bool:
        """Whether the softmax of policy, reference and teacher covers only the tokens that the sampler could draw.

        vLLM records these tokens. `top_k` limits their number; `top_p` and `min_p` may exclude more tokens.
        """
        return self.vllm_importance_sampling_correction and bool(shaping(vars(self)))


@dataclass
class RewardPenaltyKnobs:
    """Settings of a KL penalty that is subtracted from rewards."""

    kl_in_reward: float = knob(0.0, extension="reward_kl")
    """Coefficient of the KL divergence from the reference that is subtracted from each completion's reward; 0: none.
    See docs/losses.md."""
    kl_in_reward_estimator: str = knob("k1", extension="reward_kl")
    """How a token's divergence is estimated: `k1`, `k2` or `k3`."""


@dataclass
class ReferenceKnobs:
    """Settings of the KL term and its reference model."""

    beta: float = reference(0.0, "KL coefficient; 0: no KL term or reference. See docs/losses.md.", at_least=0)
    use_bias_correction_kl: bool = reference(True)
    """Multiply the KL term by the token's importance ratio, so that its expected gradient is the reverse KL
    divergence's."""
    sync_ref_model: bool = reference(False)
    """Mix the policy into the reference model every `ref_model_sync_steps` steps (TR-DPO)."""
    ref_model_mixup_alpha: float = reference(0.6, above=0, at_most=1, remedy="1 replaces the reference by the policy")
    """Share of the policy in that mixture; 1: replace the reference."""
    ref_model_sync_steps: int = reference(512, "Optimizer steps between two mixtures.", at_least=1)
    offload_reference: bool = reference(False)
    """On a GPU, keep the reference model in pinned host memory between its forwards. No effect on a CPU, or with
    LoRA."""


@dataclass
class DistillationKnobs:
    """Settings of distillation."""

    teacher_model_name_or_path: dict[str, Any] | str | None = distillation(None)
    """A model (Hub id, folder or adapter's folder) that the policy learns from on its own completions; reward functions
    are then optional. Or a mapping of names to models; the dataset's column `teacher` names each prompt's. See
    docs/guide/distillation.md."""
    teacher_model_revision: str | None = distillation(None, "Branch, tag or commit of a teacher from the Hub.")
    teacher_model_init_kwargs: dict[str, Any] | str | None = distillation(None)
    """Keyword arguments of the teacher's `from_pretrained`; `dtype` defaults to the policy's, `load_in_4bit: true`
    quantises."""
    distillation_kl: str = distillation("sampled", one_of=("sampled", "exact", "top_k"))
    """`sampled`: add each token's log teacher - log policy probability to its advantage. `exact`: add the reverse KL
    divergence over the vocabulary to the loss. `top_k`: the same over the teacher's most probable tokens, all others
    counted as one."""
    distillation_top_k: int = distillation(64, at_least=1)
    """Teacher's tokens that are kept per sampled token, with `top_k`."""
    distillation_weight: float = distillation(1.0, "Coefficient of the teacher's term.")
    offload_teacher: bool = distillation(False)
    """On a GPU, keep the teacher in pinned host memory between generations. No effect on a CPU."""

    @property
    def teachers(self) -> dict[str, str]:
        """The teacher models by name. A teacher that is set without a name has the empty name."""
        models = self.teacher_model_name_or_path
        return {} if models is None else models if isinstance(models, dict) else {"": models}

    @property
    def distils(self) -> bool:
        return self.teacher_model_name_or_path is not None
