"""Lightning's names, layers and experts, narrow: base -> 4 ranks -> state -> 2 ranks -> HF folder -> transformers.

52 layers, 128 experts, 6,513 tensors with those of `mtp.*`, in 14 shards made one after the other. Every stage's
private memory is measured: loading adds a rank's part and a slice, a conversion some pieces, never the model.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from hymoe.engine.checkpoint import Saved
from hymoe.engine.checkpoint_files import states
from hymoe.engine.hf_checkpoint import load_pretrained
from hymoe.model.config import HybridConfig
from hymoe.model.names import mtp_specs, tensor_specs
from tests.close import assert_close_rel
from tests.hf_folder import INDEX, contents
from tests.runs import REPO, make_data, metrics, write_recipe

pytestmark = pytest.mark.slow

SHARDS, EXPORT_SHARDS = 14, 16
NARROW: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "moe_intermediate_size": 160,
    "moe_shared_expert_intermediate_size": 320,
    "intermediate_size": 160,
    "mamba_num_heads": 16,
    "mamba_head_dim": 32,
    "ssm_state_size": 32,
    "chunk_size": 32,
    "num_attention_heads": 8,
    "head_dim": 32,
    "time_step_limit": [0.001, float("inf")],  # what transformers does, whatever a config says
}
OWN_BYTES = 64 << 20  # that a stage may add beside what the contract names: threads, headers, plans
SLICE_BYTES = 4 << 20  # `hf_index.SLICE_BYTES`
IDS = [5, 900, 17, 2040, 3, 3, 611, 1200, 42, 8, 77, 1999]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, shared_dir: Path) -> Path:
    """base/ and recipe.toml."""
    root = tmp_path_factory.mktemp("lightning")
    data = make_data(root)
    make_base(root / "base", shared_dir / "facts")
    (root / "base" / "tokenizer.json").write_bytes(data["tokenizer"].read_bytes())
    write_recipe(
        root / "recipe.toml",
        model={"path": root / "base"},
        data={"path": data["train"], "seq_len": 64, "micro_tokens": 64},
        optim={"lr": 3e-4, "warmup_steps": 1, "rounding": "exact"},
        train={"steps": 2, "step_tokens": 256, "eval_every": 0},
        parallel={"expert_parallel": "4"},
        run={"dir": root / "run", "save_every": 1, "export": ""},
    )
    return root


def recorded_names(facts: Path) -> list[str]:
    """The real checkpoint's tensors."""
    file = facts / "Lightning_30B_BF16_tensor_families.json"
    if not file.is_file():
        pytest.skip(f"{file} is absent: it has the real checkpoint's names")
    names = []
    for family in json.loads(file.read_text())["tensors"]:
        span = re.search(r"\{(\d+)\.\.(\d+)\}", family)
        members = range(int(span[1]), int(span[2]) + 1) if span else ()
        names += [family.replace(span[0], str(member)) for member in members] or [family]
    return names


def make_base(folder: Path, facts: Path) -> None:
    """Writes the checkpoint shard by shard; the safetensors package writes each."""
    names = recorded_names(facts)
    raw = json.loads(
        (facts / "Nemotron-3.5-Lightning-30B-A3B-NVFP4.config.no_quant.json").read_text()
    )
    config = HybridConfig.from_dict({**raw, **NARROW})
    specs = tensor_specs(config) | mtp_specs(config)
    assert sorted(names) == sorted(specs)
    assert (len(names), len(config.pattern), config.n_routed_experts) == (6513, 52, 128)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**raw, **NARROW}))
    rng, weight_map = torch.Generator().manual_seed(0), {}
    each = -(-len(names) // SHARDS)
    for number in range(SHARDS):
        file = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        mine = names[number * each : (number + 1) * each]
        tensors = {name: random_tensor(name, specs[name].shape, rng) for name in mine}
        save_file(tensors, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def random_tensor(name: str, shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    """Values of the kind that a trained model has; the router's in float32, as the real file's."""
    uniform, kind = torch.rand(shape, generator=rng), name.rpartition(".")[2]
    if kind == "A_log":
        return (1 + 15 * uniform).log().bfloat16()
    if kind == "dt_bias":
        return (-6 + 4 * uniform).bfloat16()
    if kind == "D" or "norm" in name:
        return (0.5 + uniform).bfloat16()
    if ".gate." in name and not name.startswith("mtp."):
        return uniform - 0.5
    return ((uniform - 0.5) * 0.15).bfloat16()


def run_measured(
    root: Path, ranks: int, stages: dict[str, str], script: str, *arguments: Any
) -> tuple[list[dict[str, Any]], str]:
    """A script under torchrun, or alone; what its ranks measured, and what it said."""
    out = root / f"stages_{ranks}_{script}"
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    command += [str(REPO / "tests" / "lightning_worker.py"), str(out)]
    command += [*(f"{name}={place}" for name, place in stages.items()), "--"]
    command += [str(REPO / "scripts" / script), *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(ranks)]
    return found, done.stdout


@pytest.fixture(scope="module")
def trained(root: Path) -> dict[str, list[dict[str, Any]]]:
    """One step on 4 ranks, ended by a signal; resumed on 2 ranks for another."""
    stages = {
        "loading": "hymoe.engine.resume:load_weights",
        "saving": "hymoe.engine.saver:write",
        "stop": "1",
    }
    first, said = run_measured(root, 4, stages, "train.py", root / "recipe.toml")
    assert "stopped after step 1: saved, leaving" in said
    stages = {"resuming": "hymoe.engine.resume:load", "saving": "hymoe.engine.saver:write"}
    second, said = run_measured(
        root, 2, stages, "train.py", root / "recipe.toml", "--parallel.expert-parallel", "2"
    )
    assert "after step 1, saved by 4 ranks" in said
    assert [line["step"] for line in metrics(root / "run")] == [1, 2]
    return {"first": first, "second": second}


def bytes_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def test_a_rank_loads_its_part_and_a_slice(
    root: Path, trained: dict[str, list[dict[str, Any]]]
) -> None:
    whole = bytes_of(root / "base")
    for stages in trained["first"]:
        assert stages["shard"] < whole / 3
        assert stages["loading"]["added"] <= stages["shard"] + SLICE_BYTES + OWN_BYTES / 4
    for stages in trained["second"]:  # the optimiser's memory is there before
        assert stages["resuming"]["added"] <= stages["shard"] + stages["largest"] + OWN_BYTES
    for stages in (*trained["first"], *trained["second"]):
        # What is written was copied before; beside it one tensor at a time.
        assert stages["saving"]["added"] <= stages["largest"] + OWN_BYTES


@pytest.fixture(scope="module")
def converted(root: Path, trained: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """The last state, in 16 shards, by the script."""
    stages = {"converting": "hymoe.engine.convert:convert"}
    arguments = (root / "run", "--out", root / "served", "--shards", EXPORT_SHARDS)
    (found,), _ = run_measured(root, 1, stages, "convert_to_hf.py", *arguments)
    return root / "served", found


def test_a_conversion_holds_some_pieces_only(
    root: Path, converted: tuple[Path, dict[str, Any]]
) -> None:
    folder, stages = converted
    assert len(list(folder.glob("*.safetensors"))) == EXPORT_SHARDS
    assert stages["converting"]["added"] <= 2 * OWN_BYTES
    assert bytes_of(root / "base") > 6 * OWN_BYTES, "a whole model would pass as well"


def test_the_folder_has_the_bases_names_and_dtypes_and_what_was_trained(
    root: Path, converted: tuple[Path, dict[str, Any]]
) -> None:
    base, served = contents(root / "base"), contents(converted[0])
    assert {n: c[:2] for n, c in served.items()} == {n: c[:2] for n, c in base.items()}
    for name in base:
        if name.startswith("mtp.") or name.endswith("e_score_correction_bias"):
            assert served[name] == base[name], f"{name}: is not trained"
    dense = [n for n in base if n.endswith(("_proj.weight", "lm_head.weight")) and "mtp" not in n]
    dense = [n for n in dense if ".experts." not in n]
    assert all(served[name] != base[name] for name in dense)
    experts = [n for n in base if ".experts." in n and not n.startswith("mtp.")]
    moved = sum(served[name] != base[name] for name in experts)
    assert moved > len(experts) / 3  # those that tokens were sent to

    # Values: the state's, which DCP reads, to the last bit but that of the rounding.
    saved = Saved(states(root / "run" / "checkpoints")[0])
    index = json.loads((converted[0] / INDEX).read_text())["weight_map"]
    for layer, kind in ((1, "up_proj"), (51, "down_proj")):
        stack = saved.read(f"model.layers.{layer}.mixer.experts.{kind}")
        for expert in (0, 63, 127):
            name = f"backbone.layers.{layer}.mixer.experts.{expert}.{kind}.weight"
            with safe_open(converted[0] / index[name], "pt") as file:
                found = file.get_tensor(name).float()
            expected = stack[expert].float()
            assert ((found - expected).abs() <= expected.abs() / 128).all(), name


THEIRS = """
import json, sys, torch
from transformers import AutoModelForCausalLM
folder, ids, out = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
lm, report = AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
)
with torch.no_grad():
    torch.save(lm.eval()(torch.tensor([ids]), use_cache=False).logits[0], out)
kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
print(json.dumps({kind: sorted(map(str, report[kind])) for kind in kinds}))
"""


def test_transformers_loads_it_and_computes_the_same(
    root: Path, converted: tuple[Path, dict[str, Any]]
) -> None:
    arguments = [converted[0], json.dumps(IDS), root / "logits.pt"]
    done = subprocess.run(
        [sys.executable, "-c", THEIRS, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert [name for names in report.values() for name in names] == []
    lm = load_pretrained(converted[0], dtype=torch.float32, kernels="torch")
    with torch.no_grad():
        ends = torch.tensor([0, len(IDS)], dtype=torch.int32)
        ours = lm.logits(lm(torch.tensor(IDS), ends))
    # 52 layers: the reference itself is 2e-5 from its float64 copy.
    assert_close_rel(ours, torch.load(root / "logits.pt"), 4e-5, "logits")
