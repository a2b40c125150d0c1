"""Writes the generated pages: docs/configuration.md from the configuration's help, docs/trl.md from TRL's fields,
the alarms of docs/metrics.md from the advisor's rules, the table of docs/models.md from the test results in
docs/models.json, the list of docs/design.md from tests/helpers/cuda_places.toml.

    python docs/generate.py            (make docs)
    python docs/generate.py --check    exit status 1 if a page is stale

TRL is read from the installed package's source and not imported.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import importlib.util
import inspect
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from colograd.config import GRPOConfig, ModelConfig, ScriptArguments
from colograd.config.conflicts import When, tables
from colograd.config.knob import REFUSED, RENAMED, UNUSED, rules_of
from colograd.extensions import EXTENSIONS
from colograd.extensions.recording.advisor import LEAST, QUIET, RULES, WINDOW
from colograd.extensions.trl_names.attributes import ABSENT, DIFFERENT, HOOKS

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
TRL = "1.16"  # the page covers this version's fields
NOTICE = "<!-- Written by docs/generate.py (make docs): change the sources it reads, not this page. -->"

# Fields of TRL's GRPOConfig that accept only some of TRL's values, with a note that their help lacks.
LIMITED = {
    "vllm_mode": "",
    "vllm_tensor_parallel_size": "",
    "model_init_kwargs": "Beside a model that is given as an object it is an error; TRL ignores it with a warning.",
    "max_completion_length": "`None` is an error, since memory is planned by it; in TRL a completion may then be as "
    "long as the context.",
    "steps_per_generation": "A multiple of `gradient_accumulation_steps`; or with `num_iterations: 1` a divisor of it, "
    "which means the same as leaving it out. `max_steps` must be a multiple of the optimizer steps between two "
    "generations (TRL ends in the middle).",
    "generation_batch_size": "A multiple of the completions of one optimizer step, or a divisor, likewise.",
    "num_iterations": "`max_steps` must be a multiple of the optimizer steps between two generations (TRL ends in the "
    "middle).",
}

# Metrics that TRL logs and this version doesn't, with the reason.
OTHER_METRICS: dict[str, str] = {}
# Notes on metrics that have TRL's name.
METRIC_NOTES = {
    "frac_reward_zero_std": "By group, whatever `scale_rewards` says (TRL: of the whole batch with `batch`)",
    "completions/clipped_ratio": "By what vLLM says: a stop string or stop token ends a completion too",
    "completions/mean_terminated_length": "Left out where none ended (TRL logs 0)",
    "completions/min_terminated_length": "Left out where none ended (TRL logs 0)",
    "completions/max_terminated_length": "Left out where none ended (TRL logs 0)",
    "cispo_clip_ratio": "Of all tokens; TRL counts only those with a positive advantage",
    "aux_loss": "Of micro-batches, by their tokens; also where its coefficient is 0",
    "step_time": "The whole step; `time/*` are its phases",
}

# Around what is written into docs/metrics.md, docs/design.md and docs/models.md.
OF_ALARMS = ("<!-- alarms: written by docs/generate.py -->", "<!-- end of alarms -->")
PLACES = ("<!-- places: written by docs/generate.py -->", "<!-- end of places -->")
FAMILIES = ("<!-- families: written by docs/generate.py -->", "<!-- end of families -->")

ALARMS = f"""A run checks its own metrics while it trains. An alarm appears once on the console and in Python's logger
`colograd`, as an event of `_report/events.jsonl`, and at the top of the run's report. It has the observed numbers, the
reason, and the keys to change. "The last steps" are {WINDOW}; with fewer than {LEAST} most rules are silent. An alarm
ends after {QUIET} steps without its cause. `report: false` turns all of it off.

A rule is a function in `colograd/extensions/recording/advisor.py`, with a made-up log in the tests that raises it and
one that doesn't. A task that is solved has no reward differences either: it is a note, no alarm."""

CONFIGURATION = """# Configuration

Every key of a recipe, flag of the command line and argument in Python. A recipe is a flat YAML mapping:

```bash
colograd train --config recipes/grpo_smollm2_cpu.yaml --learning_rate 2e-5 --vllm_engine_kwargs.max_num_seqs 32
```

A flag wins over the recipe. `--field.key value` sets one entry of a field that is a mapping. An unknown key is an error
that names the nearest known one.

`GRPOConfig` derives from `transformers.TrainingArguments`: its fields (`output_dir`, `max_steps`, `lr_scheduler_type`,
`save_steps`, `report_to`, `seed` …) apply as well and are described in transformers' documentation.

## Batch size

One optimizer step takes `prompts_per_step` prompts over all ranks, with `num_generations` completions each. TRL's way
of saying it is taken too: `per_device_train_batch_size * gradient_accumulation_steps * ranks` completions. Either way a
group is sampled on one rank. Micro-batches don't follow from these numbers: they are cut by
`max_tokens_per_microbatch`, and the update doesn't depend on where they are cut.

## Precision

The policy is bfloat16 unless `dtype` or `optim` says otherwise. `optim: auto` then picks `adamw_split`: AdamW on an
exact float32 master, kept as the bfloat16 parameter and a 16-bit remainder. Gradients accumulate in float32. With
`dtype: float32`, which another optimizer has by default, the forward is bfloat16 by autocast, or float32 with
`bf16: false`.

`optim: muon` is [Muon](https://kellerjordan.github.io/posts/muon/) for the matrices of the decoder's layers, on the
same kind of master: torch's own step on the joined float32 matrix, bit for bit, with momentum 0.95 and its size matched
to AdamW's ([arXiv 2502.16982](https://arxiv.org/abs/2502.16982)), so that `learning_rate` is one for all. Embedding,
head, norms, biases and stacked experts have `adamw_split`. A matrix has 6 bytes of state per element, where AdamW has
10. It needs whole matrices: several ranks of whole policies work, and adapters are an error
([more](#settings-that-exclude-each-other)).

## Memory

A run starts with a table of what each rank's device will hold while it samples and while it trains. On a GPU the KV
cache follows from it: what weights, gradients, optimizer and a micro-batch leave, less 8 % of the GPU, up to what one
generation can use, and at least one full sequence. `vllm_gpu_memory_utilization` overrules that. What doesn't fit, in
either phase, is an error with the table and what would fit; on a CPU it is a line. `colograd plan` says it for GPUs
that one doesn't have ([out of memory](guide/out-of-memory.md)).

With `vllm_enable_sleep_mode` the KV cache exists only while the engine samples, and shares its space with gradients and
activations. Weights stay where they are. `offload_optimizer` moves the optimizer's state to pinned host memory
meanwhile, which costs two transfers of it per generation. Both are off by default: a
model that fits needs neither."""

GROUPS = (
    (GRPOConfig, "The run: `GRPOConfig`", "Its own fields, and those whose default differs from transformers'."),
    (ModelConfig, "The model: `ModelConfig`", "In Python give `model` and `model_init_kwargs`."),
    (ScriptArguments, "The script: `ScriptArguments`", "In Python give the dataset and rewards."),
)

# Settings of a first recipe.
FIRST = (
    "model_name_or_path", "use_peft", "dataset_name", "dataset_train_split", "dataset_test_split",
    "dataset_prompt_column", "system_prompt", "reward_funcs", "reward_weights", "num_generations", "prompts_per_step",
    "max_completion_length", "max_prompt_tokens", "overlong_prompts", "temperature", "learning_rate", "loss_type",
    "beta", "epsilon", "scale_rewards", "dynamic_sampling", "gradient_checkpointing", "sharding",
    "vllm_max_model_length", "vllm_engine_kwargs", "num_generations_eval", "temperature_eval", "logging_steps",
    "log_completions", "report",
)  # fmt: skip
START = (
    "A first recipe sets or reads these, and `output_dir`, `max_steps` and `save_steps` of transformers. The other "
    "settings of the core follow, then a section for each extension."
)
CONFLICTS = (
    "A start with one of these pairs ends with one error, which names both settings with their values, the reason and "
    "the remedy. Rows with one setting refuse its value. Pairs that depend on the model or on the number of ranks have "
    "errors of their own."
)

INHERITED = "Defaults that differ from TrainingArguments (as in TRL, except `optim`)"  # GRPOConfig's own section

MOVING = f"""# Coming from TRL

```python
from colograd import GRPOConfig, GRPOTrainer  # was: from trl import GRPOConfig, GRPOTrainer
```

TRL's example scripts (gspo, grpo_vlm, grpo_2048, grpo_agent) run with `trl` changed to `colograd` in their imports and
nothing else: `TrlParser`, `ModelConfig`, `ScriptArguments`, `get_peft_config`, `get_quantization_config` and
`get_kbit_device_map` can be imported too. All but the last are TRL's own: TRL must be installed (`pip install trl`).

The same seed asks for the same prompts at each step. The same rollouts leave the same weights: whole runs of TRL and
Colograd, with clipping, schedule and AdamW, are compared in the tests. Learning curves therefore differ by what is
sampled alone ([measurements](measurements.md#does-it-learn-the-same)).

Recipes of TRL's `grpo` script are read with the same keys. What differs without being asked for:

- **Precision.** An unset `dtype` is a bfloat16 policy with an exact float32 master in the optimizer. TRL loads float32
  and runs it under autocast: so does `dtype: float32` here, and an unset one beside an `optim` that was named. The
  engine has the policy's dtype (TRL's the checkpoint's); `vllm_engine_kwargs: {{dtype: bfloat16}}` gives it another.
- **Rows are packed.** A prompt goes through the model once per group, completions follow it, nothing is padded.
- **Micro-batches** are cut by `max_tokens_per_microbatch`. `gradient_accumulation_steps` only multiplies the batch.
- **A group stays on one rank.** `per_device_train_batch_size * gradient_accumulation_steps`, one rank's completions,
  must be a multiple of `num_generations`. TRL asks for it over all ranks: its batch of 1 on 8 GPUs with 8 generations
  is an error here, which names sizes that would do. `prompts_per_step` must be a multiple of the ranks likewise.
- **The step is the unit.** Losses are normalised over the optimizer step and all ranks; `bnpo`, which TRL normalises
  per micro-batch, is `dapo` here.
- **One ratio per completion** (`importance_sampling_level: sequence`): a token's gradient is weighted by its own
  advantage, and the KL term (`use_bias_correction_kl`) has the token's own ratio. TRL averages advantages per token
  over the completion, and has the completion's ratio in the KL term. Ratios are bounded by e^20; TRL bounds none.
  [losses.md](losses.md#where-trl-differs) has the rest of what differs.
- **A generation of several steps** (`steps_per_generation` beyond `gradient_accumulation_steps`) is split into steps of
  whole groups; TRL shuffles its completions among them.
- **Groups without a reward difference** aren't trained on, where nothing but the advantage gives a gradient. They count
  in every denominator and in the metrics of rewards and completions; those of the loss (`entropy`, `clip_ratio/*`,
  `sampling/*` and their like) are of the tokens that were trained on.
- **Rewards** are called for one group at a time. The signature is TRL's. A reward of NaN ends the run with the
  function's name, unless `reward_on_error: abstain` makes it an abstention, which it always is in TRL; `None` is one in
  both.
- **Built-in rewards** have TRL's names. They read more forms of answers, and `get_soft_overlong_punishment` counts the
  model's own tokens only ([rewards](guide/rewards.md#built-in-functions)). The special tokens of a reward model's
  template are read to the last one, even where the tokenizer pads with its end token.
- **A conversation that ends with the assistant's message** is continued; TRL begins another turn behind it.
- **Prompts that leave no room** for `max_completion_length` tokens in the context are dropped, and a line at start
  counts them (`overlong_prompts: error` refuses them); TRL samples what room is left for.
- **`resume_from_checkpoint`** of `GRPOConfig` holds for `trainer.train()`; TRL's trainer reads the argument of `train`
  alone. `train(resume_from_checkpoint=False)` trains anew.
- **A plain text that begins with the tokenizer's first token** (`bos_token`), as one that went through a chat template
  does, gets no second one; in TRL it has two.
- **Contents of messages** are texts or lists of text parts. A template that doesn't know parts, or a message without
  content beside its tool calls, gets the joined texts or an empty one, where TRL's prompt has Python's text of them.
- **`None` in a field that can't be None** (`top_p=None`) means its default, and a line at start says so.
- **The best model** (`load_best_model_at_end`) is that of the highest reward, where no metric is said. Checkpoints fall
  on the ends of generations, and there `eval_steps` must too, for it and for `save_strategy: best`. So does the end of
  a fractional epoch.
- **The completions log** has a file for each step, and one for each evaluation under a name of its own (TRL writes as
  often as it logs, an evaluation over the step's file). The table is printed and sent at the first step, and then as
  often as TRL's; tables of evaluations are `eval_completions` there.
- **Generation is vLLM in this process**, always. `use_vllm: false` has no effect, and a line at start says so;
  `vllm_mode: server` is an error.
- **The KV cache is planned** where `vllm_gpu_memory_utilization` isn't set; TRL takes 0.3 of the GPU.
  `vllm_enable_sleep_mode` gives the KV cache back while training, and leaves the weights where they are.
- **`evaluate` computes a loss**, as TRL's does, unless `loss_eval: false` saves its forward, or `temperature_eval`
  differs from `temperature`. `temperature_eval` and `max_completion_length_eval` are its own, and it reports pass@k.
- **Sampling settings that bend the distribution** (`repetition_penalty`, what constrains it, as
  `vllm_structured_outputs_regex` does, and `top_p` or `min_p` without `top_k`) turn
  `vllm_importance_sampling_correction` off, and a line at start says so: the ratio would be of two distributions. With
  `top_k`, and `top_p` or `min_p` beside it, what they left is recorded, and the loss is of the distribution over that
  ([losses.md](losses.md#truncated-sampling)). TRL leaves the correction on in all cases.
- **`loss_type: vespo`** wants `vllm_importance_sampling_mode: token_truncate` or `token_mask`, or no correction; the
  default mode is an error. That is TRL's rule for generation with vLLM, which here is always.
- **`generation_kwargs`** has vLLM's names. Those of transformers (`do_sample: true`, `num_beams: 1`, `max_new_tokens`
  as `max_completion_length` says) may stay where they ask for what is done anyway.

LoRA is asked for as in TRL (`use_peft` and `lora_*` in a recipe, `peft_config=LoraConfig(...)`, a `PeftModel` or an
adapter's folder as the model). The adapter alone goes to vLLM; nothing is merged into the base. Quantised bases (QLoRA)
are asked for as in TRL too; the adapter on them stays in float32. [LoRA](guide/lora.md).

An `IterableDataset` is read while training, as in TRL: shuffled in a buffer, every rank reads all of it, `max_steps` is
needed. Each rank reads it in its own process: `accelerator_config` (`dispatch_batches`, `split_batches`) and
`dataloader_num_workers` have no effect, and a line at start says so. A resumed run reads again what it had read; a
digest in the checkpoint shows whether that was the same, and where it wasn't, the run ends instead of training on other
prompts. Without `max_prompt_tokens` or `vllm_max_model_length` the engine's context is the whole of the model's, since
the longest prompt isn't known.

What TRL says through its logger (a setting that has no effect, one that rarely does what was meant, a completion that
nobody judged) is a line on the console here, and a warning of the logger `colograd`; every other line is logged as
information. TRL's deprecation warnings have no counterpart: old names are read, and a line says so.

`prompts_per_step` beside a product of TRL's batch fields that says something else is an error.

`torch_compile` compiles the policy's decoder layers for packed rows of any length (in TRL the whole model, again for
other lengths); `torch_compile_mode` takes modes without CUDA graphs. `use_liger_kernel` means the kernels of layers, as
in TRL 1.16; Liger's losses are an error ([measurements](measurements.md#what-does-the-rest-of-a-step-cost)).

`fsdp` (set `sharding: fsdp`), `parallelism_config` (set `sharding`, `vllm_tensor_parallel_size` or
`sequence_parallel_size`), `fp16` and `auto_find_batch_size` aren't available in this version: each is an error at start
that says so. So are datasets with a transform (`with_transform`): apply it with `map`. TRL's `remove_none_values` isn't
needed: what Arrow fills in with `None` never reaches the chat template. `deepspeed` means the sharding strategy that
does the same ([several GPUs](guide/several-gpus.md#files-of-accelerate-and-deepspeed)).

Subclasses override [four stages](architecture.md#replacing-a-stage). One that overrides a method that only TRL's
trainer calls (`_generate`, `_calculate_rewards`, `_generate_and_score_completions`, `_compute_loss` …) is an error
where it is defined, and so is a `compute_loss` in transformers' signature (with `return_outputs`). There is no
`trainer.vllm_generation`, by which TRL's examples of a `rollout_func` sample: it is
[`trainer.engine`](guide/tools.md#rollouts-of-your-own). Attributes that scripts and callbacks read have
[TRL's names](#attributes-of-the-trainer). `trl.GRPOConfig` as `args` is an error: import both names from
`colograd`.

The table has every field that TRL {TRL} adds to `transformers.TrainingArguments`. *Supported*: same name, same meaning.
*Limited*: not all of TRL's values. *No effect*: taken with any value, and a line at start says that it changes nothing
here. *Refused*: an error at start, with the reason given here."""


def configuration() -> str:
    """Write docs/configuration.md: a newcomer's knobs, then the core's by topic, then each extension's, and the
    settings that exclude each other."""
    of_name = {name: group for group, _, _ in GROUPS for name in own_names(group)}
    parts = [NOTICE, CONFIGURATION, "## The first thirty", START, knobs(of_name, FIRST)]
    for group, title, note in GROUPS:
        parts += [f"## {title}", note]
        for section, names in sections(group).items():
            core = [name for name in names if name not in FIRST and not extension_of(group, name)]
            parts += [f"### {section}"] if section and core else []
            parts += [knobs(of_name, core)] if core else []
    parts.append("## Extensions")
    for extension in EXTENSIONS:
        names = [name for name, group in of_name.items() if extension_of(group, name) == extension]
        parts += [f"### Extension {code(extension)}", summary(extension)]
        parts += [knobs(of_name, names)] if names else []
    parts += ["## Settings that exclude each other", CONFLICTS]
    for extension, rows in tables().items():
        if rows:
            parts.append(f"### With the extension {code(extension)}" if extension else "### In the core")
            cells = [
                (clause(row.field, row.when), clause(row.other, row.other_when), row.reason, row.remedy) for row in rows
            ]
            parts.append(table(("Setting", "Not with", "Reason", "Remedy"), cells))
    return "\n\n".join(parts) + "\n"


def knobs(of_name: dict[str, type], names: Sequence[str]) -> str:
    """Make the table of some knobs."""
    rows = [
        (
            code(name),
            code(annotation(of_name[name], name)),
            code(default(of_name[name], name)),
            help_of(of_name[name], name),
        )
        for name in names
    ]
    return table(("Name", "Type", "Default", "Meaning"), rows)


def extension_of(group: type, name: str) -> str:
    """Return the extension that a knob belongs to; empty: the core."""
    rules = rules_of(group).get(name)
    return rules.extension if rules and isinstance(rules.extension, str) else ""


def summary(extension: str) -> str:
    """Return the first paragraph of an extension's docstring."""
    text = inspect.getdoc(importlib.import_module(f"colograd.extensions.{extension}")) or ""
    return text.partition("\n\n")[0].replace("\n", " ")


def clause(name: str, when: When) -> str:
    """Format one side of a row: a setting, and which of its values."""
    if " " in name or not name:  # a fact
        return f"{name} {when.words.strip('`')}".strip()
    return f"{code(name)}{': ' if when.words.startswith('`') else ' '}{when.words}".strip()


def moving() -> str:
    """Write docs/trl.md: every field of TRL's GRPOConfig, and its treatment here.

    Raises:
        SystemExit: a field is neither known nor refused, or TRL isn't installed.
    """
    theirs = trl_fields()
    ours = own_names(GRPOConfig)
    if unaccounted := [name for name in theirs if name not in ours]:
        raise SystemExit(
            f"docs/generate.py: TRL has fields that GRPOConfig doesn't: {', '.join(unaccounted)}. Add them, and the "
            "reason to REFUSED or UNUSED in colograd/config/knob.py where they have no effect."
        )
    rows = []
    for name, their_default in theirs.items():
        our_default = default(GRPOConfig, name)
        differs = their_default is not None and their_default != our_default
        shown = code(our_default) + (f" (TRL: {code(their_default)})" if differs else "")
        if name in RENAMED:
            status, meaning = "renamed", f"The old name of `{RENAMED[name]}`, and read as that."
        elif name in UNUSED:
            status, meaning = "no effect", sentence(UNUSED[name])
        elif name in REFUSED:
            status, meaning = "refused", f"{sentence(REFUSED[name])} (The default may stay.)"
        else:
            status = "limited" if name in LIMITED else "supported"
            meaning = f"{help_of(GRPOConfig, name)} {LIMITED.get(name, '')}".rstrip()
        rows.append((f"`{name}`", status, shown, meaning))
    others = [(f"`{name}`", "refused", sentence(why)) for name, why in REFUSED.items() if name not in theirs]
    others += [(f"`{name}`", "no effect", sentence(why)) for name, why in UNUSED.items() if name not in theirs]
    parts = [
        NOTICE,
        MOVING,
        table(("Field", "", "Default", "Here"), rows),
        "## Metrics",
        "Names are TRL's, and so are meanings; in `evaluate` they begin with `eval_`, and those of the loss (entropy, "
        "ratios, `sampling/*`) come with its loss (`loss_eval`). What a step logs beside them is in the "
        "[metrics](metrics.md).",
        table(("TRL's metric", "", "Note"), metrics()),
        "## Attributes of the trainer",
        "What is public on a trainer of TRL's is there on this one, of the same type, but for these. Settings can't be "
        "set there (an error says so); lists, and the tensor `reward_weights`, are made when they are read, so writing "
        "into them changes nothing. Another dataset may be put in the place of `train_dataset` or `eval_dataset`, and "
        "is taken at the next `train` or `evaluate`.",
        table(("Attribute", "", "Instead"), attributes()),
        "## Methods of the trainer",
        "Nothing here calls these methods of TRL's and transformers' trainers. A subclass that defines one is an error "
        "that names the stage to override ([Replacing a stage](architecture.md#replacing-a-stage)).",
        table(("Method", "Instead"), [(f"`{name}`", in_code(stage)) for name, stage in HOOKS.items()]),
        "## Names from elsewhere in TRL",
        "Of its script's arguments, its command line, or older versions. All other arguments of its `grpo` script are "
        "taken: [Configuration](configuration.md).",
        table(("Name", "", "Reason"), others),
    ]
    return "\n\n".join(parts) + "\n"


def attributes() -> list[tuple[str, str, str]]:
    """Make a row for each public attribute of TRL's trainer that is absent here, or of another type."""
    absent = [(f"`{name}`", "absent", sentence(why)) for name, why in ABSENT.items()]
    return absent + [(f"`{name}`", "different", sentence(why)) for name, why in DIFFERENT.items()]


def metrics() -> list[tuple[str, str, str]]:
    """Make a row for each metric that TRL's GRPOTrainer logs, with whether the package logs one of that name.

    Raises:
        SystemExit: a metric is neither logged nor accounted for, or accounted for and logged.
    """
    rows, templates = [], metric_templates()
    for name in trl_metrics():
        ours = any(template.fullmatch(name) for template in templates)
        if ours == (name in OTHER_METRICS):
            raise SystemExit(
                f"docs/generate.py: TRL's metric {name} is {'logged' if ours else 'not logged'} here: "
                f"{'remove it from' if ours else 'say why in'} OTHER_METRICS of docs/generate.py."
            )
        shown = name.replace("{}", "<name>")
        rows.append(
            (f"`{shown}`", "yes" if ours else "no", sentence(OTHER_METRICS.get(name) or METRIC_NOTES.get(name)))
        )
    return rows


# -- the content of the sources


def trl_metrics() -> list[str]:
    """List the names that TRL's GRPOTrainer logs, as its source writes them, with `{}` for each inserted value."""
    source = (trl_folder() / "trainer" / "grpo_trainer.py").read_text(encoding="utf-8")
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Subscript):
            continue
        if ast.unparse(node.value.value) == "self._metrics" and (name := constant(node.slice)):
            found.append(name)
    return sorted(set(found))


def metric_templates() -> list[re.Pattern[str]]:
    """Find the texts of the package that may be a metric's name: keys and arguments, with `{}` standing for words. The
    configuration is left out, because its texts are names of knobs."""
    package = Path(sys.modules["colograd"].__file__ or "").parent
    files = [path for path in package.rglob("*.py") if path.parent.name != "config"]
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    places = [key for node in nodes if isinstance(node, ast.Dict) for key in node.keys if key is not None]
    places += [node.key for node in nodes if isinstance(node, ast.DictComp)]
    places += [node.slice for node in nodes if isinstance(node, ast.Subscript)]
    places += [argument for node in nodes if isinstance(node, ast.Call) for argument in node.args]
    texts = {text for place in places if (text := constant(place)) and re.search(r"[a-z]", text)}
    return [re.compile(re.escape(text).replace(r"\{\}", r"[\w/{}]+")) for text in texts]


def constant(node: ast.AST) -> str | None:
    """Return a text as it is written, with `{}` for each inserted value; None for any other node."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def declaring(group: type) -> list[type]:
    """List the classes of the package that declare the group's fields: the group, and its mixins."""
    ours = [cls for cls in group.__mro__ if cls.__module__.split(".")[0] == "colograd"]
    return [group, *(cls for cls in reversed(ours) if cls is not group)]


def declared(cls: type) -> list[str]:
    """List the fields that the class itself declares, in order. `dataclasses.fields` has the inherited ones too."""
    fields = {field.name for field in dataclasses.fields(cls) if field.init}
    return [name for name in inspect.get_annotations(cls) if name in fields]


def own_names(group: type) -> list[str]:
    """List the group's fields, except for fields that it inherits from transformers unchanged."""
    return [name for cls in declaring(group) for name in declared(cls)]


def sections(group: type) -> dict[str, list[str]]:
    """Map titles to names: a mixin is a section, and its docstring the title. Without mixins there is one section
    without a title."""
    first, *mixins = declaring(group)
    titles = {cls: (cls.__doc__ or "").splitlines()[0].rstrip(".") for cls in mixins}
    titles[first] = INHERITED if mixins else ""
    return {titles[cls]: declared(cls) for cls in (first, *mixins)}


def annotation(group: type, name: str) -> str:
    """Return the type as it is written (transformers' argument parser replaces `Field.type`)."""
    return next(str(inspect.get_annotations(cls)[name]) for cls in declaring(group) if name in declared(cls))


def field_of(group: type, name: str) -> dataclasses.Field:
    return next(field for field in dataclasses.fields(group) if field.name == name)


def default(group: type, name: str) -> str:
    field = field_of(group, name)
    return repr(field.default if field.default is not dataclasses.MISSING else field.default_factory())  # type: ignore[misc]


def help_of(group: type, name: str) -> str:
    """Return the field's help, for a page of docs/."""
    text = str(field_of(group, name).metadata["help"]).replace("%%", "%")
    return re.sub(r"([Ss]ee) docs/((?:guide/)?([\w-]+)\.md)", r"\1 [\3](\2)", text)


def trl_fields() -> dict[str, str | None]:
    """Map the fields that TRL's GRPOConfig declares to their defaults' texts (None if it isn't a plain value)."""
    source = (trl_folder() / "trainer" / "grpo_config.py").read_text(encoding="utf-8")
    body = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "GRPOConfig").body
    return dict(_field(node) for node in body if isinstance(node, ast.AnnAssign))


def trl_folder() -> Path:
    """Find the folder of the installed TRL without importing it."""
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(f"docs/generate.py: docs/trl.md is made from the package trl: pip install 'trl>={TRL}'")
    return Path(spec.submodule_search_locations[0])


def _field(node: ast.AnnAssign) -> tuple[str, str | None]:
    assert isinstance(node.target, ast.Name), ast.unparse(node)
    keywords = {k.arg: k.value for k in node.value.keywords} if isinstance(node.value, ast.Call) else {}
    try:
        return node.target.id, repr(ast.literal_eval(keywords["default"]))
    except (KeyError, ValueError):
        return node.target.id, None


# -- Markdown


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def code(text: str) -> str:
    return f"`{text}`"


def in_code(names: str) -> str:
    """Mark each name of "a, b and c" as code."""
    return re.sub(r"\b(?!and\b)\w+", r"`\g<0>`", names)


def sentence(text: str | None) -> str:
    if not text:
        return ""
    first = text.split()[0]  # may be a field's name
    return f"{first.capitalize() if first.isalpha() else first}{text[len(first) :]}."


def alarms() -> str:
    """Write the page of the advisor's rules."""
    rows = [
        (f"`{rule.name}`", f"{rule.when}.", rule.why, rule.remedy, f"[{source_name(rule.source)}]({rule.source})")
        for rule in RULES
    ]
    return between(
        "metrics.md",
        OF_ALARMS,
        f"{ALARMS}\n\n{table(('Rule', 'Raised when', 'Why', 'What to change', 'Source'), rows)}",
    )


def models() -> str:
    """Write the page of model families, with fresh tables."""
    record = json.loads((DOCS / "models.json").read_text(encoding="utf-8"))
    return between("models.md", FAMILIES, families_table(record))


def design() -> str:
    """Write the page of the design, with a fresh list of the places that only a GPU runs."""
    ways = tomllib.loads((ROOT / "tests/helpers/cuda_places.toml").read_text(encoding="utf-8"))
    counts = {
        way: sum(each["places"] if isinstance(each, dict) else each for each in ways[way].values()) for way in ways
    }
    rows = [(code(f"colograd/{file}"), code(function), ways["gpu"][place]["why"])
            for place in sorted(ways["gpu"]) for file, _, function in [place.partition(" ")]]  # fmt: skip
    text = (
        f"`tests/helpers/cuda_places.toml` lists the {sum(counts.values())} places of the package that check the "
        "device (`on_cpu`, `.is_cuda`, `device.type`, `torch.cuda`), and a test fails for a place without an entry. "
        f"Of these, {counts['device']} run on the device in host memory, {counts['fake']} on CUDA tensors without "
        f"numbers, {counts['v2']} by Model Runner V2, and {counts['arguments']} in tests that describe a GPU in "
        f"arguments. The other {counts['gpu']} need a GPU:"
    )
    return between("design.md", PLACES, f"{text}\n\n{table(('File', 'Function', 'Why'), rows)}")


def between(name: str, markers: tuple[str, str], text: str) -> str:
    """Replace the text between two markers of a page."""
    page = (DOCS / name).read_text(encoding="utf-8")
    before, _, rest = page.partition(markers[0])
    _, _, after = rest.partition(markers[1])
    return f"{before}{markers[0]}\n\n{text}\n\n{markers[1]}{after}"


def families_table(record: dict[str, Any]) -> str:
    """Make a row per tried family and a column per topic; a cell has the notes of its tests, or yes."""
    columns, rows = record["columns"], []
    for family, found in record["tried"].items():
        cells = [found.get(column, {}) for column in columns]
        said = [
            "; ".join(sorted({text for text in cell.values() if text})) or ("yes" if cell else "") for cell in cells
        ]
        rows.append((record["families"][family], *said))
    return table(("Family", *columns.values()), rows)


def source_name(url: str) -> str:
    """Return the link text for a source."""
    paper = re.fullmatch(r"https://arxiv.org/abs/(.+)", url)
    return f"arXiv {paper[1]}" if paper else url.split("/")[2]


def pages() -> Iterator[tuple[Path, str]]:
    yield DOCS / "configuration.md", configuration()
    yield DOCS / "design.md", design()
    yield DOCS / "metrics.md", alarms()
    yield DOCS / "models.md", models()
    yield DOCS / "trl.md", moving()


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages, or check them. Return the exit status."""
    parser = argparse.ArgumentParser(prog="docs/generate.py", description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit status 1 if a page is stale")
    check = parser.parse_args(argv).check
    stale: list[Any] = []
    for path, text in pages():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path.name)
        if not check:
            path.write_text(text, encoding="utf-8")
    if stale:
        print(f"docs/generate.py: {'stale (run make docs)' if check else 'written'}: {', '.join(stale)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
