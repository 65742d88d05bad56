"""What a rank does in tests/test_plan.py: steps of the real loop over hand-made batches, results to a file."""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from hymoe.engine import parallel
from hymoe.engine.data.loader import MicroBatch, StepBatch
from hymoe.engine.hf_rows import local_rows
from hymoe.engine.optim import Optimizer
from hymoe.engine.parallel_bytes import bytes_per_step
from hymoe.engine.recipe import Optim, Recipe
from hymoe.engine.stop import StopFlag
from hymoe.engine.train import Job, take_step
from hymoe.kernels.packed import Packed
from hymoe.model.net import HybridLM
from tests.tiny import tiny_config, tiny_lm

TOKENS = 24


def micro_batch(seed: int, supervised: int) -> MicroBatch:
    """Two documents of random tokens of which the first `supervised` have labels."""
    rng = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(0, 97, (TOKENS,), generator=rng)
    labels = torch.randint(0, 97, (TOKENS,), generator=rng)
    labels[supervised:] = -100
    return MicroBatch(input_ids, labels, Packed.from_lengths((10, TOKENS - 10), "cpu", supervised))


def build(
    plan: parallel.Alone,
    keep: str = "all",
    dtype: torch.dtype = torch.float32,
    **changes: object,
) -> tuple[HybridLM, dict]:
    """The same tiny weights on every rank, sharded."""
    whole = dict(tiny_lm(seed=5, dtype=dtype, **changes).state_dict())
    lm = HybridLM(tiny_config(**changes), dtype=dtype, device="meta")
    lm.set_keep(keep)
    lm = plan.shard(lm)
    with torch.no_grad():
        for name, tensor in [*lm.named_parameters(), *lm.named_buffers()]:
            rows = local_rows(name, tensor)
            rows.local.copy_(whole[name][rows.begin : rows.begin + len(rows.local)])
    return lm, whole


def job_of(
    plan: parallel.Alone, lm: HybridLM, batches: list[StepBatch], weight_decay: float = 0.0
) -> Job:
    """The loop's job over hand-made steps."""
    options = {"lr": 1e-2, "warmup_steps": 0, "min_lr_ratio": 1.0, "weight_decay": weight_decay}
    optimizer = Optimizer(
        lm.named_parameters(), beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=weight_decay, clip_norm=1.0,
        rounding="exact", seed=1,
    )  # fmt: skip
    return Job(
        recipe=Recipe(optim=Optim(**options)), plan=plan, lm=lm, optimizer=optimizer,
        loader=SimpleNamespace(step=batches.__getitem__), eval_rows=None, steps=len(batches), log=None,
        stop=StopFlag(), flops_per_token=1.0, peak_flops=None,
    )  # fmt: skip


def weights(lm: HybridLM) -> dict[str, torch.Tensor]:
    """Whole tensors; collective."""
    return {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for n, p in lm.named_parameters()
    }


def uneven(plan: parallel.Alone) -> dict:
    """The 9 supervised tokens of a step lie 5, 1, 0 and 3 to a micro-batch, however they are spread."""
    counts = (5, 1, 0, 3)
    lm, _ = build(plan)
    mine = range(plan.rank, 4, plan.world_size)
    batch = StepBatch(tuple(micro_batch(i, counts[i]) for i in mine), sum(counts), 4 * TOKENS, 1.0)
    taken = take_step(job_of(plan, lm, [batch]), 1)
    return {
        "loss": taken.sums[0].item() / 9,
        "norm": taken.report.grad_norm.item(),
        "weights": weights(lm),
    }


def masked(plan: parallel.Alone) -> dict:
    """A step without a supervised token on any rank, with weight decay on."""
    lm, _ = build(plan)
    before = weights(lm)
    job = job_of(plan, lm, [StepBatch((micro_batch(1, 0),), 0, TOKENS, 1.0)], weight_decay=0.5)
    taken = take_step(job, 1)
    moments = [m.abs().sum().item() for m in job.optimizer.exp_avg]
    return {"loss": taken.sums[0].item(), "applied": bool(taken.report.is_applied), "before": before,
            "weights": weights(lm), "moments": sum(moments), "count": int(job.optimizer.count)}  # fmt: skip


def not_finite(plan: parallel.Alone) -> dict:
    """Step 2 has a label outside the vocabulary on the last rank alone: its gradient is NaN there."""
    lm, _ = build(plan)
    good = StepBatch((micro_batch(plan.rank, 5),), 5 * plan.world_size, TOKENS, 1.0)
    bad = micro_batch(plan.rank, 5)
    if plan.rank == plan.world_size - 1:
        bad.labels[0] = 97
    job = job_of(plan, lm, [good, StepBatch((bad,), 5 * plan.world_size, TOKENS, 1.0), good])
    kept, applied = [], []
    for step in (1, 2, 3):
        applied.append(bool(take_step(job, step).report.is_applied))
        kept.append(weights(lm))
    return {"applied": applied, "weights": kept, "count": int(job.optimizer.count)}


def idle_experts(plan: parallel.Alone, keep: str) -> dict:
    """Every token of rank r goes to expert r, ten steps."""
    options = {"num_experts_per_tok": 1, "layers_block_type": ["moe", "mamba", "moe"]}
    lm, whole = build(plan, keep, **options)
    with torch.no_grad():
        for layer in lm.layers:
            if layer.kind == "E":
                layer.mixer.gate.e_score_correction_bias.zero_()[plan.rank] = 100.0
    batch = StepBatch((micro_batch(plan.rank, 7),), 7 * plan.world_size, TOKENS, 1.0)
    job = job_of(plan, lm, [batch] * 10)
    norms = [take_step(job, step).report.grad_norm.item() for step in range(1, 11)]
    return {
        "norms": norms,
        "before": {n: t.clone() for n, t in whole.items()},
        "weights": weights(lm),
    }


def traffic(plan: parallel.Alone, expert_parallel: int) -> dict:
    """Bytes of one BF16 step, counted and predicted."""
    lm, _ = build(plan, dtype=torch.bfloat16)
    batch = StepBatch((micro_batch(plan.rank, 5),), 5 * plan.world_size, TOKENS, 1.0)
    job = job_of(plan, lm, [batch])
    plan.wire.sent.clear()
    norm = take_step(job, 1).report.grad_norm.item()
    predicted = bytes_per_step(
        lm.config, world_size=plan.world_size, expert_parallel=expert_parallel, exchange="gather",
        micro_tokens=TOKENS, micro_steps=1, dtype="bfloat16", keep="all", replicas=plan.replicas,
    )  # fmt: skip
    return {"norm": norm, "sent": dict(plan.wire.sent), "predicted": predicted}


def main() -> None:
    """Runs every case under FSDP2 alone and with experts on their ranks, and saves what this rank saw."""
    torch.set_num_threads(1)
    ranks, plan = int(sys.argv[1]), None
    for expert_parallel in sorted({1, 2, ranks} if ranks > 1 else {1}):
        plan = parallel.start(torch.device("cpu"), ranks, expert_parallel)
        results = {"uneven": uneven(plan), "masked": masked(plan), "not_finite": not_finite(plan)}
        if plan.world_size > 1:
            results |= {f"idle_{keep}": idle_experts(plan, keep) for keep in ("all", "inputs")}
        torch.save(results, Path(sys.argv[2]) / f"{ranks}_{expert_parallel}_{plan.rank}.pt")
    if ranks == 4:
        found = {}
        for expert_parallel, replicas in ((1, 1), (1, 2), (1, 4), (2, 2), (4, 2)):
            plan = parallel.start(torch.device("cpu"), 4, expert_parallel, "gather", replicas)
            found[expert_parallel, replicas] = traffic(plan, expert_parallel)
        torch.save(found, Path(sys.argv[2]) / f"4_0_{plan.rank}.pt")
    plan.close()


if __name__ == "__main__":
    main()
