"""Conversion of a state that is large beside what the conversion may take: its memory, and its death."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hymoe.engine.checkpoint import Group, Part, write
from hymoe.engine.convert import convert
from hymoe.engine.hf_checkpoint import Checkpoint, export_dtypes, save_pretrained
from hymoe.engine.hf_rows import named_tensors
from hymoe.model.net import HybridLM
from tests.hf_folder import save_reference
from tests.runs import REPO
from tests.tiny import tiny_config


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state of 280 MB of BF16 weights with their remainders, most of them in 4 stacks of 32 experts of 2 MB."""
    root = tmp_path_factory.mktemp("large")
    shape = {"n_routed_experts": 32, "moe_intermediate_size": 1024, "hidden_size": 1024}
    config = tiny_config(
        dtype="bfloat16", vocab_size=2048, layers_block_type=["mamba", "moe", "moe"], **shape
    )
    lm = HybridLM(config, kernels="torch", device="meta")
    dtypes = export_dtypes(lm)
    save_pretrained(lm, root / "base", value=lambda n, p: torch.ones(p.shape, dtype=dtypes[n]))
    parts = {}
    for name, tensor in named_tensors(lm).items():
        tensor = torch.ones(tensor.shape, dtype=dtypes[name])
        parts[f"model.{name}"] = Part(tensor, tuple(tensor.shape), 0)
        if tensor.dtype == torch.bfloat16:
            parts[f"optim.{name}.remainder"] = Part(
                torch.ones_like(tensor, dtype=torch.int16), tuple(tensor.shape), 0
            )
            # Says that the tensor is trained; its values are of no use here.
            parts[f"optim.{name}.exp_avg"] = Part(torch.zeros(1), (1,), 0)
    content = {
        "format": 1,
        "step": 1,
        "base": str(root / "base"),
        "identity": {"train.seed": 4242},
        "progress": {"count": 1},
    }
    write(root / "checkpoints", 1, parts, content, Group())
    return root


def peak_of(*arguments: Any) -> int:
    """Most private memory of the command on two cores, which say how many pieces are under way; in bytes, sampled."""
    script = [sys.executable, str(REPO / "scripts" / "convert_to_hf.py"), *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    cores = sorted(os.sched_getaffinity(0))[:2]
    process = subprocess.Popen(
        script,
        stdout=subprocess.PIPE,
        env=env,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    peak = 0
    status = Path(f"/proc/{process.pid}/status")
    while process.poll() is None:
        found = [line for line in status.read_text().splitlines() if line.startswith("RssAnon")]
        peak = max(peak, *(int(line.split()[1]) * 1024 for line in found), 0)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.002)
    process.stdout.close()
    assert process.returncode == 0
    return peak


@pytest.mark.slow
def test_memory_is_that_of_a_few_pieces(large: Path, tmp_path: Path) -> None:
    """Beside what the process takes on a tiny model: less than one of the four stacks."""
    small = peak_of(save_reference(tmp_path / "base"), "--out", tmp_path / "small")
    total = sum(e.nbytes for e in Checkpoint.open(large / "base").entries.values())
    peak = peak_of(large, "--out", tmp_path / "out", "--shards", 3)
    assert peak - small < total / 4, (peak, small, total)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "left"), [(signal.SIGKILL, [".out.partial"]), (signal.SIGTERM, [])]
)
def test_killed_while_writing_it_leaves_no_folder(
    large: Path, tmp_path: Path, number: int, left: list[str]
) -> None:
    """What SIGKILL leaves behind has another name, and the next conversion clears it."""
    script = str(REPO / "scripts" / "convert_to_hf.py")
    process = subprocess.Popen([sys.executable, script, large, "--out", tmp_path / "out"])
    while not list((tmp_path / ".out.partial").glob("*.safetensors")):
        assert process.poll() is None
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.01)
    process.send_signal(number)
    assert process.wait(timeout=60) == (-9 if number == signal.SIGKILL else 128 + number)
    assert [path.name for path in tmp_path.iterdir()] == left
    if left:
        convert(save_reference(large / "small"), tmp_path / "out", say=print)
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
