"""Write the generated pages: docs/configuration.md from the configuration's help, the fields in docs/trl.md from TRL's
source, the alarms in docs/metrics.md from the advisor's rules, the table in docs/models.md from the test results in
docs/models.json, the list in docs/design.md from tests/helpers/cuda_places.toml.

    python docs/generate.py            (make docs)
    python docs/generate.py --check    exit status 1 if a page is stale

TRL is read from the installed package's source and not imported.
"""

from __future__ import annotations

import argparse
import ast
import configparser
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
from colograd.config.conflicts import Conflict, When, tables
from colograd.config.knob import REFUSED, RENAMED, UNUSED, rules_of
from colograd.extensions import EXTENSIONS
from colograd.extensions.recording.advisor import LEAST, QUIET, RULES, TEXTS, WINDOW
from colograd.extensions.trl_names.attributes import ABSENT, DIFFERENT, HOOKS

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
TRL = "1.16"  # the page covers this version's fields
NOTICE = "<!-- Written by docs/generate.py (make docs): change the sources it reads, not this page. -->"

# Fields of TRL's GRPOConfig that accept only some of TRL's values, with a note that their help lacks.
LIMITED = {
    "vllm_mode": "",
    "vllm_tensor_parallel_size": "",
    "model_init_kwargs": "An error next to a model object; TRL ignores it with a warning.",
    "max_completion_length": "`None`, in TRL the whole context, is an error, because memory is planned by it.",
    "steps_per_generation": "Must be a multiple of `gradient_accumulation_steps`, or a divisor (`num_iterations: 1`). "
    "`max_steps` must be a multiple of the steps of a generation (TRL ends in the middle).",
    "generation_batch_size": "A multiple or a divisor of the completions of one optimizer step.",
    "num_iterations": "`max_steps` must be a multiple of the steps of a generation (TRL ends in the middle).",
}

# Metrics that TRL logs and this version doesn't, with the reason.
OTHER_METRICS: dict[str, str] = {}
# Notes on metrics that have TRL's name.
METRIC_NOTES = {
    "frac_reward_zero_std": "By group with every `scale_rewards` (TRL: of the batch with `batch`)",
    "completions/clipped_ratio": "From vLLM: a stop string or stop token also ends a completion",
    "completions/mean_terminated_length": "Left out where none ended (TRL logs 0)",
    "completions/min_terminated_length": "Left out where none ended (TRL logs 0)",
    "completions/max_terminated_length": "Left out where none ended (TRL logs 0)",
    "cispo_clip_ratio": "All tokens; TRL counts only positive advantages",
    "aux_loss": "Mean of micro-batches by tokens; logged with a coefficient of 0 too",
    "step_time": "The whole step; `time/*` are its phases",
}

# Around what is written into docs/metrics.md, docs/design.md and docs/models.md.
OF_ALARMS = ("<!-- alarms: written by docs/generate.py -->", "<!-- end of alarms -->")
PLACES = ("<!-- places: written by docs/generate.py -->", "<!-- end of places -->")
FIELDS = ("<!-- fields: written by docs/generate.py -->", "<!-- end of fields -->")
FAMILIES = ("<!-- families: written by docs/generate.py -->", "<!-- end of families -->")

ALARMS = f"""A run checks its metrics while it trains. An alarm appears once on the console, in the logger `colograd`,
in `_report/events.jsonl` and at the top of the report, with the numbers, the reason and the keys to change. "The last
steps" are {WINDOW}; most rules need at least {LEAST}. An alarm ends after {QUIET} steps without its cause.
`report: false` turns alarms off. The rules are functions in `colograd/extensions/recording/advisor.py`."""

CONFIGURATION = """# Configuration

Every key of a recipe, flag of the command line and argument in Python. A recipe is a flat YAML mapping:

```bash
colograd train --config recipes/grpo_smollm2_cpu.yaml --learning_rate 2e-5 --vllm_engine_kwargs.max_num_seqs 32
```

A flag overrides the recipe. `--field.key value` sets one entry of a mapping. An unknown key is an error that names the
nearest known one. Fields of `transformers.TrainingArguments` (`output_dir`, `max_steps`, `lr_scheduler_type`,
`save_steps`, `report_to`, `seed` …) apply as well. Fields that only exist for TRL's files are on
[TRL's page](trl.md#fields).

## Batch size

An optimizer step takes `prompts_per_step` prompts over all ranks, with `num_generations` completions each. TRL's form
is taken too: `per_device_train_batch_size * gradient_accumulation_steps * ranks` completions. A group is sampled on
one rank. Micro-batches are cut by `max_tokens_per_microbatch`; the update doesn't depend on where.

## Precision

The policy is bfloat16 by default. `optim: auto` then is `adamw_split`: AdamW on an exact float32 master, kept as the
bfloat16 parameter and a 16-bit remainder. Gradients accumulate in float32. With `dtype: float32` the forward is
bfloat16 by autocast, or float32 with `bf16: false`.

`optim: muon` is [Muon](https://kellerjordan.github.io/posts/muon/) for the matrices of the decoder's layers, on the
same kind of master: torch's step, bit for bit, with momentum 0.95 and AdamW's step size
([arXiv 2502.16982](https://arxiv.org/abs/2502.16982)), so one `learning_rate` serves all. Embedding, head, norms,
biases and stacked experts use `adamw_split`. A matrix has 6 bytes of state per element, AdamW 10. Muon needs whole
matrices and no adapter.

## Memory

A run starts with a table of each rank's memory while it samples and while it trains. On a GPU the KV cache takes the
rest: 92 % of the GPU minus weights, gradients, optimizer and a micro-batch, at most the need of one generation, at
least one full sequence. `vllm_gpu_memory_utilization` overrides that ([out of memory](guide/out-of-memory.md)). On a
CPU a run that doesn't fit gets a line, not an error."""

GROUPS = (
    (GRPOConfig, "The run: `GRPOConfig`", "Fields of Colograd, and fields of transformers with another default."),
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
START = "A first recipe sets these, and `output_dir`, `max_steps` and `save_steps` of transformers."
CONFLICTS = (
    "A start with one of these pairs ends with an error that names both settings, the reason and the remedy. Rows with "
    "one setting refuse its value. Pairs that depend on the model or the number of ranks have errors of their own."
)

OF_TRL = "Settings that only TRL's recipes have"  # the section of fields that docs/trl.md alone lists
INHERITED = "Defaults that differ from TrainingArguments (as in TRL, except `optim`)"  # GRPOConfig's own section


def configuration() -> str:
    """Write docs/configuration.md: a newcomer's knobs, then the core's by topic, then each extension's, and the
    settings that exclude each other."""
    of_name = {name: group for group, _, _ in GROUPS for name in own_names(group)}
    parts = [NOTICE, CONFIGURATION, "## The first thirty", START, knobs(of_name, FIRST)]
    for group, title, note in GROUPS:
        parts += [f"## {title}", note]
        for section, names in sections(group).items():
            if section == OF_TRL:
                continue
            core = [name for name in names if name not in FIRST and not extension_of(group, name)]
            parts += [f"### {section}"] if section and core else []
            parts += [knobs(of_name, core)] if core else []
    parts.append("## Extensions")
    for extension in EXTENSIONS:
        names = [name for name, group in of_name.items() if extension_of(group, name) == extension]
        parts += [f"### Extension {code(extension)}", summary(extension), knobs(of_name, names)] if names else []
    parts += ["## Settings that exclude each other", CONFLICTS, conflicts()]
    return "\n\n".join(parts) + "\n"


def conflicts() -> str:
    """Make the table of all settings that exclude each other. Settings with the same counterpart, reason and remedy
    share a row."""
    rows: dict[tuple[str, str, str], list[Conflict]] = {}
    for row in (row for part in tables().values() for row in part):
        remedy = re.sub(rf"\b{re.escape(row.other)}\b", "the other", row.remedy) if row.other else row.remedy
        rows.setdefault((clause(row.field, row.when), row.reason, remedy), []).append(row)
    cells = []
    for (setting, reason, remedy), same in rows.items():
        others = ", ".join(clause(row.other, row.other_when) for row in same)
        cells.append((setting, others, reason, remedy if len(same) > 1 else same[0].remedy))
    return table(("Setting", "Not with", "Reason", "Remedy"), cells)


def knobs(of_name: dict[str, type], names: Sequence[str]) -> str:
    """Make the table of some knobs. A default of None stands with the type."""
    rows = []
    for name in names:
        group = of_name[name]
        shown = code(default(group, name))
        if shown == "`None`":
            shown += f" ({code(annotation(group, name).removesuffix(' | None').removesuffix(' | str'))})"
        rows.append((code(name), shown, help_of(group, name)))
    return table(("Name", "Default", "Meaning"), rows)


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
    rows, same = [], []
    for name, their_default in theirs.items():
        our_default = default(GRPOConfig, name)
        differs = their_default is not None and their_default != our_default
        shown = code(our_default) + (f" (TRL: {code(their_default)})" if differs else "")
        if name in RENAMED:
            status, meaning = "renamed", f"The old name of `{RENAMED[name]}`."
        elif name in UNUSED:
            status, meaning = "no effect", sentence(UNUSED[name])
        elif name in REFUSED:
            status, meaning = "refused", sentence(REFUSED[name])
        elif name in LIMITED:
            status, meaning = "limited", f"{help_of(GRPOConfig, name)} {LIMITED[name]}".rstrip()
        elif differs:
            status, meaning = "default", help_of(GRPOConfig, name)
        else:
            same.append(code(name))
            continue
        rows.append((code(name), status, shown, meaning))
    others = [(f"`{name}`", "refused", sentence(why)) for name, why in REFUSED.items() if name not in theirs]
    others += [(f"`{name}`", "no effect", sentence(why)) for name, why in UNUSED.items() if name not in theirs]
    parts = [
        f"These fields, which TRL {TRL} adds to `transformers.TrainingArguments`, have TRL's meaning and default: "
        f"{', '.join(same)}.",
        "The others: *default*: TRL's meaning, another default. *Limited*: not all of TRL's values. *No effect*: any "
        "value is taken, and a line at start names it. *Refused*: any value except TRL's default is an error.",
        table(("Field", "", "Default", "Here"), rows),
        "## Metrics",
        "Names and meanings are TRL's, with these notes; [metrics](metrics.md) lists all. In `evaluate` they begin "
        "with `eval_`; metrics of the loss need `loss_eval`.",
        table(("TRL's metric", "", "Note"), metrics()),
        "## Attributes of the trainer",
        "Public attributes of TRL's trainer exist with TRL's types, except for these. They show settings and can't be "
        "set. `train_dataset` and `eval_dataset` may be replaced between two calls of `train` or `evaluate`.",
        table(("Attribute", "", "Instead"), attributes()),
        "## Methods of the trainer",
        "Colograd never calls these methods. A subclass that defines one is an error that names the stage to override.",
        table(("Instead of", "Override"), methods()),
        "## Names from elsewhere in TRL",
        "Arguments of TRL's script, of its command line and of older versions. All others are taken "
        "([configuration](configuration.md)).",
        table(("Name", "", "Reason"), others),
    ]
    return between("trl.md", FIELDS, "\n\n".join(parts))


def methods() -> list[tuple[str, str]]:
    """Make a row for each stage, with the methods that it replaces."""
    stages: dict[str, list[str]] = {}
    for name, stage in HOOKS.items():
        stages.setdefault(stage, []).append(code(name))
    return [(", ".join(names), in_code(stage)) for stage, names in stages.items()]


def attributes() -> list[tuple[str, str, str]]:
    """Make a row for each public attribute of TRL's trainer that is absent here, or of another type."""
    absent: dict[str, list[str]] = {}
    for name, why in ABSENT.items():
        absent.setdefault(why, []).append(code(name))
    rows = [(", ".join(names), "absent", sentence(why)) for why, names in absent.items()]
    return rows + [(f"`{name}`", "different", sentence(why)) for name, why in DIFFERENT.items()]


def metrics() -> list[tuple[str, str, str]]:
    """Make a row for each metric of TRL's GRPOTrainer that is absent here or has a note.

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
        if why := OTHER_METRICS.get(name) or METRIC_NOTES.get(name):
            rows.append((code(name.replace("{}", "<name>")), "yes" if ours else "no", sentence(why)))
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
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in (header, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(header), *lines[1:]])


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
        (f"`{name}`", f"{text['when']}.", text["remedy"], f"[{source_name(text['source'])}]({text['source']})")
        for name, text in ((name, TEXTS[name]) for name in RULES)
    ]
    return between(
        "metrics.md",
        OF_ALARMS,
        f"{ALARMS}\n\n{table(('Rule', 'Raised when', 'Change', 'Source'), rows)}",
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
        "device (`on_cpu`, `.is_cuda`, `device.type`, `torch.cuda`), and a test fails for a place without an entry: "
        f"{counts['device']} run on the device in host memory, {counts['fake']} on CUDA tensors without "
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
    """Make a row per family and a column per topic. A cell has the notes of its tests, or yes. Equal rows are one."""
    columns = record["columns"]
    families: dict[tuple[str, ...], list[str]] = {}
    for family, topics in record["tried"].items():
        cells = [topics.get(column, {}) for column in columns]
        words = [
            "; ".join(sorted({text for text in cell.values() if text})) or ("yes" if cell else "") for cell in cells
        ]
        families.setdefault(tuple(words), []).append(record["families"][family])
    rows = [(", ".join(names), *words) for words, names in families.items()]
    return table(("Family", *columns.values()), rows)


def source_name(url: str) -> str:
    """Return the link text for a source."""
    paper = re.fullmatch(r"https://arxiv.org/abs/(.+)", url)
    return f"arXiv {paper[1]}" if paper else url.split("/")[2]


def with_address(page: Path) -> str:
    """Return the text of README.md or of a notebook with setup.cfg's address of the repository."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    place = r'(?<=git clone )\S+(?= colograd)|(?<=REPOSITORY = \\")[^"\\]+'
    return re.sub(place, lambda _: setup["metadata"]["url"], page.read_text(encoding="utf-8"))


def pages() -> Iterator[tuple[Path, str]]:
    for page in (ROOT / "README.md", *sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))):
        yield page, with_address(page)
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
