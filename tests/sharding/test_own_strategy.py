"""A user's sharding strategy. Only this file knows the class."""

from __future__ import annotations

import pytest
import tiny

from colograd import GRPOTrainer
from colograd.sharding import strategy_of
from colograd.sharding.zero import WholeCopies


class Counting(WholeCopies):
    """Trains like `sharding: none`, and counts backwards."""

    name = "counting"

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
        ("colograd.sharding:ShardingStrategy", "a class without the method [a-z_]+: define it"),
    ],
)
def test_another_class_is_refused(path, message, tmp_path) -> None:
    with pytest.raises(ValueError, match=message):
        strategy_of(tiny.config(tmp_path, sharding=path))
