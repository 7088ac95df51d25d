"""The kernel that completes a step's inputs on a CUDA device, against the plain path."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from executors.compute import ComputeLane
from executors.slots import DeviceInputs

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


@pytest.mark.parametrize(("num_tokens", "num_changes", "num_slots"), [(1, 2, 3), (513, 40, 700), (7, 1030, 64)])
def test_the_kernel_completes_inputs_as_the_plain_path_does(num_tokens: int, num_changes: int, num_slots: int) -> None:
    """Also where the token to carry over is none, and where two changes write the same to one place."""
    from executors import triton_inputs

    draw = torch.Generator().manual_seed(num_tokens)

    def ints(low: int, high: int, count: int) -> torch.Tensor:
        return torch.randint(low, high, (count,), generator=draw, dtype=torch.int32).cuda()

    sampled, table = ints(-1, 1000, num_slots), ints(0, 9, 5000).view(100, 50)
    places = torch.randperm(5000, generator=draw)[:num_changes]
    places[-1] = places[0]
    to = ints(0, 9999, num_changes)
    to[-1] = to[0]
    inputs: Any = SimpleNamespace(
        changes_at=places.cuda(),
        changes_to=to,
        table=table.clone(),
        carry=ints(-1, num_slots, num_tokens),
        token_ids=ints(0, 1000, num_tokens),
        positions=ints(0, 1000, num_tokens),
    )
    ids = torch.full((2, num_tokens + 3), 7, device="cuda")
    triton_inputs.complete(inputs, sampled, ids, num_tokens)
    plain: Any = SimpleNamespace(**{**vars(inputs), "table": table.clone()})
    DeviceInputs.apply_changes(plain)
    lane: Any = SimpleNamespace(_all_tokens=sampled)
    ComputeLane._carry(lane, SimpleNamespace(device=plain), num_tokens)  # type: ignore[arg-type]
    assert torch.equal(inputs.table, plain.table)
    assert ids[:, :num_tokens].tolist() == [plain.token_ids.tolist(), plain.positions.tolist()]
    assert (ids[:, num_tokens:] == 7).all()
