"""What a rank does in tests/test_relabel.py: one model under several orders of its experts, results to a file."""

import random
import sys
from pathlib import Path

import torch

from hymoe.engine import parallel
from hymoe.engine.checkpoint import Group, load, parts_of, write
from hymoe.engine.data.loader import StepBatch
from hymoe.engine.export import TrainedValues
from hymoe.engine.hf_checkpoint import load_dtypes, load_weights, save_pretrained
from hymoe.engine.hf_index import Checkpoint
from hymoe.engine.relabel import Orders, relabel
from hymoe.engine.train import take_loads, take_step
from hymoe.kernels.packed import Packed
from hymoe.model.config import HybridConfig
from hymoe.model.net import HybridLM
from tests.plan_worker import TOKENS, job_of, micro_batch

STEPS = 2
# Name of a case -> ranks that share the experts, exchange, seed of the orders (None: as they are).
CASES = {
    "fsdp": (1, "gather", None),
    "gather": (4, "gather", None),
    "gather_1": (4, "gather", 1),
    "gather_2": (4, "gather", 2),
    "dedup_1": (4, "dedup", 1),
    "groups_3": (2, "dedup", 3),
}


def random_orders(config: HybridConfig, seed: int | None) -> Orders:
    """Any permutation for every layer with experts, another for each."""
    rng = random.Random(seed)
    layers = [n for n, kind in enumerate(config.pattern) if kind == "E"] if seed else []
    experts = range(config.n_routed_experts)
    return {n: tuple(rng.sample(experts, len(experts))) for n in layers}


def load_model(plan: parallel.Alone, base: Path, seed: int | None) -> HybridLM:
    """The base under a plan, its experts in an order."""
    checkpoint = Checkpoint.open(base)
    config = HybridConfig.from_pretrained(base)
    dtype = load_dtypes(checkpoint, checkpoint.check_against(config), None)["embeddings.weight"]
    lm = HybridLM(config, dtype=dtype, device="meta")
    lm.set_keep("inputs")  # so that a routing comes to the exchange twice
    lm = plan.shard(lm)
    relabel(lm, random_orders(config, seed))
    load_weights(lm, checkpoint)
    return lm


def logits(lm: HybridLM, rank: int) -> torch.Tensor:
    """(T, V) of this rank's own tokens."""
    rng = torch.Generator().manual_seed(100 + rank)
    input_ids = torch.randint(0, lm.config.vocab_size, (20 + rank,), generator=rng)
    with torch.no_grad():
        hidden = lm(input_ids, Packed.from_lengths((7, 13 + rank), "cpu").cu_seqlens)
        return lm.logits(hidden)


def steps(plan: parallel.Alone, lm: HybridLM, target: Path) -> dict:
    """Loss and norm of steps of the loop over one row a rank of four, and an export of what was trained."""
    mine = range(plan.rank, 4, plan.world_size)
    batch = StepBatch(tuple(micro_batch(i, 9) for i in mine), 36, 4 * TOKENS, 1.0)
    job = job_of(plan, lm, [batch] * STEPS)
    taken = [take_step(job, step) for step in range(1, STEPS + 1)]
    values = TrainedValues(lm, job.optimizer)
    save_pretrained(lm, target, value=values)
    return {
        "loss": [t.sums[0].item() for t in taken],
        "loads": [t.sums[3:] for t in taken],
        "norm": [t.report.grad_norm.item() for t in taken],
        "kept": plan.sum_over_ranks(values.sums).tolist(),
        "parts": parts_of(lm, job.optimizer),
    }


def main() -> None:
    """`OUT`: every case that this number of ranks allows."""
    torch.set_num_threads(1)
    out, world_size, plan, found = Path(sys.argv[1]), int(sys.argv[2]), None, {}
    parts, group = {}, None
    for name, (size, kind, seed) in CASES.items():
        if size > world_size:
            continue
        plan = parallel.start(torch.device("cpu"), world_size, size, kind)
        group = group or Group()
        lm = load_model(plan, out / "base", seed)
        save_pretrained(lm, out / f"untrained_{world_size}_{name}")
        found[name] = {"logits": logits(lm, plan.rank)}
        plan.reshard(lm)
        take_loads(lm)  # none of the steps'
        found[name] |= steps(plan, lm, out / f"trained_{world_size}_{name}")
        parts[name] = found[name].pop("parts")
    if world_size > 1:
        for name in ("gather", "gather_1"):
            write(out / f"saved_{name}", STEPS, parts[name], {}, group)
        # Of one order's state all others: what each holds then is written again.
        for name, own in parts.items():
            load(out / "saved_gather_1" / f"step_{STEPS:08d}", own, group)
            write(out / f"from_gather_1_{name}", STEPS, own, {}, group)
    torch.save(found, out / f"{world_size}_{plan.rank}.pt")
    if world_size > 1:
        group.close()
    plan.close()


if __name__ == "__main__":
    main()
