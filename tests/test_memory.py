"""Peak memory of steps on a CPU against the estimate: every allocation counted, every plan and `keep`.

What a CPU holds is not what a GPU holds: the estimate is asked for `torch`, one expert and one tile at a time. The
walk, the state and what FSDP2 gathers and reduces are the same code for both.
"""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hymoe.engine import parallel
from hymoe.engine.budget import Job, estimate, state_parts
from hymoe.engine.budget_walk import units
from hymoe.kernels.packed import Packed
from hymoe.model.net import HybridLM
from tests.memory_worker import CASES, LAYERS, PLANS, TOKENS
from tests.runs import REPO
from tests.tiny import tiny_config

SHARE = 0.05
CONSTANT = 2_400_000  # bytes: the slices that AdamW, norms and convolution work in, and what is not counted
KEYS = [(ranks, *plan, *case) for ranks, plans in PLANS.items() for plan in plans for case in CASES]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple, list[dict]]:
    """Key -> what each rank of tests/memory_worker.py saw."""
    out = tmp_path_factory.mktemp("memory")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    worker = str(REPO / "tests" / "memory_worker.py")
    found: dict[tuple, list[dict]] = {}
    for ranks in PLANS:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
        command = [sys.executable, *(torchrun if ranks > 1 else []), worker, str(ranks), str(out)]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=580, check=False
        )
        assert done.returncode == 0, done.stderr
        for rank in range(ranks):
            for key, about in torch.load(out / f"{ranks}_{rank}.pt").items():
                found.setdefault(key, []).append(about)
    return found


def job_of(key: tuple, load_skew: float = 1.0) -> Job:
    ranks, share, exchange, keep, dtype, micro_steps = key
    return Job(
        config=tiny_config(**LAYERS), world_size=ranks, micro_tokens=TOKENS, micro_steps=micro_steps, dtype=dtype,
        rounding="exact", keep=keep, expert_parallel=share, exchange=exchange, implementation="torch",
        load_skew=load_skew,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS, ids=lambda key: "-".join(map(str, key)))
def test_peak_is_the_estimate(measured: dict, key: tuple) -> None:
    """Of every rank, with the share of the tokens that came to it."""
    for rank, about in enumerate(measured[key]):
        expected = estimate(job_of(key, about["skew"]), on_gpu=False).peak
        assert abs(about["peak"] - expected) <= SHARE * about["peak"] + CONSTANT, (
            f"rank {rank}: measured {about['peak']:,}, estimated {expected:,}"
        )


@pytest.mark.slow
def test_the_constant_is_small(measured: dict) -> None:
    assert min(about["peak"] for ranks in measured.values() for about in ranks) >= 10 * CONSTANT


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS, ids=lambda key: "-".join(map(str, key)))
def test_state_is_exact(measured: dict, key: tuple) -> None:
    """Weights, moments and remainders of the first rank, tensor by tensor."""
    parts, about = state_parts(job_of(key)), measured[key][0]
    assert about["weights"] == parts["weights"]
    assert about["moments"] == parts["moments"]
    assert about["remainder"] == parts["exact remainder"]


@pytest.fixture
def fake_group() -> Iterator[None]:
    """Two ranks of which one is here; collectives do nothing."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


class Body(nn.Module):
    """The blocks alone: the tracker follows modules that are called, and the head is used through its loss."""

    def __init__(self, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = (Packed.from_lengths((len(x),), "cpu", 0),)
        for layer in self.layers:
            x = layer((x,), packed, x.dtype)[0]
        return x.sum()


@pytest.mark.usefixtures("fake_group")
def test_what_fsdp_gathers_and_reduces_is_what_torch_tracks() -> None:
    """FSDPMemTracker's peak of eight equal blocks against the walk's: weights, buffers, gradients of a unit."""
    tokens = 8  # so that weights are nearly all
    config = tiny_config(
        hidden_size=128, intermediate_size=2048, layers_block_type=["mlp"] * 8, vocab_size=8
    )
    plan = parallel.Sharded(torch.device("cpu"))
    lm = plan.shard(HybridLM(config, device="meta"))
    small = {p for name, p in lm.named_parameters() if p.dim() == 1}
    body = fully_shard(Body(lm.layers), mesh=plan.mesh, ignored_params=small)
    tracker = FSDPMemTracker(body)
    x = torch.randn(tokens, 128, requires_grad=True)
    tracker.track_inputs((x,))
    with tracker:
        body(x).backward()
    found = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    unit = units(config, 2, 1)["-"]
    assert unit.whole == 2 * 128 * 2048
    job = Job(
        config=config, world_size=2, micro_tokens=tokens, micro_steps=1, dtype="float32", rounding="exact", keep="all",
        implementation="torch",
    )  # fmt: skip
    state = state_parts(job)
    expected = estimate(job, on_gpu=False).phases["bottom"] - state["moments"]
    assert found["Total"] == pytest.approx(expected, rel=0.05), found
