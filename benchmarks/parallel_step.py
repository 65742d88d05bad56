"""Seconds of a training step under FSDP2 alone and with experts on their ranks, and the bytes that each sends.

All plans live in the same ranks, on the same weights and rows, and take turns step by step; a step is forward and
backward pass with sums over ranks (`gradients`), and the optimiser. Gates before timing: all plans have the same loss
and gradient norm, and the bytes counted at the collectives are those that `parallel_bytes` predicts from the choices
that the router made.

On a CPU: gloo over the loopback, a model of which the experts are nine tenths. There bytes cost processor time that
arithmetic could use: the ratio says that the plan is right, not how fast a GPU is. On GPUs (one a rank): layers of the
real model's width. `--link-gb-per-s` adds the share of the floor that the link sets.

`--table CONFIG` prints what a step of that model (a folder or a config.json) sends on 4 and 8 ranks, and runs nothing.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import Lap, Timing, finish, interleave, parser, ratio, show, stamp

from hymoe.engine import parallel
from hymoe.engine.hf_rows import local_rows, named_tensors
from hymoe.engine.optim import Optimizer
from hymoe.engine.parallel_bytes import bytes_per_step
from hymoe.kernels.packed import Packed
from hymoe.model.config import HybridConfig
from hymoe.model.cost import count_parameters
from hymoe.model.net import HybridLM

CPU: dict[str, Any] = {
    "model_type": "nemotron_h",
    "vocab_size": 1024,
    "hidden_size": 256,
    "hybrid_override_pattern": "MEME*EME",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 32,
    "conv_kernel": 4,
    "chunk_size": 64,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 192,
    "moe_shared_expert_intermediate_size": 384,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
}
GPU = CPU | {
    "vocab_size": 131072,
    "hidden_size": 2688,
    "num_attention_heads": 32,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "chunk_size": 128,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
}
SUMMED = {
    torch.float32: 1e-5,
    torch.bfloat16: 2e-2,
}  # how far loss and norm of two plans may differ


class Candidate:
    """A plan with its model; a call is a step."""

    def __init__(
        self, plan: parallel.Alone, args: argparse.Namespace, device: torch.device
    ) -> None:
        """Weights are the same under every plan."""
        self.plan, self.args = plan, args
        config = HybridConfig.from_dict(GPU if device.type == "cuda" else CPU)
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.lm = HybridLM(config, dtype=self.dtype, device="meta")
        self.lm.set_keep("inputs" if args.recompute else "all")
        plan.shard(self.lm)
        fill(self.lm)
        self.optimizer = Optimizer(
            self.lm.named_parameters(), beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1,
            clip_norm=1.0, rounding="stochastic", seed=1,
        )  # fmt: skip
        self.chosen: list[torch.Tensor] = []
        rng = torch.Generator().manual_seed(plan.rank)
        rows = torch.randint(0, config.vocab_size, (2, args.tokens), generator=rng)
        self.input_ids, self.labels = rows.to(device)
        self.packed = Packed.from_lengths((args.tokens,), device, args.tokens)

    def step(self, lap: Lap = lambda _: None) -> tuple[float, float]:
        """One step; its loss over all ranks, and the norm."""
        rows = [[x] * self.args.micro_steps for x in (self.input_ids, self.labels, self.packed)]
        loss, _ = self.lm.loss(*rows)
        loss.backward()
        self.plan.collect_gradients(self.lm, last=True)
        scale = 1 / (self.args.tokens * self.args.micro_steps * self.plan.world_size)
        grads = self.plan.gradients(self.lm)
        lap("gradients")
        report = self.optimizer.step(grads, lr=1e-6, scale=scale)
        return self.plan.sum_over_ranks(loss.detach()).item() * scale, report.grad_norm.item()

    def first_step(self) -> dict[str, Any]:
        """As `step`, with what was sent, and to how many other ranks the router's choices lead."""
        gates = [layer.mixer.gate for layer in self.lm.layers if layer.kind == "E"]
        chosen: list[torch.Tensor] = []
        hooks = [
            gate.register_forward_hook(lambda _, __, out: chosen.append(out[0].ids))
            for gate in gates
        ]
        self.plan.wire.sent.clear()
        loss, norm = self.step()
        for hook in hooks:
            hook.remove()
        sent = {k: v for k, v in self.plan.wire.sent.items() if k != "figures"}
        size = getattr(self.plan, "group_size", 1)
        experts = self.lm.config.n_routed_experts // size
        rows = self.args.micro_steps  # equal ones, which pass a layer one after another
        ids = torch.stack(chosen[: rows * len(gates) : rows])
        hit = torch.stack([(ids // experts == rank).any(-1).sum() for rank in range(size)]).double()
        own = hit[self.plan.rank % size]
        copies = self.plan.sum_over_ranks((hit.sum() - own)[None]).item()
        copies /= self.plan.world_size * len(gates) * self.args.tokens
        total = torch.tensor([float(sum(sent.values()))], dtype=torch.float64, device=ids.device)
        mean = self.plan.sum_over_ranks(total).item() / self.plan.world_size
        return {"loss": loss, "norm": norm, "sent_bytes": mean, "copies": copies}


@torch.no_grad()
def fill(lm: HybridLM) -> None:
    """Random weights from the name and, of a stack, the expert; this rank's rows only."""
    for name, tensor in named_tensors(lm).items():
        part = local_rows(name, tensor)
        leaf = name.rpartition(".")[2]
        if leaf == "A_log":
            part.local.copy_(torch.arange(1, len(part.local) + 1).log())
        elif leaf == "dt_bias":
            part.local.fill_(-4)
        elif leaf == "D" or "norm" in name:
            part.local.fill_(1)
        elif "bias" in leaf:
            part.local.zero_()
        else:
            for row, values in enumerate(part.local):
                seed = sum(name.encode()) * 100_003 + part.begin + row
                rng = torch.Generator(part.local.device).manual_seed(seed)
                values.copy_(torch.randn(values.shape, generator=rng, device=values.device) * 0.02)


def measure_as_rank(args: argparse.Namespace) -> None:
    """Builds every plan, checks them against each other, times them, and writes what rank 0 saw."""
    torch.set_num_threads(args.threads)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", args.local_rank)
        torch.cuda.set_device(device)
    plans = {"FSDP2 alone": parallel.start(device, args.ranks)}
    for kind in ("gather", "dedup"):
        plan = parallel.start(device, args.ranks, args.expert_parallel, kind)
        plans[f"experts stay, {kind}"] = plan
    candidates = {name: Candidate(plan, args, device) for name, plan in plans.items()}
    found = {name: candidate.first_step() for name, candidate in candidates.items()}
    config, dtype = next((c.lm.config, c.dtype) for c in candidates.values())
    check(found, SUMMED[dtype])
    for name, about in found.items():
        about["predicted_bytes"] = sum(
            bytes_per_step(
                config, world_size=args.ranks,
                expert_parallel=getattr(plans[name], "group_size", 1),
                exchange="dedup" if "dedup" in name else "gather", micro_tokens=args.tokens,
                micro_steps=args.micro_steps, dtype=str(dtype).removeprefix("torch."),
                keep="inputs" if args.recompute else "all", copies=about["copies"],
            ).values()
        )  # fmt: skip
        if abs(about["sent_bytes"] / about["predicted_bytes"] - 1) > 0.02:
            raise RuntimeError(
                f"{name}: sent {about['sent_bytes']}, not {about['predicted_bytes']}"
            )

    timings = interleave({n: partial(step, c) for n, c in candidates.items()}, args.rounds)
    if plans["FSDP2 alone"].rank == 0:
        counts = count_parameters(config)
        stacks = HybridLM(config, device="meta").named_parameters()
        experts = sum(p.numel() for name, p in stacks if ".experts." in name)
        figures = {"parameters": counts.total, "share_of_experts": experts / counts.total}
        figures["plans"] = {name: about | summary(timings, name) for name, about in found.items()}
        args.measure.write_text(json.dumps(figures))
    plans["FSDP2 alone"].close()


def step(candidate: Candidate, lap: Lap) -> None:
    """What is timed."""
    candidate.step(lap)


def check(found: dict[str, dict[str, Any]], bound: float) -> None:
    """Fails where two plans do not agree."""
    first = found["FSDP2 alone"]
    for name, about in found.items():
        for key in ("loss", "norm"):
            if not math.isclose(about[key], first[key], rel_tol=bound):
                raise RuntimeError(f"{key} is {about[key]} with {name}, else {first[key]}")


def summary(timings: dict[str, Timing], name: str) -> dict[str, Any]:
    """Seconds, and how many times faster than FSDP2 alone."""
    own = timings[name]
    return {"seconds": own.median, **own.part_medians(), **ratio(timings["FSDP2 alone"], own)}


def print_table(path: Path) -> None:
    """Bytes of the real job: 16,384 tokens a rank, one micro-step, BF16."""
    config = HybridConfig.from_dict(
        json.loads((path / "config.json" if path.is_dir() else path).read_text())
    )
    shared = {"micro_tokens": 16384, "micro_steps": 1, "dtype": "bfloat16"}
    rows = []
    for ranks in (4, 8):
        for name, size, kind in (
            ("FSDP2 alone", 1, "gather"),
            ("gather", ranks, "gather"),
            ("dedup", ranks, "dedup"),
        ):
            for recompute in (False, True):
                kept = "inputs" if recompute else "all"
                sent = bytes_per_step(
                    config,
                    world_size=ranks,
                    expert_parallel=size,
                    exchange=kind,
                    keep=kept,
                    **shared,
                )
                figures = [*sent.values(), sum(sent.values())]
                rows.append([f"{ranks} ranks, {name}", kept, *(f"{b / 1e9:.1f}" for b in figures)])
    show(["GB sent by a rank in a step", "keep", *sent, "sum"], rows)


def main() -> None:
    """Launches the ranks, prints the table and the JSON line."""
    options = parser(__doc__.partition("\n")[0], rounds=5)
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--expert-parallel", type=int, default=4, help="ranks that share experts")
    options.add_argument("--tokens", type=int, default=256, help="of a rank in a micro-step")
    options.add_argument("--micro-steps", type=int, default=1)
    options.add_argument("--recompute", action="store_true", help="blocks run again in backward")
    options.add_argument("--link-gb-per-s", type=float, help="of one rank, for the floor")
    options.add_argument("--table", type=Path, help="config of a model: print its bytes and leave")
    options.add_argument("--measure", type=Path, help=argparse.SUPPRESS)  # a rank's own call
    options.add_argument("--local-rank", type=int, default=0, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.table is not None:
        print_table(args.table)
        return
    if args.measure is not None:
        measure_as_rank(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
        command = [sys.executable, *launch, str(args.ranks), *sys.argv, "--measure", str(out)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        figures = json.loads(out.read_text())
    tokens = args.tokens * args.micro_steps
    rows = []
    for name, about in figures["plans"].items():
        about["tokens_per_second_and_rank"] = tokens / about["seconds"]
        row = [name, f"{about['ratio']:.2f}", f"{about['lowest']:.2f} - {about['highest']:.2f}"]
        row += [f"{about['seconds']:.3f}", f"{about['gradients']:.3f}"]
        row += [f"{about['tokens_per_second_and_rank']:.0f}"]
        row += [f"{about['sent_bytes'] / 1e6:.1f}", f"{about['predicted_bytes'] / 1e6:.1f}"]
        if args.link_gb_per_s:
            floor = about["sent_bytes"] / (args.link_gb_per_s * 1e9)
            about["share_of_link_floor"] = floor / about["seconds"]
            row.append(f"{about['share_of_link_floor']:.2f}")
        rows.append(row)
    print(f"{figures['parameters']:,} parameters, {figures['share_of_experts']:.0%} in experts")
    headers = [
        "plan",
        "times as fast",
        "range",
        "s/step",
        "gradients",
        "tokens/s/rank",
        "MB sent",
        "predicted",
    ]
    show([*headers, *(["share of floor"] if args.link_gb_per_s else [])], rows)
    keys = ("ranks", "expert_parallel", "tokens", "micro_steps", "recompute")
    shape = {key: getattr(args, key) for key in keys}
    finish({"benchmark": "parallel_step", "stamp": stamp(), **shape, **figures}, args.json)


if __name__ == "__main__":
    main()
