"""The exchange of gradients once per step."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from colograd.parallel import shards


def test_a_large_gradient_is_summed_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small gradients share a bucket, and the bucket is a copy."""
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (2, 3, 1000, 4)]
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, float(number))
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: sent.append(tensor.mul_(2)))
    places = [parameter.grad.data_ptr() for parameter in parameters]
    assert shards.sum_over_ranks([parameter.grad for parameter in parameters], bucket_bytes=100) == 4 * 1009
    assert [parameter.grad.data_ptr() for parameter in parameters] == places
    assert [float(parameter.grad.max()) for parameter in parameters] == [0.0, 2.0, 4.0, 6.0]
    assert [len(tensor) for tensor in sent] == [5, 1000, 4] and sent[1].data_ptr() == places[2]
