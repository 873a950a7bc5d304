"""Training on two processes (gloo): tensor parallel, data parallel, fully sharded."""

from __future__ import annotations

import copy
import os
import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo"),
]
WORLD = 2


def on_two(run: Callable[[int], None]) -> None:
    """Run a function of the rank in two processes; a failed assertion in one fails the test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(_process, (run, port), nprocs=WORLD)  # type: ignore[no-untyped-call]


def _process(rank: int, run: Callable[[int], None], port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    try:
        run(rank)
    finally:
        dist.destroy_process_group()


def model() -> nn.Sequential:
    torch.manual_seed(0)
    found = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    with torch.no_grad():
        found[0].weight[100, 3] = 5.0  # an outlier that one rank alone holds
    return found


def compiled(module: Any, **recipe: Any) -> Any:
    return torch.compile(module, backend="nvfp4", options={"training": {"bf16_share": 0, **recipe}})


def full(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def error(got: Tensor, want: Tensor) -> float:
    return ((got - want).norm() / want.norm()).item()


def tensor_parallel(rank: int) -> None:
    whole = model()
    mesh = init_device_mesh("cpu", (WORLD,))
    parts = parallelize_module(copy.deepcopy(whole), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.manual_seed(1)
    x, g = torch.randn(32, 64), torch.randn(32, 64)
    outputs = []
    for each in (parts, whole):
        y = compiled(each, stochastic_rounding=False)(x)
        y.backward(g)
        outputs.append(y.detach())
    assert error(outputs[0], outputs[1]) < 1e-6
    for (name, p), q in zip(parts.named_parameters(), whole.named_parameters(), strict=True):
        assert error(full(p.grad), full(q[1].grad)) < 1e-6, name
    with torch.no_grad():
        assert error(compiled(parts)(x), compiled(whole)(x)) < 1e-6


def test_tensor_parallel_ranks_agree_on_the_amax() -> None:
    """Each rank quantizes its shard with the scale of the whole tensor: the numbers are those of one process."""
    on_two(tensor_parallel)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, data: list[Tensor], call: Any) -> list[float]:
    losses = []
    for x in data:
        optimizer.zero_grad()
        loss = (call(x) - x.roll(1, -1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def batches(rank: int | None, count: int = 12) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    whole = [torch.randn(64, 64, generator=generator) for _ in range(count)]
    return whole if rank is None else [x[rank * 32 : rank * 32 + 32] for x in whole]


def data_parallel(rank: int) -> None:
    one = model()
    alone = train(one, torch.optim.AdamW(one.parameters(), lr=2e-3), batches(None), compiled(one))
    wrapped = DistributedDataParallel(model())
    torch.manual_seed(rank)
    losses = train(wrapped, torch.optim.AdamW(wrapped.parameters(), lr=2e-3), batches(rank), compiled(wrapped))
    mean = torch.tensor(losses)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    torch.testing.assert_close(mean, torch.tensor(alone), rtol=0.03, atol=0)
    assert losses[-1] < losses[0]


def test_data_parallel_goes_where_one_process_goes() -> None:
    on_two(data_parallel)


def fully_sharded(rank: int) -> None:
    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        sharded = model()
        for layer in (sharded[0], sharded[2]):
            fully_shard(layer)
        fully_shard(sharded)
        return sharded, torch.optim.AdamW(sharded.parameters(), lr=2e-3)

    one = model()
    alone = train(one, torch.optim.AdamW(one.parameters(), lr=2e-3), batches(None), compiled(one))
    sharded, optimizer = start()
    call = compiled(sharded)
    torch.manual_seed(7)
    losses = train(sharded, optimizer, batches(rank)[:6], call)
    kept = copy.deepcopy((sharded.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
    losses += train(sharded, optimizer, batches(rank)[6:], call)
    mean = torch.tensor(losses)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    torch.testing.assert_close(mean, torch.tensor(alone), rtol=0.03, atol=0)

    again, resumed = start()
    again.load_state_dict(kept[0])
    resumed.load_state_dict(kept[1])
    torch.set_rng_state(kept[2])
    assert train(again, resumed, batches(rank)[6:], compiled(again)) == losses[6:]
    for (name, p), q in zip(again.named_parameters(), sharded.parameters(), strict=True):
        assert torch.equal(full(p), full(q)), name


def test_fully_sharded_training_resumes_bit_for_bit() -> None:
    on_two(fully_sharded)
