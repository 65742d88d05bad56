"""Private memory of each rank while a checkpoint is loaded into FSDP2 shards, and whether it keeps its bound.

Loading may add to a rank what the rank keeps (its shard), its largest single read, and 200 MB. Two figures are given:
what loading added (the peak less what the process had before), which decides, and the whole peak against the same
sum. The latter also pays for the interpreter, torch and FSDP2, which alone take more than 200 MB (the first DTensor
imports torch._dynamo). Measured is RssAnon of /proc/self/status, sampled every few milliseconds by a thread: mapped
file pages and the page cache are no private memory.

The checkpoint (2 GB unless `--gb` says otherwise, BF16, many experts, all layer kinds) is written one parameter at a
time into a temporary folder, and is read by ranks under torchrun. Gate: rows of each parameter, compared with what
the safetensors package reads.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from harness import finish, show, stamp
from safetensors import safe_open

from hymoe.engine import parallel
from hymoe.engine.hf_checkpoint import (
    Checkpoint,
    load_weights,
    local_rows,
    near_zero_rows,
    read_config,
    save_pretrained,
)
from hymoe.engine.hf_rows import named_tensors
from hymoe.model.config import HybridConfig
from hymoe.model.names import by_parameter
from hymoe.model.net import HybridLM

OWN_BYTES = 200e6
SAMPLE_SECONDS = 0.002
EXPERT_LAYER_BYTES = 64 * 2 * 1024 * 1024 * 2


def config_of(total_bytes: float) -> HybridConfig:
    """A model of about so many bytes in BF16: as many expert layers as it takes, and one of each other kind."""
    experts = max(1, round((total_bytes - 0.2e9) / EXPERT_LAYER_BYTES))
    return HybridConfig.from_dict(
        {
            "model_type": "nemotron_h",
            "architectures": ["NemotronHForCausalLM"],
            "dtype": "bfloat16",
            "vocab_size": 32768,
            "hidden_size": 1024,
            "hybrid_override_pattern": "M*-" + "E" * experts,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "intermediate_size": 4096,
            "mamba_num_heads": 32,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1024,
            "moe_shared_expert_intermediate_size": 2048,
        }
    )


def make_checkpoint(folder: Path, total_bytes: float) -> int:
    """Writes the checkpoint from a model that has no memory; returns its bytes."""
    lm = HybridLM(config_of(total_bytes), kernels="torch", dtype=torch.bfloat16, device="meta")
    rng = torch.Generator().manual_seed(0)

    def value(name: str, parameter: torch.Tensor) -> torch.Tensor:
        del name
        made = torch.empty(parameter.shape, dtype=parameter.dtype)
        return made.uniform_(-0.02, 0.02, generator=rng)

    return save_pretrained(lm, folder, max_shard_size="500MB", value=value).total_size


class Sampler:
    """Keeps the highest RssAnon of this process while it runs."""

    def __init__(self) -> None:
        """Takes the first sample."""
        self.start = self.peak = private_bytes()
        self.samples = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Sampler":
        """Begins."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends, with a last sample."""
        self._stop.set()
        self._thread.join()
        self._take()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._take()

    def _take(self) -> None:
        self.peak = max(self.peak, private_bytes())
        self.samples += 1


def private_bytes() -> int:
    """RssAnon of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("/proc/self/status has no RssAnon: this needs Linux 4.5 or newer")


def load_as_rank(folder: Path, out: Path, ranks: int) -> None:
    """One rank: loads its shard and writes what it measured to `out`/RANK.json."""
    plan = parallel.start(torch.device("cpu"), ranks)
    lm = HybridLM(read_config(folder), kernels="torch", dtype=torch.bfloat16, device="meta")
    lm = plan.shard(lm)
    with Sampler() as sampler:
        began = time.perf_counter()
        load_weights(lm, Checkpoint.open(folder))
        seconds = time.perf_counter() - began
        near_zero_rows(lm)
    parts = {name: local_rows(name, tensor).local for name, tensor in named_tensors(lm).items()}
    pieces = [part[0] if ".experts." in name else part for name, part in parts.items() if len(part)]
    held = sum(part.nbytes for part in parts.values())
    slice_bytes = max(piece.nbytes for piece in pieces)
    allowed = int(held + slice_bytes + OWN_BYTES)
    added = sampler.peak - sampler.start
    figures = {
        "rank": plan.rank,
        "shard_bytes": held,
        "largest_slice_bytes": slice_bytes,
        "start_bytes": sampler.start,
        "peak_bytes": sampler.peak,
        "added_bytes": added,
        "allowed_bytes": allowed,
        "within": added <= allowed,
        "whole_peak_within": sampler.peak <= allowed,
        "samples": sampler.samples,
        "seconds": seconds,
    }
    check(folder, lm)
    (out / f"{plan.rank}.json").write_text(json.dumps(figures))
    plan.close()


def check(folder: Path, lm: HybridLM) -> None:
    """The first and last of this rank's rows of each parameter against the safetensors package."""
    checkpoint = Checkpoint.open(folder)
    specs = checkpoint.check_against(lm.config)
    files = by_parameter(specs)
    for name, tensor in named_tensors(lm).items():
        part = local_rows(name, tensor)
        for row in {0, len(part.local) - 1} if len(part.local) else ():
            stacked = specs[files[name][0]].expert is not None
            file = files[name][part.begin + row] if stacked else files[name][0]
            with safe_open(checkpoint.entries[file].file, "pt") as opened:
                found = opened.get_slice(file)
                expected = found[:] if stacked else found[part.begin + row]
            if not torch.equal(part.local[row], expected.to(part.local.dtype)):
                raise RuntimeError(f"{name}: row {part.begin + row} differs from the file")


def measure(total_bytes: float, ranks: int, folder: Path) -> dict[str, Any]:
    """Makes the checkpoint, loads it on all ranks, collects their figures."""
    print(f"writing a checkpoint of about {total_bytes / 1e9:.1f} GB to {folder}", file=sys.stderr)
    size = make_checkpoint(folder / "base", total_bytes)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc_per_node", str(ranks), __file__, "--ranks", str(ranks)]
    subprocess.run([*launch, "--load", str(folder)], check=True, stdout=subprocess.DEVNULL)
    each = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    return {"checkpoint_bytes": size, "within": all(rank["within"] for rank in each), "ranks": each}


def main() -> None:
    """Measures, prints the table and the JSON line; exit status 1 where the bound is broken."""
    options = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options.add_argument("--gb", type=float, default=2.0, help="size of the checkpoint in GB")
    options.add_argument("--ranks", type=int, default=4, help="processes")
    options.add_argument("--json", type=Path, help="file that gets the figures")
    options.add_argument("--load", type=Path, help=argparse.SUPPRESS)  # a rank's own call
    args = options.parse_args()
    if args.load is not None:
        load_as_rank(args.load / "base", args.load, args.ranks)
        return
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(args.gb * 1e9, args.ranks, Path(folder))
    columns = ["shard", "largest_slice", "start", "peak", "added", "allowed"]
    rows = [
        [str(rank["rank"])]
        + [f"{rank[column + '_bytes'] / 1e6:.0f}" for column in columns]
        + ["yes" if rank[key] else "NO" for key in ("within", "whole_peak_within")]
        + [f"{rank['seconds']:.1f}"]
        for rank in figures["ranks"]
    ]
    show(
        [
            "rank",
            *(f"{c.replace('_', ' ')} MB" for c in columns),
            "within",
            "whole peak too",
            "seconds",
        ],
        rows,
    )
    finish({"benchmark": "load_memory", "stamp": stamp(), **figures}, args.json)
    sys.exit(0 if figures["within"] else 1)


if __name__ == "__main__":
    main()
