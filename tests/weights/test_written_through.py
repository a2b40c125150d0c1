"""Engine parameters that are a function of the policy's parameters, such as Mamba's A = -exp(A_log)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from needs import has

from colograd.engine.tensors import VLLMTensors
from colograd.weights import mapping
from colograd.weights.mapping import map_parameters
from colograd.weights.sync import copy, obstacle


class Mixer(torch.nn.Module):
    def __init__(self, name: str, size: int) -> None:
        super().__init__()
        self.mixer = torch.nn.Module()
        self.mixer.register_parameter(name, torch.nn.Parameter(torch.rand(size), requires_grad=name == "A_log"))
        self.hf_to_vllm_mapper = SimpleNamespace(apply_list=lambda names: [n.replace("A_log", "A") for n in names])


def test_a_publish_writes_the_function_of_a_parameter() -> None:
    policy, engine = Mixer("A_log", 4), Mixer("A", 4)
    (part,) = map_parameters(policy, VLLMTensors(engine))
    wanted = -policy.mixer.A_log.detach().exp()
    assert not part.equal() and obstacle(part) == "the engine has a function of it"
    copy([part])
    assert part.equal() and torch.equal(engine.mixer.A, wanted)

    if not has("fsdp"):
        return
    from colograd.extensions.fsdp.rows import Rows, place_of

    where, values = place_of(part, Rows("mixer.A_log", 1, policy.mixer.A_log.detach()[1:3], total=4))
    assert torch.equal(values, wanted[1:3]) and where == slice(1, 3)


def test_keys_that_are_values_have_both_places() -> None:
    """Gemma 4's: 4 heads of keys, of 2 rows each, and no value; vLLM's 8 ranks hold each head twice."""
    of = {"a.q_proj.weight": torch.zeros(32, 3), "a.k_proj.weight": torch.zeros(8, 3)}
    engine: Any = SimpleNamespace(fusions={"qkv_proj": ("q_proj", "k_proj", "v_proj")}, renamed=lambda name: name)
    for ranks, rows, times in ((8, [4, 2, 2], [1, 2, 2]), (4, [8, 2, 2], [1, 1, 1]), (1, [32, 8, 8], [1, 1, 1])):
        targets = {"a.qkv_proj.weight": torch.zeros(sum(rows), 3)}
        found = mapping._find("a.k_proj.weight", "a.k_proj.weight", of, targets, engine, ranks)
        assert found is not None and [len(part) for part in found[1]] == [32, 8, 8]
        assert mapping._fused_rows(found[0], found[1], ranks) == (rows, times)
