"""Settings of an optimizer step: prompts, groups of completions, iterations and micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from transformers import TrainingArguments

from .knob import Rules, knob


@dataclass
class StepKnobs(TrainingArguments):
    """Settings of prompts, groups and steps."""

    num_generations: int | None = knob(8, "G: completions per prompt; at least 2.")
    prompts_per_step: int | None = knob(None)
    """Prompts (groups) per optimizer step over all ranks. It replaces TRL's product `per_device_train_batch_size *
    gradient_accumulation_steps * ranks / num_generations`."""
    steps_per_generation: int | None = knob(None)
    """Batches of `per_device_train_batch_size` that are sampled together; default `gradient_accumulation_steps`, one
    optimizer step per generation. A divisor of it means the same."""
    generation_batch_size: int | None = knob(None)
    """TRL's alternative to `steps_per_generation`: completions sampled together."""
    num_iterations: int = knob(1, "Times each generation's batches are trained on.", at_least=1)
    max_tokens_per_microbatch: int | str | None = knob("auto")
    """Tokens in one forward and backward. `auto`: measured on a GPU before the first step, 4096 on a CPU. Halved when
    memory runs out; the update doesn't depend on it."""
    balance_ranks: bool = knob(True)
    """After scoring, move groups (their token ids) from the rank with the longest training to others, if that shortens
    the step by more than a tenth. The update is the same up to rounding."""
    overlap: str = knob("off", one_of=("auto", "off"), spellings={"false": "off"}, extension="overlap")
    """`auto`: a rank that has sampled its groups trains while other ranks sample; with `balance_ranks` it takes their
    finished groups too. Training stays on-policy. Nothing is trained early with `sharding: gradients` or `fsdp`; a line
    at start names the reason. The last bits of a step depend on clocks; resumed and replayed steps have the recorded
    bits. `off`: training begins after sampling."""
    rank_timeout: float | None = knob(1500.0, above=0, remedy="set it to null for no limit")
    """Seconds without progress (an engine step, a micro-batch, a reward call, an exchange, a stage of the start) after
    which a rank ends the run on all ranks, with its stage and stack. Waiting for other ranks and downloads don't count.
    Must be longer than vLLM's compilation and the longest call of a reward function, tool or `rollout_func`, and below
    `ddp_timeout` (1,800). `null`: never."""
    curriculum: dict[str, Any] | str | None = knob(None, extension="curriculum")
    """Draw prompts by their pass rates, such as `{solved_at: 1.0, revisit_after: 2}`. Keys: `solved_at`,
    `revisit_after`, `pass_threshold`, `shares` with `column`, `difficulty` with `difficulty_until`; see
    docs/guide/distillation.md."""
    shuffle_dataset: bool | None = knob(True, "Shuffle the prompts, anew in each epoch.")
    max_prompt_tokens: int | None = knob(None, at_least=1)
    """Maximum tokens of a prompt; default: the engine's context minus `max_completion_length`."""
    overlong_prompts: str = knob("drop", one_of=("drop", "error"))
    """Prompts over the limit: `drop` (and count), or `error`."""
    chat_template_path: str | None = knob(None)
    """A file with a chat template that replaces the tokenizer's; saved with the model."""
    chat_template_kwargs: dict[str, Any] | str | None = knob(None, "Keyword arguments of the chat template.")
    carry_over: float | None = knob(
        None, at_least=0.5, below=1, remedy="0.8 is usual; leave it out for rounds that wait for all",
        spellings={"false": None, "off": None}, extension="carry_over",
    )  # fmt: skip
    """Sample more groups at once than a round needs, and end the round when this share of them is done (0.5 to below 1,
    e.g. 0.8). The others stop and go on in the next round, under its weights; the sampler's correction weighs each
    token by the version that sampled it. Unset: a round waits for its last completion. See
    docs/guide/long-completions.md."""
    carry_over_max_age: int = knob(2, at_least=1, extension="carry_over")
    """Maximum number of rounds over which `carry_over` carries a group; the next round waits for it."""

    def _resolve_budget(self, on_cpu: bool) -> None:
        budget = self.max_tokens_per_microbatch
        if budget is None or budget == "auto":
            self.max_tokens_per_microbatch = 4096 if on_cpu else "auto"
            return
        try:
            self.max_tokens_per_microbatch = int(budget)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(
                f"`max_tokens_per_microbatch` is {budget!r}, but must be a number of tokens or `auto`: choose one."
            ) from None
        Rules(at_least=1).check("max_tokens_per_microbatch", self.max_tokens_per_microbatch)

    @property
    def token_budget(self) -> int:
        """Configured maximum tokens of a micro-batch. 0 means `auto`: training measures the maximum."""
        return 0 if self.max_tokens_per_microbatch == "auto" else int(self.max_tokens_per_microbatch or 0)

    @property
    def round_length(self) -> int:
        """Optimizer steps from one generation to the next."""
        return self.steps_per_generation * self.num_iterations  # type: ignore[operator]

    def _fold_batch(self, ranks: int) -> None:
        """Resolve the settings of batch sizes. A second call changes nothing.

        ``ranks``: number of engines, because the ranks of a tensor-parallel engine count once.
        """
        group = self.num_generations or 1
        accumulation = self.gradient_accumulation_steps
        per_rank = self.per_device_train_batch_size * accumulation
        if self.prompts_per_step is not None:
            completions = self.prompts_per_step * group
            factors = ("per_device_train_batch_size", "gradient_accumulation_steps")
            factors_set = [name for name in factors if getattr(self, name) != getattr(type(self), name)]
            if factors_set and per_rank * ranks != completions:
                raise ValueError(
                    f"prompts_per_step is {self.prompts_per_step}, which is {completions} completions per step, but "
                    "per_device_train_batch_size * gradient_accumulation_steps * engines = "
                    f"{self.per_device_train_batch_size} * {accumulation} * {ranks} = {per_rank * ranks}: remove "
                    f"prompts_per_step or {' and '.join(factors_set)}."
                )
            if self.prompts_per_step < 1 or self.prompts_per_step % ranks:
                low = max(ranks, self.prompts_per_step // ranks * ranks)
                raise ValueError(
                    f"prompts_per_step is {self.prompts_per_step}, but must be a positive multiple of the "
                    f"number of engines, {ranks}, because engines get equal shares: {low} or {low + ranks} would do."
                )
            per_rank = self.prompts_per_step // ranks * group
            accumulation = 1
        elif per_rank % group:
            low = per_rank // group * group
            near = " or ".join(str(n) for n in (low, low + group) if n)
            raise ValueError(
                f"per_device_train_batch_size * gradient_accumulation_steps = {self.per_device_train_batch_size} * "
                f"{accumulation} = {per_rank} completions per engine and step, but one engine samples a whole group of "
                f"num_generations = {group}: make the product a multiple of {group} ({near} would do)."
            )
        in_trl = (self.generation_batch_size or 0) // ranks or per_rank // accumulation * (
            self.steps_per_generation or accumulation
        )
        # Maximum tool environments per rank: the completions of TRL's generation, or of a group if it has more.
        self.environments_at_once = max(in_trl, group)
        self.steps_per_generation = self._steps_sampled_together(accumulation, per_rank * ranks)
        self.gradient_accumulation_steps: int = 1
        self.per_device_train_batch_size: int = per_rank
        self.prompts_per_step = per_rank // group * ranks
        self.generation_batch_size = None

    def _steps_sampled_together(self, accumulation: int, completions: int) -> int:
        """Return the optimizer steps per generation: 1 if TRL would generate several times in one step."""
        if self.generation_batch_size is None:
            name, count, whole = "steps_per_generation", self.steps_per_generation, accumulation
            rule = f"gradient_accumulation_steps ({whole})"
        else:
            if self.steps_per_generation is not None:
                raise ValueError("generation_batch_size determines steps_per_generation: set only one of the two.")
            name, count, whole = "generation_batch_size", self.generation_batch_size, completions
            rule = f"the completions of one optimizer step over all ranks ({whole})"
        if count is None:
            return 1
        if count >= 1 and count % whole == 0:
            return count // whole
        if count >= 1 and whole % count == 0 and self.num_iterations == 1:
            return 1
        divisor = ", or a divisor of it" if self.num_iterations == 1 else ""
        remedy = f"set {name} to {whole}"
        raise ValueError(f"{name} is {count}, but must be a positive multiple of {rule}{divisor}: {remedy}.")

    @property
    def groups_per_round(self) -> int:
        """Groups that a rank's engine must finish per generation."""
        completions = self.per_device_train_batch_size * (self.steps_per_generation or 1)
        return completions // (self.num_generations or 1)

    @property
    def groups_in_flight(self) -> int:
        """Groups that a rank's engine samples at once. `carry_over` adds groups that a later generation finishes."""
        if self.carry_over is None:
            return self.groups_per_round
        return math.ceil(self.groups_per_round / self.carry_over - 1e-9)
