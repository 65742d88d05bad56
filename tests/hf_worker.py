"""One rank of a sharded load and save: `python hf_worker.py RANK WORLD MEETING_FILE SOURCE TARGET DTYPE`.

Prints one JSON object: the digest of every tensor after loading and wrapping (whole tensors, rank 0), the
bytes read and the rows held by this rank, and what an export that fails on rank 1 says and leaves.
"""

import hashlib
import json
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hymoe.engine import hf_index
from hymoe.engine.hf_checkpoint import (
    Checkpoint,
    load_weights,
    near_zero_rows,
    read_config,
    read_local_rows,
    save_pretrained,
)
from hymoe.engine.hf_rows import local_rows, named_tensors
from hymoe.model.names import is_small
from hymoe.model.net import HybridLM


def wrapped(source: str, dtype: torch.dtype) -> HybridLM:
    """The model on meta, sharded as in training, then given memory full of NaN."""
    lm = HybridLM(read_config(source), kernels="torch", dtype=dtype, device="meta")
    small = {tensor for name, tensor in lm.named_parameters() if is_small(name)}
    for layer in lm.layers:
        fully_shard(layer, ignored_params=small)
    fully_shard(lm, ignored_params=small)
    lm.to_empty(device="cpu")
    for tensor in named_tensors(lm).values():
        local_rows("", tensor).local.fill_(torch.nan)
    return lm


def digest(tensor: torch.Tensor) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return hashlib.sha256(whole.detach().float().contiguous().numpy().tobytes()).hexdigest()


def main(rank: int, world: int, meeting: str, source: str, target: str, dtype: str) -> dict:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    lm = wrapped(source, getattr(torch, dtype))
    read = []
    pread = hf_index._pread

    def counted(fd, into, offset, entry):
        read.append(len(into))  # of several threads
        pread(fd, into, offset, entry)

    hf_index._pread = counted
    checkpoint = Checkpoint.open(source)
    load_weights(lm, checkpoint)
    read_once = sum(read)
    out_of_place = []
    specs = checkpoint.check_against(lm.config)
    for name, tensor in named_tensors(lm).items():
        rows = read_local_rows(checkpoint, specs, name, tensor)
        if not torch.equal(rows.to(tensor.dtype), local_rows(name, tensor).local):
            out_of_place.append(name)
    held = {n: len(local_rows(n, t).local) for n, t in named_tensors(lm).items()}
    out = {
        "read": read_once,
        "out_of_place": out_of_place,
        "held": held,
        "near_zero": near_zero_rows(lm),
        "digests": {name: digest(tensor) for name, tensor in named_tensors(lm).items()},
    }
    calls = []

    def value(name, parameter):
        calls.append(name)

    def failing(name, parameter):
        calls.append(name)
        if rank == 1 and len(calls) == 5:
            raise OSError(28, "No space left on device")

    try:
        save_pretrained(lm, target, max_shard_size="40KB", value=failing)
    except ValueError as error:
        out["error"] = f"{type(error).__name__}: {error}"
    dist.barrier()
    out["left"] = os.listdir(os.path.dirname(target))
    dist.barrier()
    calls.clear()
    save_pretrained(lm, target, max_shard_size="40KB", value=value)
    out["wrote"] = calls
    dist.barrier()
    dist.destroy_process_group()
    return out


if __name__ == "__main__":
    answer = main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may outlive the group
