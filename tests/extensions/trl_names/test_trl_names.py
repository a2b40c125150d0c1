"""TRL's attributes of a trainer, and TRL's methods that a subclass may override."""

from __future__ import annotations

import ast
import inspect
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import tiny

from colograd import GRPOConfig, GRPOTrainer
from colograd.extensions.reference.model import FrozenCopy, OfAdapter
from colograd.extensions.trl_names.attributes import ABSENT, DIFFERENT, HOOKS, OF_ARGUMENTS, TRLNames
from colograd.losses.entropy import EntropyController
from colograd.losses.objective import BONUS_ENTROPY
from colograd.reporting.console import Console
from colograd.rewards import resolve_rewards
from colograd.rollout.features import SourceFeature

LEVELS = ("INFO", "WARNING")


class Bare(TRLNames):
    """TRL's names without a real trainer, on fakes of its attributes."""

    def __init__(self, args: Any, reference: Any = None) -> None:
        self.args, self.feature = args, SourceFeature()
        self.rewards = resolve_rewards([tiny.vowels, len], [2.0, 1.0])
        self.estimator = SimpleNamespace(weights=[2.0, 1.0])
        self.learner = SimpleNamespace(
            second_models={} if reference is None else {"ref_logprobs": reference}, entropy=EntropyController(args)
        )


def test_attributes_of_trl_are_there_under_its_names(tmp_path) -> None:
    bare = Bare(tiny.config(tmp_path, num_generations_eval=2, epsilon=0.1))
    assert (bare.num_generations, bare.num_generations_eval, bare.max_completion_length) == (4, 2, 12)
    assert (bare.epsilon_low, bare.epsilon_high, bare.beta, bare.temperature) == (0.1, 0.1, 0.0, 1.0)
    assert bare.reward_funcs == [tiny.vowels, len] and bare.reward_func_names == ["vowels", "len"]
    assert bare.reward_weights.tolist() == [2.0, 1.0] and bare.reward_processing_classes == [None, None]
    assert bare.tools == [] and bare.environments is None and bare.environment_factories is None
    for name in (*OF_ARGUMENTS, "chat_template", "pad_to_multiple_of"):
        getattr(bare, name)


def test_the_coefficient_of_the_entropy_is_the_present_one(tmp_path) -> None:
    bare = Bare(tiny.config(tmp_path, use_adaptive_entropy=True, entropy_coef=0.1, entropy_target=1.0))
    assert bare.entropy_coef == 0.1
    bare.learner.entropy.finish({BONUS_ENTROPY: 0.5}, loss=0.0)
    assert bare.entropy_coef == pytest.approx(0.1 + bare.args.entropy_coef_delta)


@pytest.fixture(scope="module")
def both(tiny_model, tmp_path_factory) -> Any:
    """TRL's trainer, which generates with transformers, and our trainer with the same arguments."""
    trl = pytest.importorskip("trl")
    folder = tmp_path_factory.mktemp("both")
    given: dict[str, Any] = {"num_generations": 4, "per_device_train_batch_size": 4, "max_completion_length": 8}
    given |= {"bf16": False, "report_to": "none", "use_cpu": True, "log_completions": True, "max_steps": 1}
    datasets = {"train_dataset": tiny.prompts(), "eval_dataset": tiny.prompts(2)}
    theirs = trl.GRPOTrainer(str(tiny_model), tiny.vowels, trl.GRPOConfig(str(folder / "a"), **given), **datasets)
    model_init_kwargs = {"dtype": "float32"}
    more = {"model_init_kwargs": model_init_kwargs, "disable_tqdm": True, "loss_type": "luspo", "pad_to_multiple_of": 8}
    args = GRPOConfig(str(folder / "b"), **more, **given)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("colograd")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    ours = GRPOTrainer(str(tiny_model), tiny.vowels, args, **datasets)
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    ours.logged_at_start = records
    yield theirs, ours
    ours.close()


@pytest.mark.engine
def test_every_public_attribute_of_trls_trainer_is_there_with_its_type(both: Any) -> None:
    theirs, ours = both
    public = {name: value for name, value in vars(theirs).items() if not name.startswith("_")}
    assert len(public) > 70
    absent = {name for name in public if not hasattr(ours, name)}
    assert absent <= ABSENT.keys()
    different = {name for name in public.keys() - absent if type(getattr(ours, name)) is not type(public[name])}
    assert different <= DIFFERENT.keys(), {name: (getattr(ours, name), public[name]) for name in different}


@pytest.mark.engine
def test_what_trl_logs_is_logged(both: Any) -> None:
    """TRL warns of luspo with ratios of tokens; fields without an effect are ours to name."""
    said = {level: [r.getMessage() for r in both[1].logged_at_start if r.levelname == level] for level in LEVELS}
    assert len(said["WARNING"]) == 2 and "luspo is meant for" in said["WARNING"][1]
    assert "`pad_to_multiple_of` has no effect" in said["WARNING"][0]
    assert any(line.startswith("engine: vLLM") for line in said["INFO"]) and "ready in" in said["INFO"][-1]


def test_lines_are_records_of_one_logger(caplog, capsys) -> None:
    with caplog.at_level(logging.INFO, logger="colograd"):
        console = Console(enabled=True, bars=False)
        console.say("as 100 % is")
        console.warn("look")
        Console(enabled=False, bars=False).warn("of another rank")
    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records] == [
        ("colograd", "INFO", "as 100 % is"),
        ("colograd", "WARNING", "look"),
    ]
    printed = capsys.readouterr()
    assert printed.out == "as 100 % is\nlook\n" and not printed.err


@pytest.mark.engine
def test_so_is_what_it_sets_in_other_runs(both: Any) -> None:
    tree = ast.parse(inspect.getsource(inspect.getmodule(type(both[0]))))
    stored = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    names = {node.attr for node in stored if ast.unparse(node.value) == "self" and not node.attr.startswith("_")}
    assert len(names) > 50 and {name for name in names if not hasattr(both[1], name)} == names & ABSENT.keys()
    assert not [name for name in ABSENT if hasattr(both[1], name)]


@pytest.mark.engine
def test_the_datasets_are_those_that_were_given_and_may_be_replaced(both: Any) -> None:
    ours = both[1]
    assert ours.train_dataset.column_names == ["prompt", "answer"] and ours.eval_dataset.select([0]).num_rows == 1
    assert ours.evaluate()["eval_completions"] == 8
    ours.eval_dataset = ours.eval_dataset.select([0])
    assert ours.evaluate()["eval_completions"] == 4 and len(ours.eval_prompts) == 1
    ours.train_dataset = ours.train_dataset.select(range(3))
    assert len(ours.get_train_dataloader().dataset) == 3


def test_the_reference_is_a_model_where_there_is_a_second_one(tmp_path) -> None:
    import torch

    args, model = tiny.config(tmp_path), torch.nn.Linear(2, 2)
    frozen = FrozenCopy(model, torch.device("cpu"), offload=False)
    assert Bare(args).ref_model is None and Bare(args, OfAdapter(model, is_new=True)).ref_model is None
    assert Bare(args, frozen).ref_model is frozen.model


def test_what_is_not_there_is_an_attribute_error_that_may_help(tmp_path) -> None:
    bare = Bare(tiny.config(tmp_path))
    assert not hasattr(bare, "nothing") and not hasattr(bare, "llm")
    with pytest.raises(AttributeError, match=r"'Bare' object has no attribute 'vllm_generation': .*trainer\.engine"):
        _ = bare.vllm_generation
    with pytest.raises(AttributeError, match=r"'get_gamma_weights': nothing calls it here; override compute_loss"):
        _ = bare.get_gamma_weights


@pytest.mark.parametrize("name", ["temperature", "log_multimodal", "reward_weights"])
def test_what_only_shows_a_setting_cannot_be_set(tmp_path, name: str) -> None:
    bare = Bare(tiny.config(tmp_path))
    with pytest.raises(AttributeError, match=f"{name} can't be set to 0.5 on a trainer"):
        setattr(bare, name, 0.5)
    bare.mine = 0.5


@pytest.mark.parametrize("name", HOOKS)
def test_a_subclass_that_replaces_what_nothing_calls_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"Mine defines {name}, which nothing calls here: override {HOOKS[name]}"):
        type("Mine", (GRPOTrainer,), {name: lambda self: None})


def test_the_stages_may_be_replaced() -> None:
    class Mine(GRPOTrainer):
        def score(self, group: Any) -> Any:
            return super().score(group)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            return super().training_step(*args, **kwargs)

    assert issubclass(Mine, GRPOTrainer)


def test_every_method_of_trls_trainer_is_ours_too_or_refused() -> None:
    theirs = pytest.importorskip("trl").GRPOTrainer
    own = {name for name, value in vars(theirs).items() if inspect.isfunction(value) or isinstance(value, staticmethod)}
    unaccounted = {name for name in own if name not in HOOKS and not hasattr(GRPOTrainer, name)}
    assert unaccounted <= INTERNAL, unaccounted - INTERNAL


# TRL's methods that have a meaning only inside TRL's trainer.
INTERNAL = {"_log_completion_extra", "_log_metric", "_get_tool_suffix_ids"}
