"""Checkpoint folders for tests: saved by transformers, read and written by safetensors itself."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hymoe.engine.errors import UserError
from hymoe.model.config import HybridConfig
from hymoe.model.names import mtp_specs
from tests.tiny import BASE

INDEX = "model.safetensors.index.json"


def save_reference(folder: Path, *, dtype: str = "float32", seed: int = 0, **changes: Any) -> Path:
    """A tiny model with random weights, saved by transformers: one file, or several by `max_shard_size`."""
    from transformers import NemotronHConfig, NemotronHForCausalLM

    shard_size = changes.pop("max_shard_size", "5GB")
    torch.manual_seed(seed)
    config = NemotronHConfig(**{**BASE, **changes, "dtype": dtype})
    lm = NemotronHForCausalLM(config)
    with torch.no_grad():
        for tensor in [*lm.parameters(), *lm.buffers()]:
            tensor.add_(torch.randn(tensor.shape) * 0.1)
    lm.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def save_sharded(folder: Path) -> Path:
    """The same in BF16, several shards, mtp tensors; 97 tokens and 5 experts divide by no number of ranks."""
    mtp = {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["full_attention", "moe"]}
    save_reference(folder, dtype="bfloat16", n_routed_experts=5, max_shard_size="60KB", **mtp)
    add_mtp(folder)
    assert len(list(folder.glob("*.safetensors"))) >= 3
    return folder


def add_shard(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Puts tensors into a shard of their own; a single file becomes the first of several."""
    index = folder / INDEX
    if not index.is_file():
        (folder / "model.safetensors").rename(folder / "first.safetensors")
        weight_map = dict.fromkeys(load_file(folder / "first.safetensors"), "first.safetensors")
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    content = json.loads(index.read_text())
    save_file(tensors, folder / "added.safetensors", {"format": "pt"})
    content["weight_map"] |= dict.fromkeys(tensors, "added.safetensors")
    index.write_text(json.dumps(content))


def add_mtp(folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """The mtp tensors of the folder's config, random, in a shard of their own."""
    rng = torch.Generator().manual_seed(7)
    specs = mtp_specs(HybridConfig.from_pretrained(folder))
    add_shard(folder, {n: torch.randn(s.shape, generator=rng).to(dtype) for n, s in specs.items()})


def rewrite(folder: Path, change: Any) -> None:
    """Replaces `model.safetensors` by what `change` makes of its tensors."""
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def contents(folder: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Tensor -> dtype, shape and digest of its bytes, as the safetensors package reads the folder."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            for name in opened.keys():  # noqa: SIM118 (a safe_open is no mapping)
                tensor = opened.get_tensor(name)
                data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
                assert name not in found, f"{name} is there twice"
                digest = hashlib.sha256(data).hexdigest()
                found[name] = (str(tensor.dtype), tuple(tensor.shape), digest)
    return found


def file_digests(folder: Path) -> dict[str, str]:
    """Every file below the folder -> digest of its bytes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def refused(action: Callable[[], Any], *words: str) -> str:
    """The action is refused with one line that holds all the words."""
    with pytest.raises(UserError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == [], message
    return message
