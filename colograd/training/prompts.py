"""Tokenise the prompts of datasets for training and evaluation, and refuse prompts that leave no room for a completion.

Evaluations may also use benchmarks that extensions implement."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from datasets import Dataset, IterableDataset

from ..batch import ModelInput
from ..config import GRPOConfig
from ..data import PromptDataset, PromptRules, StepOrder, tokenize_prompts
from ..data.columns import EMPTY, IMAGES, check_columns, columns_of
from ..policy.loading import Policy
from ..reporting.console import Console
from ..rollout.features import SourceFeature
from ..runtime import registry

# A PromptDataset, a Benchmark, or prompts of a streamed dataset, tokenised during training. An extension's hook
# ``prompt_stream`` makes the latter: (dataset, rules, config) -> an object with ``choice`` (a curriculum or the
# dataset's position, or None), ``dataset``, ``longest`` (upper bound of a prompt's number of tokens), and the methods
# ``first(count) -> list[Prompt]`` and ``loader() -> DataLoader``.
Prompts = Any
NO_FEATURE = SourceFeature()


class Benchmark(ABC):
    """A benchmark for evaluations, e.g. GSM8K, that has its own prompts, sampling settings and scoring.

    An extension provides benchmarks at two hooks: `benchmark_names` (texts of a recipe -> {name in the log: text}) and
    `benchmark` (text, policy, args, maximum context of the vLLM engine -> `Benchmark`)."""

    dropped: bool = False  # whether some prompts were dropped because they don't fit into the context

    @property
    @abstractmethod
    def longest(self) -> int:
        """Number of tokens of the benchmark's longest prompt."""

    @property
    @abstractmethod
    def generations(self) -> int:
        """Largest number of sequences that vLLM samples for one question of the benchmark."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of questions in the benchmark."""

    @abstractmethod
    def evaluate(self, trainer: Any, name: str) -> dict[str, float]:
        """Run the benchmark with the weights in the vLLM engine, and return its metrics. A collective call."""

    def dropped_line(self) -> str:
        """Return a warning about the prompts that were dropped because they don't fit into the context, or ""."""
        return ""

    @abstractmethod
    def metric_names(self) -> list[str]:
        """Return the names of the benchmark's metrics, without a prefix such as ``eval_``."""


def longest_completion(args: GRPOConfig) -> int:
    """Return the maximum number of tokens of a completion, over training and evaluation."""
    return max(args.max_completion_length or 0, args.max_completion_length_eval or 0)


def train_prompts_of(
    dataset: Any, policy: Policy, args: GRPOConfig, feature: SourceFeature = NO_FEATURE, context: int | None = None
) -> Prompts:
    """Tokenise the training dataset, or wrap a streamed dataset that is tokenised during training. As in TRL, a run
    without a dataset needs ``max_steps``, and an environment that makes all prompts. An extension's hook
    ``train_prompts`` checks or changes the prompts: (prompts, config) -> None."""
    rules = prompt_rules(policy, args, "train", context, feature)
    rows = wanted_columns(feature.empty_prompts(args) if dataset is None else dataset, policy, args, feature, "train")
    if isinstance(rows, IterableDataset):
        registry.require("streams", "train_dataset: an IterableDataset")
        (stream_of,) = registry.hooks("prompt_stream")
        prompts = stream_of(rows, rules, args)
    else:
        prompts = tokenize_prompts(rows, rules)
        StepOrder.of(args, len(prompts))
    for check in registry.hooks("train_prompts"):
        check(prompts, args)
    return prompts


def benchmark_names(texts: Sequence[str]) -> dict[str, str]:
    """Convert the texts that name benchmarks in a recipe to {name in the log: text in the recipe}."""
    registry.require("evaluation", f"exams: {list(texts)}")
    (names_of,) = registry.hooks("benchmark_names")
    return dict(names_of(texts))


def eval_prompts_of(
    dataset: Any,
    policy: Policy,
    args: GRPOConfig,
    feature: SourceFeature = NO_FEATURE,
    context: int | None = None,
    name: str = "eval",
) -> Any:
    """Tokenise the prompts of an evaluation. A dict of datasets becomes a dict of prompts, None stays None.

    Streamed datasets are read to their end. Names of benchmarks become a dict of `Benchmark` objects."""
    if dataset is None or isinstance(dataset, PromptDataset | Benchmark):
        return dataset
    if isinstance(dataset, str) or (isinstance(dataset, list | tuple) and all(isinstance(n, str) for n in dataset)):
        dataset = benchmark_names([dataset] if isinstance(dataset, str) else dataset)
    if isinstance(dataset, dict):
        made: dict[str, Any] = {}
        if texts := [part for part in dataset.values() if isinstance(part, str)]:
            benchmark_names(texts)
        for name, part in dataset.items():
            if isinstance(part, str):
                (benchmark_of,) = registry.hooks("benchmark")
                made[name] = benchmark_of(part, policy, args, context)
            else:
                made[name] = eval_prompts_of(part, policy, args, feature, context, name)
        return made
    return tokenize_prompts(
        wanted_columns(dataset, policy, args, feature, name), prompt_rules(policy, args, name, context, feature)
    )


def wanted_columns(dataset: Any, policy: Policy, args: GRPOConfig, feature: SourceFeature, name: str) -> Any:
    """Apply ``remove_unused_columns`` to a dataset, or add empty prompts if an environment writes the prompts. Columns
    that an extension's hook ``prompt_columns`` (config -> names) lists are not removed."""
    names = columns_of(dataset) if isinstance(dataset, Dataset | IterableDataset) else ()
    if feature.writes_prompts and names and "prompt" not in names:
        return dataset.map(lambda row: {"prompt": EMPTY})
    if args.remove_unused_columns and "prompt" in names:
        check_columns(dataset, name, policy.processor is not None)  # check before columns are removed
        used = [*IMAGES, *feature.columns, *(each for hook in registry.hooks("prompt_columns") for each in hook(args))]
        return dataset.select_columns(["prompt", *(column for column in used if column in names)])
    return dataset


def prompt_rules(
    policy: Policy, args: GRPOConfig, name: str, context: int | None, feature: SourceFeature = NO_FEATURE
) -> PromptRules:
    """Return the settings for tokenising dataset rows: maximum tokens, chat template, tools, reader of images."""
    completion, most = longest_completion(args), engine_context(policy, args, context)
    limit = min(args.max_prompt_tokens or most, most - completion)
    if limit < 1:
        raise ValueError(
            f"max_completion_length is {completion}, but the context has {most} tokens, so no room is left for a "
            "prompt. Lower `max_completion_length` or raise `vllm_max_model_length`."
        )
    return PromptRules(
        policy.tokenizer,
        max_prompt_tokens=limit,
        overlong=args.overlong_prompts,
        chat_template_kwargs=dict(args.chat_template_kwargs or {}),  # type: ignore[arg-type]
        name=name,
        tools=feature.schemas,
        reader=reader_of(policy),
        tell=Console(args.layout.is_main, bars=False).say,
        rows=policy.rows,
    )


def engine_context(policy: Policy, args: GRPOConfig, context: int | None) -> int:
    """Return the maximum number of tokens of prompt and completion together, as model and vLLM settings limit it."""
    return min(policy.context, args.vllm_max_model_length or policy.context, context or policy.context)


def without_template(prompts: Prompts, policy: Policy) -> Iterator[str]:
    """Yield a warning if the model has a chat template, but the first prompt is plain text without special tokens."""
    row = prompts[0] if isinstance(prompts, PromptDataset) else prompts.first(1)[0].example
    prompt, tokenizer = row["prompt"], policy.tokenizer
    if not isinstance(prompt, str) or not getattr(tokenizer, "chat_template", None):
        return
    if not any(token in prompt for token in tokenizer.all_special_tokens):
        yield (
            f"data: the prompts are plain text, so the chat template of {policy.path or 'the model'} isn't applied: "
            "if it is a chat model, give lists of messages, or set system_prompt"
        )


def reader_of(policy: Policy) -> Any:
    """Return an object that reads dataset rows with images or audio, or None for a text-only policy. An extension's
    hook ``prompt_reader`` makes the object: policy -> reader or None."""
    return next(filter(None, (make(policy) for make in registry.hooks("prompt_reader"))), None)


def proof_prompts(prompts: Sequence[Prompts], policy: Policy, feature: SourceFeature) -> list[ModelInput]:
    """Return one prompt per kind of media (image, audio), to test the policy's forward. Text-only runs get []. An
    extension's hook ``proof_prompts`` makes the prompts: (prompts, policy, feature) -> list."""
    return [each for make in registry.hooks("proof_prompts") for each in make(prompts, policy, feature)]
