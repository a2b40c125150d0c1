"""A user's sharding strategy. Only this file knows the class."""

from __future__ import annotations

import pytest
import tiny

from colograd import GRPOTrainer
from colograd.config.conflicts import conflict
from colograd.sharding import check_sharding, strategy_of
from colograd.sharding.zero import WholeCopies


class Counting(WholeCopies):
    """Trains like `sharding: none`, and counts backwards."""

    def __init__(self, model) -> None:
        super().__init__(model)
        self.backwards = 0

    def describe(self) -> str:
        return "sharding: counts backwards"

    def backward(self, loss) -> None:
        self.backwards += 1
        super().backward(loss)


@pytest.mark.engine
def test_a_run_trains_with_the_strategy_of_an_import_path(tiny_model, tmp_path, closing, capsys) -> None:
    config = tiny.config(tmp_path, max_steps=1, sharding=f"{__name__}:Counting")
    trainer = closing(GRPOTrainer(str(tiny_model), tiny.vowels, config, tiny.prompts()))
    trainer.train()
    assert isinstance(trainer.sharding, Counting) and trainer.sharding.backwards > 0
    assert "sharding: counts backwards" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("test_own_strategy:Missing", "sharding .* has no attribute 'Missing'"),
        ("pathlib:Path", "isn't a class derived from colograd.sharding.ShardingStrategy: derive it"),
        ("colograd.sharding:ShardingStrategy", "a class without the method `[a-z_]+`: define it"),
    ],
)
def test_another_class_is_refused(path, message, tmp_path) -> None:
    with pytest.raises(ValueError, match=message):
        strategy_of(tiny.config(tmp_path, sharding=path))


@pytest.mark.parametrize(
    ("setting", "value"), [("sequence_parallel_size", 2), ("offload_gradients", True), ("offload_optimizer", "auto")]
)
def test_own_strategy_excludes_settings_of_others(setting, value, tmp_path) -> None:
    settings = tiny.config(tmp_path, sharding=f"{__name__}:Counting")
    assert conflict(settings) is None
    setattr(settings, setting, value)
    assert "your own class sums whole gradients on the device: remove" in (conflict(settings) or "")


def test_own_strategy_takes_any_optimizer(tmp_path) -> None:
    check_sharding(tiny.config(tmp_path, sharding=f"{__name__}:Counting", optim="adafactor"), object())


def test_own_strategy_that_divides_parameters_builds_the_optimizer(tmp_path) -> None:
    settings = tiny.config(tmp_path, sharding="colograd.sharding.zero:SharedGradients")
    check_sharding(settings, None)
    with pytest.raises(ValueError, match="SharedGradients', which can't use the optimizer passed"):
        check_sharding(settings, object())
