"""Read a YAML recipe and a command line into `ScriptArguments`, `GRPOConfig` and `ModelConfig`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser

from ..runtime.shipped import file_or_shipped, is_shipped, near_names
from .grpo import GRPOConfig
from .knob import UNUSED, known_settings, never_none, rules_of, unknown_name, without_nones
from .script import ModelConfig, ScriptArguments

GROUPS = (ScriptArguments, GRPOConfig, ModelConfig)
KNOWN = {each.name for group in GROUPS for each in dataclasses.fields(group) if each.init}
MAPPINGS = (*GRPOConfig._VALID_DICT_FIELDS, "dataset_kwargs")


def parse_arguments(argv: Sequence[str]) -> tuple[ScriptArguments, GRPOConfig, ModelConfig, Path | None]:
    """Parse ``--config RECIPE`` and ``--any_flag value``. Return the three configurations, and the recipe's path.

    RECIPE is the path of a YAML file, or the name of a recipe that comes with Colograd. A flag overrides the recipe.
    ``--dict_field.key value`` sets one entry of a mapping. The recipe's mapping ``env`` goes into `os.environ`.
    """
    settings, argv, recipe = _settings(argv)
    parser = _parser()
    parser.set_defaults(**settings)  # YAML 1.1 reads ``1e-5`` as a text, but argparse converts defaults that are texts.
    _flags(parser, argv)  # For a bad flag this raises a ValueError. `parse_args_into_dataclasses` would exit.
    script, config, model = parser.parse_args_into_dataclasses(args=argv, look_for_args_file=False)
    shipped = [f"recipe: {recipe}, which comes with Colograd"] if recipe and is_shipped(recipe) else []
    if script.ignore_bias_buffers:
        shipped.append(f"config: `ignore_bias_buffers` has no effect: {UNUSED['ignore_bias_buffers']}")
    config.notes = [*shipped, *config.notes]
    return script, config, model, recipe


def given_settings(argv: Sequence[str]) -> dict[str, Any]:
    """Return the settings that a command line and its recipe set, converted to JSON types. Values aren't checked."""
    settings, rest, recipe = _settings(argv)
    parser = _parser()
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    variables = _read_yaml(recipe).get("env") if recipe else None
    values = settings | _flags(parser, rest) | ({"env": variables} if variables else {})
    plain: dict[str, Any] = json.loads(json.dumps(values, default=lambda value: str(getattr(value, "value", value))))
    return plain


def planned_settings(argv: Sequence[str]) -> dict[str, Any]:
    """Return all settings, with defaults. Values aren't checked, because the run may be for another machine."""
    settings, rest, _ = _settings(argv)
    for group in GROUPS:
        settings, _ = without_nones(settings, never_none(group))
    parser = _parser()
    parser.set_defaults(**settings)
    rules = {name: of_one for group in GROUPS for name, of_one in rules_of(group).items()}
    values = _flags(parser, rest)
    return {name: rules[name].plain(value) if name in rules else value for name, value in values.items()}


def flags_help() -> str:
    return _parser().format_help().partition("options:\n")[2]


def _parser() -> HfArgumentParser:
    return HfArgumentParser(list(GROUPS), allow_abbrev=False, exit_on_error=False, prog="colograd train")


def _flags(parser: HfArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    try:
        values, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise ValueError(f"{error}. docs/configuration.md lists every key with its type.") from None
    if unknown:
        raise ValueError(unknown_name(unknown[0].lstrip("-").split("=")[0], KNOWN))
    return vars(values)


def _settings(argv: Sequence[str]) -> tuple[dict[str, Any], list[str], Path | None]:
    rest: list[str] = []
    nested: dict[str, dict[str, Any]] = {}
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if not (flag.startswith("--") and "." in flag):
            rest.append(word)
            continue
        name, _, key = flag[2:].partition(".")
        text = value if equals else next(words, None)
        if text is None:
            raise ValueError(f"{flag} needs a value: write the value after the flag.")
        nested.setdefault(name, {})[key] = yaml.safe_load(text)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", type=Path)
    try:
        options, rest = parser.parse_known_args(rest)
    except argparse.ArgumentError:
        raise ValueError("--config needs a value: a YAML file, or a name that `colograd recipes` lists.") from None
    recipe = options.config and file_or_shipped(options.config)
    settings = _read_yaml(recipe) if recipe else {}
    variables = settings.pop("env", None) or {}
    if not isinstance(variables, dict):
        raise ValueError(f"env is {variables!r}, but must be a mapping: write `NAME: value` lines.")
    os.environ.update({str(name): str(value) for name, value in variables.items()})
    settings = known_settings(settings, KNOWN)
    for name, entries in known_settings(nested, KNOWN).items():
        flag = f"--{name}.{next(iter(entries))}"
        if name not in MAPPINGS:
            raise ValueError(f"{flag} sets an entry of a mapping, but {name} isn't a mapping: use --{name}.")
        if any(word.partition("=")[0] == f"--{name}" for word in rest):
            raise ValueError(f"--{name} and {flag} are both given: give one of the two.")
        present = settings.get(name)
        with contextlib.suppress(ValueError):
            present = json.loads(present) if isinstance(present, str) else present  # as TRL's recipes may write it
        if present is not None and not isinstance(present, dict):
            raise ValueError(f"{flag} sets one entry, but {name} is {present!r} in the recipe: write a mapping there.")
        settings[name] = (present or {}) | entries
    return settings, rest, recipe


def _read_yaml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(
            f"The recipe {str(path)!r} doesn't exist: give the path of a YAML file, or a name that `colograd recipes` "
            f"lists ({near_names(path)})."
        )
    try:
        settings = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"The recipe {str(path)!r} isn't valid YAML: mend it. ({error})") from None
    if not isinstance(settings, dict):
        raise ValueError(
            f"The recipe {str(path)!r} must be a mapping, not a {type(settings).__name__}: write `key: value` lines."
        )
    return settings
