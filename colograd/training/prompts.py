"""Tokenised prompts of datasets, short enough that a completion fits into the context behind each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from datasets import Dataset, IterableDataset

from ..apps.exams.catalogue import EXAMS
from ..apps.exams.exam import ExamSpec, parse_specs
from ..apps.exams.prompts import ExamPrompts
from ..batch import TEACHER, ModelInput
from ..config import GRPOConfig
from ..data import (
    PromptDataset,
    PromptLoader,
    PromptRules,
    PromptStream,
    StepOrder,
    StreamLoader,
    tokenize_prompts,
)
from ..data.columns import check_columns, columns_of
from ..extensions.curriculum.curriculum import CurriculumOrder, CurriculumState
from ..extensions.curriculum.settings import read_curriculum
from ..extensions.images.data import COLUMNS as IMAGES
from ..extensions.images.data import ImageReader
from ..extensions.tools.toolbox import EMPTY, Toolbox
from ..policy.loading import Policy
from ..reporting.console import Console

Prompts = PromptDataset | PromptStream
IMAGES_LOOKED_AT = 64  # rows to search for an image


def longest_completion(args: GRPOConfig) -> int:
    """Return the maximum tokens of a completion in training and evaluation."""
    return max(args.max_completion_length or 0, args.max_completion_length_eval or 0)


def train_prompts_of(
    dataset: Any, policy: Policy, args: GRPOConfig, tools: Toolbox | None = None, context: int | None = None
) -> PromptDataset | PromptStream:
    """Return the prompts to train on: tokenised, or a stream that is tokenised while it is read.

    As in TRL, a run without a dataset needs an environment that makes all prompts, and ``max_steps``.

    Raises:
        ValueError: no dataset or environment, no room for a prompt, fewer prompts than a round takes, or a row that
            can't be tokenised.
    """
    rules = _rules(policy, args, "train", context, tools)
    if dataset is None:
        dataset = _empty_prompts(args, tools)
    curriculum = read_curriculum(args)
    if isinstance(dataset, IterableDataset):
        return PromptStream(_wanted(dataset, policy, args, tools, "train"), rules, args)
    prompts = tokenize_prompts(_wanted(dataset, policy, args, tools, "train"), rules)
    StepOrder.of(args, len(prompts))
    if curriculum is not None:
        prompts.curriculum = CurriculumState(curriculum, prompts.dataset, args)
    return prompts


def _empty_prompts(args: GRPOConfig, tools: Toolbox | None) -> Dataset:
    """Make an empty row for each prompt of one generation; an environment writes the prompts' texts."""
    if tools is None or not tools.has_environments:
        raise ValueError("train_dataset is missing: give a datasets.Dataset with a column `prompt`.")
    if tools.by_name:
        raise ValueError(
            "train_dataset is missing, but environment_factory is a dict, of which each row's column `environment` "
            "names one: give a dataset with that column, or a single factory."
        )
    if args.max_steps <= 0:
        raise ValueError(
            f"train_dataset is missing and max_steps is {args.max_steps}, but without a dataset nothing else says when "
            "to end: set max_steps."
        )
    rows = (args.prompts_per_step or 1) * (args.steps_per_generation or 1)
    return Dataset.from_dict({"prompt": [EMPTY] * rows})


def loader_of(prompts: PromptDataset | PromptStream, args: GRPOConfig) -> PromptLoader | StreamLoader:
    """Return a loader with one item per optimizer step: the list of this rank's prompts."""
    if isinstance(prompts, PromptStream):
        return StreamLoader(prompts)
    if prompts.curriculum is not None:
        order = CurriculumOrder.of(args, len(prompts))
        order.state = prompts.curriculum
        return PromptLoader(prompts, order)
    return PromptLoader(prompts, StepOrder.of(args, len(prompts)))


def _wanted(dataset: Any, policy: Policy, args: GRPOConfig, tools: Toolbox | None, name: str) -> Any:
    """Apply ``remove_unused_columns``, or add empty prompts if environments write them."""
    names = columns_of(dataset) if isinstance(dataset, Dataset | IterableDataset) else ()
    if tools is not None and tools.has_environments and names and "prompt" not in names:
        return dataset.map(lambda row: {"prompt": EMPTY})
    if args.remove_unused_columns and "prompt" in names:
        check_columns(dataset, name, policy.processor is not None)  # before its columns are removed
        images = [column for column in IMAGES if column in names]
        named = ["environment"] if tools is not None and tools.by_name and "environment" in names else []
        named += [TEACHER] if args.names_teachers and TEACHER in names else []
        return dataset.select_columns(["prompt", *images, *named])
    return dataset


def _rules(policy: Policy, args: GRPOConfig, name: str, context: int | None, tools: Toolbox | None) -> PromptRules:
    """Return the rules for the conversion of rows into prompts.

    Args:
        name: name of the dataset in messages: train, eval or the user's.
        context: tokens of the engine's context, if there is an engine already.
    """
    completion = longest_completion(args)
    most = min(policy.context, args.vllm_max_model_length or policy.context, context or policy.context)
    limit = min(args.max_prompt_tokens or most, most - completion)
    if limit < 1:
        raise ValueError(
            f"max_completion_length is {completion}, but the context has {most} tokens: no room is left for a "
            "prompt. Lower max_completion_length or raise vllm_max_model_length."
        )
    return PromptRules(
        policy.tokenizer,
        max_prompt_tokens=limit,
        overlong=args.overlong_prompts,
        chat_template_kwargs=dict(args.chat_template_kwargs or {}),  # type: ignore[arg-type]
        name=name,
        tools=tools.schemas if tools else None,
        images=image_reader_of(policy),
        tell=Console(args.layout.is_main, bars=False).say,
        rows=policy.rows,
    )


def eval_prompts_of(
    dataset: Any,
    policy: Policy,
    args: GRPOConfig,
    tools: Toolbox | None = None,
    context: int | None = None,
    name: str = "eval",
) -> Any:
    """Return the prompts to evaluate on, in the form of ``dataset``: one, a dict, or None.

    Streams are read to their end. Names of exams become a dict of exams."""
    if dataset is None or isinstance(dataset, PromptDataset):
        return dataset
    if isinstance(dataset, str) or (isinstance(dataset, list | tuple) and all(isinstance(n, str) for n in dataset)):
        dataset = parse_specs([dataset] if isinstance(dataset, str) else dataset, EXAMS)
    if isinstance(dataset, ExamSpec):
        return _exam_prompts_of(dataset, policy, args, context)
    if isinstance(dataset, dict):
        given: dict[str, Any] = dataset
        specs = {name: ExamSpec.parse(part, EXAMS) if isinstance(part, str) else part for name, part in given.items()}
        return {name: eval_prompts_of(part, policy, args, tools, context, name) for name, part in specs.items()}
    return tokenize_prompts(_wanted(dataset, policy, args, tools, name), _rules(policy, args, name, context, tools))


def _exam_prompts_of(spec: ExamSpec, policy: Policy, args: GRPOConfig, context: int | None) -> ExamPrompts:
    """Return an exam's prompts, as long as the context allows, and without the run's tools."""
    rules = _rules(policy, args, spec.exam.name, context, None)
    whole = min(policy.context, args.vllm_max_model_length or policy.context, context or policy.context)
    return ExamPrompts.of(spec, dataclasses.replace(rules, max_prompt_tokens=whole - longest_completion(args)))


def without_template(prompts: Prompts, policy: Policy) -> Iterator[str]:
    """Yield a line if the model has a chat template, but the first prompt is plain text without special tokens."""
    prompt, tokenizer = prompts.first(1)[0].example["prompt"], policy.tokenizer
    if not isinstance(prompt, str) or not getattr(tokenizer, "chat_template", None):
        return
    if not any(token in prompt for token in tokenizer.all_special_tokens):
        yield (
            f"data: the prompts are plain text, so the chat template of {policy.path or 'the model'} isn't applied: "
            "where it is a chat model, give lists of messages, or set system_prompt"
        )


def reset_rules(policy: Policy, args: GRPOConfig, tools: Toolbox, context: int) -> PromptRules:
    """Return the rules for prompts that an environment's ``reset`` changed, in an engine with this context."""
    most = context - 1
    return dataclasses.replace(_rules(policy, args, "reset", None, tools), max_prompt_tokens=most, overlong="drop")


def image_reader_of(policy: Policy) -> ImageReader | None:
    """Return a reader of images for a policy that takes images; None for others."""
    return None if policy.processor is None else ImageReader(policy.processor, policy.image_token, policy.rows)


def prompts_with_images(prompts: Sequence[Prompts], policy: Policy, tools: Toolbox | None) -> list[ModelInput]:
    """Return one prompt with images, to prove forwards on; empty if the run has no images.

    The prompt is made up if only tools, or rows behind the first IMAGES_LOOKED_AT, have images.
    """
    seen = any(getattr(part, "most_images", 0) for part in prompts)
    if getattr(prompts[0], "most_images", 0):
        found = (prompt.input for prompt in prompts[0].first_ones(IMAGES_LOOKED_AT) if prompt.input.images is not None)
        if (first := next(found, None)) is not None:
            return [first]
    reader = image_reader_of(policy)
    return [reader.made_up()] if reader is not None and (seen or tools is not None) else []
