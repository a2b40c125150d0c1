"""`knob` declares a setting with rules for its value."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..runtime import registry
from ..runtime.importing import is_import_path


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules for the value of one setting. The value None isn't checked."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    remedy: str = "raise it"
    one_of: tuple[str, ...] = ()
    or_path: bool = False
    note: str = ""  # Text that follows "isn't supported" in the error for a bad value.
    spellings: Mapping[str, Any] = field(default_factory=dict)  # Alternative spelling in lower case -> value.

    # Name of the extension that all values but the default need, or a mapping from values to extensions.
    extension: str | Mapping[str, str] = ""

    def plain(self, value: Any) -> Any:
        return self.spellings.get(str(value).lower(), value) if self.spellings else value

    def check(self, name: str, value: Any) -> None:
        if value is None:
            return
        for one in value if self.one_of and isinstance(value, list) else [value]:
            if self.one_of and one not in self.one_of and not (self.or_path and is_import_path(str(one))):
                own = ", or give the import path of your own class, package.module:Class" if self.or_path else ""
                choices = ", ".join(self.one_of)
                raise ValueError(f"`{name}` {one!r} isn't supported{self.note}: choose one of {choices}{own}.")
        low, high = (self.above if self.at_least is None else self.at_least, self.at_most or self.below)
        if low is None:
            return
        inside = isinstance(value, int | float) and value >= low and value != self.above
        if not (inside and (high is None or (value <= high and value != self.below))):  # NaN is out of bounds.
            must_be = f"{'above' if self.at_least is None else 'at least'} {low:g}"
            if high is not None:
                begin, end = "(" if self.at_least is None else "[", ")" if self.at_most is None else "]"
                must_be = f"in {begin}{low:g}, {high:g}{end}"
            raise ValueError(f"`{name}` is {value!r}, but must be {must_be}: {self.remedy}.")


class Help(str):
    """A setting's help text that also carries its `Rules`.

    The rules can't be in the field's metadata, because the parser passes all metadata to argparse.
    """

    rules: Rules


def knob(default: Any, meaning: str = "", **words: Any) -> Any:
    """Declare a dataclass field for a setting.

    Args:
        meaning: the help text. If it is empty, the decorator `names_checked` takes the string below the field.
        words: fields of `Rules`, and keyword arguments of argparse's `add_argument`.
    """
    text = Help(meaning)
    text.rules = Rules(**{name: words.pop(name) for name in Rules.__annotations__ if name in words})
    metadata = {"help": text, **words}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


agents = functools.partial(knob, extension="agents")
distillation = functools.partial(knob, extension="distillation")
quantized = functools.partial(knob, extension="quantized")
recording = functools.partial(knob, extension="recording")
reference = functools.partial(knob, extension="reference")
tools = functools.partial(knob, extension="tools")


def rules_of(group: Any) -> dict[str, Rules]:
    meanings = {each.name: each.metadata.get("help") for each in dataclasses.fields(group)}
    return {name: text.rules for name, text in meanings.items() if isinstance(text, Help)}


def check_values(group: Any) -> None:
    """Replace alternative spellings in a dataclass of settings. Raise a ValueError for the first bad value."""
    rules_by_name = rules_of(group)
    for each in dataclasses.fields(group):
        if (rules := rules_by_name.get(each.name)) is None:
            continue
        value = rules.plain(getattr(group, each.name))
        setattr(group, each.name, value)
        extension = rules.extension if isinstance(rules.extension, str) else rules.extension.get(str(value), "")
        if extension and value not in (each.default, None, []):
            registry.require(extension, f"`{each.name}: {shown(value)}`")
        rules.check(each.name, value)


def shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


# Refused name -> what to do instead. The names are from TRL's configuration, command line and older versions.
# A field of `GRPOConfig` with such a name may keep TRL's default.
REFUSED: dict[str, str] = {
    "cache_implementation": "generation always runs in vLLM; remove it",
    "use_transformers_continuous_batching": "generation always runs in vLLM; remove it",
    "transformers_continuous_batching_config": "generation always runs in vLLM; remove it",
    "use_transformers_paged": "generation always runs in vLLM; remove it",
    "accelerate_config": "start with `accelerate launch --config_file FILE colograd/train.py --config RECIPE` instead",
    "num_processes": "start with `accelerate launch --num_processes N colograd/train.py --config RECIPE` instead",
    "max_prompt_length": "removed by TRL too: see max_prompt_tokens and overlong_prompts",
}
# Setting of TRL or transformers that has no effect -> reason. A value other than the default gets a log line.
UNUSED: dict[str, str] = {
    "use_vllm": "generation always runs in vLLM, in the trainer's process",
    "ds3_gather_for_generation": "it is about ZeRO-3",
    "pad_to_multiple_of": "rows are packed and never padded",
    **dict.fromkeys(
        ("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port"),
        "there is no server (TRL's colocated mode doesn't read it either)",
    ),
    "ignore_bias_buffers": "gradients aren't synchronised by DDP (TRL's grpo script doesn't read it either)",
    "torch_empty_cache_steps": "rows are cut to what the device has",
    "dataloader_num_workers": "prompts are tokenised and shared out without torch's loader",
}
INERT = (("max_prompt_length", None),)  # Pairs (removed setting, a value of it that is ignored without an error).

# transformers accepts None for these settings, although their types exclude None.
NONE_IS_OFF = ("max_grad_norm",)

RENAMED = {"vllm_importance_sampling_cap": "vllm_importance_sampling_clip_max"}  # Old name -> present name.
MEANINGS = {name: f"No effect: {reason}." for name, reason in UNUSED.items()}
MEANINGS |= {name: f"Another value is an error: {reason}." for name, reason in REFUSED.items()}
MEANINGS |= {name: f"The old name of `{present}`." for name, present in RENAMED.items()}


def unknown_name(name: str, known: Iterable[str]) -> str:
    if name in REFUSED:
        return f"`{name}` isn't supported: {REFUSED[name]}."
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    hint = f" Did you mean `{near[0]}`?" if near else " docs/configuration.md lists every key."
    return f"Unknown configuration key `{name}`.{hint}"


def known_settings(settings: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    for name, value in settings.items():
        if name not in known and (name, value) not in INERT:
            raise ValueError(unknown_name(name, known))
    return {name: value for name, value in settings.items() if name in known}


def without_nones(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Drop each setting that is None and has an entry in ``defaults``, because None then means the default.

    Return the remaining settings, and a log line per dropped setting.
    """
    unset = [name for name, value in settings.items() if value is None and name in defaults]
    lines = [f"config: `{name}` is None, which means its default, {defaults[name]!r}" for name in unset]
    return {name: value for name, value in settings.items() if name not in unset}, lines


def never_none(cls: type) -> dict[str, Any]:
    annotations: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        annotations |= inspect.get_annotations(base)
    return {
        each.name: each.default
        for each in dataclasses.fields(cls)
        if each.default not in (None, dataclasses.MISSING, "")  # The parser passes None for "".
        and each.name not in NONE_IS_OFF
        and not any(word in str(annotations[each.name]) for word in ("None", "Optional", "Any"))
    }


def _complete_help(cls: type) -> None:
    """Set each empty help text to the string below the field in the source, or to the field's text in `MEANINGS`."""
    meanings = dict(MEANINGS)
    for module in {base.__module__ for base in cls.__mro__ if base.__module__.startswith(f"{__package__}.")}:
        for group in ast.parse(inspect.getsource(sys.modules[module])).body:
            for pair in itertools.pairwise(group.body if isinstance(group, ast.ClassDef) else ()):
                match pair:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        meanings[name] = " ".join(text.split())
    for each in dataclasses.fields(cls):
        if each.metadata.get("help") == "":
            help_text = Help(meanings[each.name])
            help_text.rules = each.metadata["help"].rules
            each.metadata = types.MappingProxyType({**each.metadata, "help": help_text})


T = TypeVar("T")


def names_checked(cls: type[T]) -> type[T]:
    """Decorate a dataclass of settings. Its constructor raises a ValueError for a keyword that isn't a setting.

    If a setting can't be None, the constructor replaces None by the setting's default. Each instance lists these
    replacements in ``notes``, one log line per setting.
    """
    _complete_help(cls)
    plain_init, defaults = cls.__init__, never_none(cls)

    @functools.wraps(plain_init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        known = {f.name for f in dataclasses.fields(cls) if f.init}  # type: ignore[arg-type]
        kwargs, self.notes = without_nones(known_settings(kwargs, known), defaults)
        plain_init(self, *args, **kwargs)

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls
