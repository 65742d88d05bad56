"""What a rank does in tests/test_exchange.py: gradients under every plan, results to a file."""

import hashlib
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from hymoe.engine import parallel
from hymoe.engine.checkpoint import Group, load, parts_of, write
from hymoe.engine.data.loader import MicroBatch
from hymoe.engine.exchange import Dedup, Gather
from hymoe.engine.faults import explain
from hymoe.engine.hf_checkpoint import load_weights, save_pretrained
from hymoe.engine.hf_index import Checkpoint
from hymoe.engine.optim import Optimizer, grad_norm
from hymoe.engine.recipe import Recipe
from hymoe.engine.train import take_loads
from hymoe.kernels.packed import Packed
from hymoe.model.net import HybridLM
from tests.plan_worker import build
from tests.tiny import tiny_config

LAYERS = {"layers_block_type": ["moe", "mamba", "moe"]}
LENGTHS = ((10, 14), (7,), (20, 3, 8), (1, 16), (5,), (30, 2), (9, 9), (12,))  # documents of a row
SUPERVISED = (5, 1, 0, 3, 2, 6, 4, 7)  # the third row, so a rank's only row, has none
KEEPS = ("all", "acts", "inputs")
STEPS = [
    (1, "all"),
    (1, "inputs"),
    (2, "inputs"),
    (3, "acts"),
    *((4, keep) for keep in KEEPS),
]  # micro-steps
TRAFFIC = (  # micro-steps, passes, keep, latent size
    (1, 1, "all", None),
    (4, 1, "acts", None),
    (4, 1, "inputs", None),
    (2, 2, "all", None),
    (1, 1, "inputs", 16),
)
CHOICES = {
    "spread": {},
    # All tokens to expert 5. Its weight would be 1 if it were divided by the sum, and its gradient 0.
    "one": {"num_experts_per_tok": 1, "norm_topk_prob": False},
    "idle": {},  # all tokens to experts 0, 1 and 2: the later ranks get nothing
    "latent": {"moe_latent_size": 16},
    "tied": {"tie_word_embeddings": True},
}
TOKENS = 64  # of a row where bytes are counted
FAVOURITES = {"one": (5,), "idle": (0, 1, 2)}


def micro_batch(number: int) -> MicroBatch:
    """Row `number`: random tokens, of which the first few have labels."""
    rng = torch.Generator().manual_seed(number)
    lengths, supervised = LENGTHS[number % len(LENGTHS)], SUPERVISED[number % len(SUPERVISED)]
    input_ids, labels = torch.randint(0, 97, (2, sum(lengths)), generator=rng)
    labels[supervised:] = -100
    return MicroBatch(input_ids, labels, Packed.from_lengths(lengths, "cpu", supervised))


def case(
    plan: parallel.Alone,
    choices: str,
    micro_steps: int,
    keep: str,
    dtype: torch.dtype = torch.float32,
    together: int = 0,
) -> dict:
    """Loss, gradients and norm of one step over 4 * micro_steps rows, and the rows of every expert.

    `together` rows pass each block together; 0: all.
    """
    lm, _ = build(plan, keep, dtype, **LAYERS, **CHOICES[choices])
    with torch.no_grad():
        for layer in lm.layers:
            if layer.kind == "E":
                for expert in FAVOURITES.get(choices, ()):
                    layer.mixer.gate.e_score_correction_bias[expert] = 100.0
    mine = [micro_batch(n) for n in range(plan.rank, 4 * micro_steps, plan.world_size)]
    loss = torch.zeros((), dtype=torch.float64)
    for first in range(0, len(mine), together or len(mine)):
        some = mine[first : first + (together or len(mine))]
        loss_sum, _ = lm.loss(*rows_of(some))
        loss_sum.backward()
        loss += loss_sum.detach()
        plan.collect_gradients(lm, last=some[-1] is mine[-1])
    grads = plan.gradients(lm)
    shards = optimizer_of(lm).shards
    norm = grad_norm(grads, [shards[name].is_counted for name, _ in lm.named_parameters()])
    named = zip(lm.named_parameters(), grads, strict=True)
    return {
        "loss": plan.sum_over_ranks(loss).item(),
        "norm": norm.item(),
        "grads": {name: whole(parameter, grad) for (name, parameter), grad in named},
        "loads": plan.sum_over_ranks(take_loads(lm)),
    }


def rows_of(batches: list[MicroBatch]) -> tuple[list, list, list]:
    """What `HybridLM.loss` takes."""
    return (
        [micro.input_ids for micro in batches],
        [micro.labels for micro in batches],
        [micro.packed for micro in batches],
    )


def optimizer_of(lm: HybridLM) -> Optimizer:
    """With any settings."""
    return Optimizer(
        lm.named_parameters(), beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, clip_norm=1.0,
        rounding="exact", seed=1,
    )  # fmt: skip


def whole(parameter: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The whole tensor of which `rows` lie where this rank's rows of the parameter lie; collective."""
    if not isinstance(parameter, DTensor):
        return rows.clone()
    place = (parameter.device_mesh, parameter.placements)
    shape = {"shape": parameter.shape, "stride": parameter.stride()}
    return DTensor.from_local(rows, *place, run_check=False, **shape).full_tensor()


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Of all bits."""
    found = hashlib.sha256()
    for name, tensor in tensors.items():
        found.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def traffic(
    plan: parallel.Alone, micro_steps: int, passes: int, keep: str, **changes: object
) -> dict:
    """What this rank sent in a step of equal rows, and its choices: (micro-steps * layers, T, K).

    `sent` is in bytes, `calls` the number of collectives, both by purpose.
    """
    lm, _ = build(plan, keep, **LAYERS, **changes)
    chosen = []
    for layer in lm.layers:
        if layer.kind == "E":
            layer.mixer.gate.register_forward_hook(lambda _, __, out: chosen.append(out[0].ids))
    batches = []
    for step in range(micro_steps):
        rng = torch.Generator().manual_seed(10 * step + plan.rank)
        input_ids, labels = torch.randint(0, 97, (2, TOKENS), generator=rng)
        packed = Packed.from_lengths((TOKENS,), "cpu", TOKENS)
        batches.append(MicroBatch(input_ids, labels, packed))
    plan.wire.sent.clear()
    first_time = []  # the other choices are of blocks that run again
    with counted_calls(plan) as calls:
        for number in range(passes):
            loss_sum, _ = lm.loss(*rows_of(batches[number::passes]))
            first_time += chosen
            loss_sum.backward()
            plan.collect_gradients(lm, last=number == passes - 1)
            chosen.clear()
        plan.gradients(lm)
    return {"sent": dict(plan.wire.sent), "calls": calls, "chosen": torch.stack(first_time)}


@contextmanager
def counted_calls(plan: parallel.Alone) -> Iterator[Counter]:
    """Purpose -> collectives of the plan's wire."""
    calls: Counter[str] = Counter()

    def counted(send):
        def count(out, x, group, purpose, *args, **kwargs):
            calls[purpose] += 1
            return send(out, x, group, purpose, *args, **kwargs)

        return count

    names = ("all_gather", "all_to_all")
    for name in names:
        setattr(plan.wire, name, counted(getattr(plan.wire, name)))
    yield calls
    for name in names:
        delattr(plan.wire, name)


@contextmanager
def nan_memory() -> Iterator[None]:
    """Fresh memory is NaN: torch's switch for determinism fills it."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def export(plan: parallel.Alone, base: Path, target: Path) -> None:
    """Reads a checkpoint under the plan and writes it again."""
    lm = plan.shard(HybridLM(tiny_config(**LAYERS), device="meta"))
    load_weights(lm, Checkpoint.open(base))
    save_pretrained(lm, target, max_shard_size="30KB")


def states(plans: dict[int, parallel.Alone], out: Path) -> dict[tuple[int, int], str]:
    """(saved at, loaded at) -> digest of weights, moments and remainders; at (p, 0) of what was saved."""
    group, found = Group(), {}
    for saved_at, plan in plans.items():
        lm, _ = build(plan, dtype=torch.bfloat16, **LAYERS)
        optimizer = optimizer_of(lm)
        micro = micro_batch(plan.rank)
        lm.loss(micro.input_ids, micro.labels, micro.packed)[0].backward()
        plan.collect_gradients(lm, last=True)
        optimizer.step(plan.gradients(lm), lr=1e-2, scale=0.1)
        found[saved_at, 0] = digest(whole_state(lm, optimizer))
        state = write(out / f"states_{saved_at}", 1, parts_of(lm, optimizer), {}, group)
        for loaded_at, other in plans.items():
            lm, _ = build(other, dtype=torch.bfloat16, **LAYERS)
            optimizer = optimizer_of(lm)
            load(state, parts_of(lm, optimizer), group)
            found[saved_at, loaded_at] = digest(whole_state(lm, optimizer))
    return found


def whole_state(lm: HybridLM, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Collective."""
    found = {}
    for name, parameter in lm.named_parameters():
        found[name] = whole(parameter, parallel.local(parameter.detach()))
        for kind, rows in optimizer.state()[name].items():
            # gloo sends no int16
            sendable = rows.int() if rows.dtype == torch.int16 else rows
            found[f"{name}.{kind}"] = whole(parameter, sendable)
    return found


def everything(world_size: int, out: Path) -> dict:
    """Every case under every plan of this number of ranks."""
    results, plans = {}, {}
    if world_size == 1:
        plan = parallel.start(torch.device("cpu"), 1)
        for micro_steps in (1, 2, 3, 4):
            for choices in list(CHOICES)[: None if micro_steps == 1 else 1]:
                found = case(plan, choices, micro_steps, "all", together=1)
                results["one by one", choices, micro_steps] = found
    for ep in (1, 2, 4)[: 3 if world_size > 1 else 1]:
        for kind in ("gather", "dedup")[: 2 if ep > 1 else 1]:
            plan = plans[ep] = parallel.start(torch.device("cpu"), world_size, ep, kind)
            for micro_steps, keep in STEPS:
                key = (ep, kind, "spread", micro_steps, keep)
                results[key] = case(plan, "spread", micro_steps, keep)
            for choices in list(CHOICES)[1:]:
                results[ep, kind, choices, 1, "inputs"] = case(plan, choices, 1, "inputs")
            if world_size > 1:
                for *steps, latent in TRAFFIC:
                    found = traffic(plan, *steps, moe_latent_size=latent)
                    results[ep, kind, "traffic", *steps, latent] = found
                results |= in_bfloat16(plan, ep, kind)
            export(plan, out / "base", out / f"export_{world_size}_{ep}_{kind}")
    if world_size > 1:
        results["states"] = states(plans, out)
    plan.close()
    return results


def in_bfloat16(plan: parallel.Alone, ep: int, kind: str) -> dict:
    """Digests of one step's gradients however it is run; and the gradients of rows together and in passes."""
    found = {}
    for keep in KEEPS:
        found[keep] = case(plan, "spread", 4, keep, torch.bfloat16)["grads"]
    with nan_memory():
        again = case(plan, "spread", 4, "inputs", torch.bfloat16)["grads"]
    passes = case(plan, "spread", 4, "all", torch.bfloat16, together=1)["grads"]
    return {
        (ep, kind, "again"): [digest(grads) for grads in (*found.values(), again)],
        (ep, kind, "bfloat16"): (found["all"], passes),
    }


def die(plan: parallel.Alone) -> None:
    """Rank 2 is killed as it sends rows of the first layer; what the others say of it is printed."""
    lm, _ = build(plan, **LAYERS)
    if plan.rank == 2:
        for route in (Gather, Dedup):
            route.spread = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    micro = micro_batch(plan.rank)
    try:
        lm.loss(micro.input_ids, micro.labels, micro.packed)[0].backward()
    except RuntimeError as error:
        failed = explain(error, "forward pass", Recipe())
        if failed is None:
            raise
        sys.stdout.write(f"{failed}\n")
        sys.exit(1)


def main() -> None:
    """`everything N OUT`, or `die KIND OUT`."""
    torch.set_num_threads(1)
    what, value, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    if what == "die":
        die(parallel.start(torch.device("cpu"), 4, 4, value))
        return
    results = everything(int(value), out)
    rank = int(os.environ.get("RANK", "0"))
    torch.save(results, out / f"{value}_{rank}.pt")


if __name__ == "__main__":
    main()
