"""What a rank does in tests/test_memory.py: a step of the real loop, every allocation counted, results to a file.

Torch's own accounting of its CPU allocator is read: each event is an allocation or a release with its size. Memory that
was there before the profiler began is not in it, so everything is made after that; nor is what another thread releases,
so collectives here return when gloo's thread has let go of their tensors.
"""

import gc
import os
import sys
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from hymoe.engine import parallel
from hymoe.engine.data.loader import MicroBatch, StepBatch
from hymoe.engine.parallel_wire import Wire
from hymoe.engine.train import take_step
from hymoe.kernels.packed import Packed
from hymoe.model.names import is_small
from hymoe.model.net import HybridLM
from tests.plan_worker import job_of
from tests.tiny import tiny_config

LAYERS = {
    "vocab_size": 1024, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32,
    "intermediate_size": 512, "mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 32,
    "chunk_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 384,
    "moe_shared_expert_intermediate_size": 256,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp", "linear_attention", "moe"],
}  # fmt: skip
TOKENS = 1024
# What is kept, dtype, micro-steps that pass each block together.
CASES = (
    ("all", "float32", 1), ("acts", "float32", 1), ("inputs", "float32", 1),
    ("acts", "bfloat16", 2), ("inputs", "bfloat16", 1),
)  # fmt: skip
# Ranks -> (ranks that share the experts, exchange).
PLANS = {
    1: ((1, "gather"),),
    2: ((1, "gather"), (2, "gather"), (2, "dedup")),
    4: ((1, "gather"), (2, "gather"), (4, "gather"), (4, "dedup")),
}


class PatientWire(Wire):
    """Collectives that nobody works on any more when they return."""

    def all_gather(self, out, x, group, purpose, is_async=False):
        return self._patient(super().all_gather, out, x, group, purpose)

    def all_to_all(self, out, x, group, purpose, *, is_async=False, **rows):
        return self._patient(super().all_to_all, out, x, group, purpose, **rows)

    def _patient(self, send, out, x, *args, **rows) -> None:
        held = [holders(tensor) for tensor in (out, x)]
        send(out.view_as(out), x.view_as(x), *args, **rows)  # whose tensors gloo alone holds
        for _ in range(10_000):
            if all(holders(t) <= before for t, before in zip((out, x), held, strict=True)):
                return
            time.sleep(0.0002)
        raise RuntimeError("gloo has not released a tensor within two seconds")


def holders(tensor: torch.Tensor) -> int:
    """References to the memory of a tensor."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def micro_batch(seed: int) -> MicroBatch:
    """One document, every token supervised."""
    rng = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(0, LAYERS["vocab_size"], (2, TOKENS), generator=rng)
    return MicroBatch(ids, labels, Packed.from_lengths((TOKENS,), "cpu", TOKENS))


def allocated(prof: profile) -> int:
    """The most bytes that were alive at once."""
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    total = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        most = max(most, total)
    return most


def fill(lm: HybridLM) -> None:
    """Random weights under which no expert is much more popular than another."""
    rng = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, tensor in [*lm.named_parameters(), *lm.named_buffers()]:
            if "norm" in name:
                tensor.fill_(1)
            elif is_small(name) and not name.endswith("gate.weight"):
                tensor.zero_()
            else:
                parallel.local(tensor).normal_(std=0.05, generator=rng)


def skew(rows: torch.Tensor, plan: parallel.Alone) -> float:
    """Choices that came to this rank over the mean of its group's ranks; of all layers together."""
    loads = rows.view(-1, LAYERS["n_routed_experts"]).sum(0).view(plan.group_size, -1).sum(1)
    return (loads[plan.rank % plan.group_size] / loads.mean()).item()


def measure(plan: parallel.Alone, keep: str, dtype: torch.dtype, micro_steps: int) -> dict:
    """Peak of a step; bytes of each part of the state, counted tensor by tensor."""
    config = tiny_config(**LAYERS)
    gc.collect()  # a model that FSDP2 has wrapped is in cycles: its memory would be released in the midst of this step
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        lm = HybridLM(config, dtype=dtype, device="meta")
        lm.set_keep(keep)
        lm = plan.shard(lm)
        fill(lm)
        micros = tuple(micro_batch(10 * plan.rank + i) for i in range(micro_steps))
        tokens = TOKENS * micro_steps * plan.world_size
        job = job_of(plan, lm, [StepBatch(micros, tokens, tokens, 1.0)])
        taken = take_step(job, 1)
    most = allocated(prof)
    named = dict(lm.named_parameters())
    state = job.optimizer.state()
    large = [name for name, p in named.items() if p.dtype == dtype and not is_small(name)]
    return {
        "peak": most, "skew": skew(taken.sums[3:].cpu(), plan),
        "weights": sum(size_of(parallel.local(named[name].data)) for name in large),
        "moments": sum(size_of(state[name][m]) for name in large for m in ("exp_avg", "exp_avg_sq")),
        "remainder": sum(size_of(state[name].get("remainder")) for name in large),
    }  # fmt: skip


def size_of(tensor: torch.Tensor | None) -> int:
    """Bytes."""
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


def main() -> None:
    """`RANKS OUT`: every plan of this number of ranks and every case."""
    torch.set_num_threads(1)
    ranks, out = int(sys.argv[1]), Path(sys.argv[2])
    found = {}
    for share, exchange in PLANS[ranks]:
        plan = parallel.start(torch.device("cpu"), ranks, share, exchange)
        plan.wire = PatientWire()
        for keep, dtype, micro_steps in CASES:
            key = (ranks, share, exchange, keep, dtype, micro_steps)
            found[key] = measure(plan, keep, getattr(torch, dtype), micro_steps)
    torch.save(found, out / f"{ranks}_{os.environ.get('RANK', '0')}.pt")
    if ranks > 1:
        plan.close()


if __name__ == "__main__":
    main()
