"""Checkpoints in and out: every byte, every name, every dtype, on one rank and on several."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hymoe.engine import hf_index
from hymoe.engine.hf_checkpoint import (
    Checkpoint,
    export_dtypes,
    load_pretrained,
    load_weights,
    near_zero_rows,
    read_local_rows,
    save_pretrained,
)
from hymoe.engine.hf_rows import named_tensors
from hymoe.model.names import by_parameter, is_small
from hymoe.model.net import HybridLM
from tests import hf_worker
from tests.hf_folder import (
    INDEX,
    contents,
    file_digests,
    rewrite,
    save_reference,
    save_sharded,
)
from tests.tiny import tiny_config, tiny_lm

REPO = Path(__file__).resolve().parent.parent
ROUTER_BIAS = "backbone.layers.1.mixer.gate.e_score_correction_bias"


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A float32 checkpoint in one file, saved by transformers. Tests copy it before they change it."""
    return save_reference(tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A BF16 checkpoint in several shards with mtp tensors."""
    return save_sharded(tmp_path_factory.mktemp("sharded"))


@pytest.fixture
def folder(reference, tmp_path):
    """A copy of `reference` that a test may change."""
    return Path(shutil.copytree(reference, tmp_path / "base"))


@pytest.mark.parametrize("dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("size", ["5GB", "40KB"])
@pytest.mark.parametrize("source", ["reference", "sharded"])
def test_zero_steps_give_the_same_bytes(source, size, dtype, request, tmp_path):
    base = request.getfixturevalue(source)
    lm = load_pretrained(base, dtype=dtype)
    assert lm.source == base
    save_pretrained(lm, tmp_path / "out", max_shard_size=size)
    assert contents(tmp_path / "out") == contents(base)
    before, after = file_digests(base), file_digests(tmp_path / "out")
    rest = {name for name in before if "safetensors" not in name}
    assert "config.json" in rest
    assert {name: after.get(name) for name in rest} == {name: before[name] for name in rest}


def test_loaded_values_and_dtypes_are_those_of_the_file(sharded):
    lm = load_pretrained(sharded)
    files = {}
    for file in sharded.glob("*.safetensors"):
        files |= load_file(file)
    tensors = named_tensors(lm)
    for name, tensor in tensors.items():
        if ".experts." in name:
            start, end = name.rsplit(".", 1)
            rows = [files[f"backbone.{start}.{e}.{end}.weight"] for e in range(5)]
            expected = torch.stack(rows)
        else:
            expected = files["lm_head.weight" if name == "head.weight" else f"backbone.{name}"]
        wanted = torch.float32 if name.endswith("e_score_correction_bias") else expected.dtype
        assert tensor.dtype == wanted, name
        assert torch.equal(tensor.detach(), expected.to(wanted)), name
    assert {t.dtype for n, t in tensors.items()} == {torch.bfloat16, torch.float32}
    assert all(p.requires_grad for p in lm.parameters())


def test_a_given_dtype_leaves_small_tensors_float32(sharded):
    lm = load_pretrained(sharded, dtype=torch.bfloat16)
    for name, tensor in named_tensors(lm).items():
        assert tensor.dtype == (torch.float32 if is_small(name) else torch.bfloat16), name


def test_transformers_loads_the_export_and_computes_the_same(sharded, tmp_path):
    from transformers import NemotronHForCausalLM

    lm = load_pretrained(sharded, dtype=torch.float32)
    save_pretrained(lm, tmp_path / "out", max_shard_size="40KB")
    ids = torch.arange(1, 20)[None]
    logits = []
    for path in (sharded, tmp_path / "out"):
        model, info = NemotronHForCausalLM.from_pretrained(
            path, output_loading_info=True, dtype=torch.float32
        )
        assert not any(info.values()), info
        with torch.no_grad():
            logits.append(model.eval()(ids).logits)
    assert torch.equal(logits[0], logits[1])
    changed = lm.embeddings.weight.detach()[5].clone()
    with torch.no_grad():
        lm.embeddings.weight[5] += 1  # and the export follows the model, not the base
    save_pretrained(lm, tmp_path / "changed")
    model = NemotronHForCausalLM.from_pretrained(tmp_path / "changed", dtype=torch.float32)
    row = model.get_input_embeddings().weight.detach()[5]
    assert torch.equal(row, (changed + 1).bfloat16().float())


def test_index_size_limit_and_order(sharded, tmp_path):
    lm = load_pretrained(sharded)
    plan = save_pretrained(lm, tmp_path / "a", max_shard_size=20_000)
    save_pretrained(lm, tmp_path / "b", max_shard_size="20KB")
    assert file_digests(tmp_path / "a") == file_digests(tmp_path / "b")
    index = json.loads((tmp_path / "a" / INDEX).read_text())
    entries = Checkpoint.open(tmp_path / "a").entries
    assert index["metadata"]["total_size"] == sum(entry.nbytes for entry in entries.values())
    assert index["metadata"]["total_size"] == plan.total_size
    shards = sorted(path.name for path in (tmp_path / "a").glob("*.safetensors"))
    count = len(shards)
    assert shards == [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    assert count > 5
    for shard in shards:
        inside = [name for name, file in index["weight_map"].items() if file == shard]
        size = (tmp_path / "a" / shard).stat().st_size
        assert size <= 20_000 or len(inside) == 1, shard
    order = list(index["weight_map"])
    assert order[0] == "backbone.embeddings.weight"
    assert order.index("lm_head.weight") < min(i for i, n in enumerate(order) if n[:4] == "mtp.")
    save_pretrained(lm, tmp_path / "one")
    assert (tmp_path / "one" / "model.safetensors").is_file()
    assert not (tmp_path / "one" / INDEX).exists()


def test_other_prefix_is_kept(folder, tmp_path):
    def rename(tensors):
        return {n.replace("backbone.", "model.", 1): t for n, t in tensors.items()}

    rewrite(folder, rename)
    save_pretrained(load_pretrained(folder), tmp_path / "out")
    assert contents(tmp_path / "out") == contents(folder)
    assert "model.norm_f.weight" in contents(tmp_path / "out")


@pytest.mark.parametrize("with_head", [True, False], ids=["head-too", "no-head"])
def test_tied_embeddings(with_head, folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))

    def tie(tensors):
        tensors.pop("lm_head.weight")
        if with_head:
            tensors["lm_head.weight"] = tensors["backbone.embeddings.weight"].clone()
        return tensors

    rewrite(folder, tie)
    lm = load_pretrained(folder)
    assert lm.head.weight is lm.embeddings.weight
    save_pretrained(lm, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(folder)
    with torch.no_grad():
        lm.embeddings.weight.mul_(2)
    save_pretrained(lm, tmp_path / "trained")
    after = load_file(tmp_path / "trained" / "model.safetensors")
    assert ("lm_head.weight" in after) == with_head
    if with_head:
        assert torch.equal(after["lm_head.weight"], after["backbone.embeddings.weight"])


def test_experts_of_two_dtypes_are_promoted_and_come_back(folder, tmp_path):
    """Promotion loses nothing; to refuse would lose the user's checkpoint."""
    two = {
        f"backbone.layers.1.mixer.experts.{e}.up_proj.weight": dtype
        for e, dtype in ((1, torch.bfloat16), (4, torch.float16))
    }
    rewrite(folder, lambda tensors: {n: t.to(two.get(n, t.dtype)) for n, t in tensors.items()})
    lm = load_pretrained(folder)
    assert lm.layers[1].mixer.experts.up_proj.dtype == torch.float32
    assert export_dtypes(lm)["layers.1.mixer.experts.up_proj"] == torch.float32
    save_pretrained(lm, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(folder)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_state_space_and_router_values_survive(stored, folder, tmp_path):
    """radixark/miles#975 (decay rates through BF16), NVIDIA-NeMo/Automodel#2553 (router bias in BF16)."""
    bias = torch.tensor([34.40, 34.45, 34.60, 34.41, 34.42, 34.43, 34.44, 34.46])
    small = {
        "backbone.layers.0.mixer.A_log": torch.tensor([59.0, 61, 63, 64]).log().to(stored),
        "backbone.layers.0.mixer.D": torch.tensor([0.1, 0.2, 0.3, 0.7]).to(stored),
        "backbone.layers.0.mixer.dt_bias": torch.tensor([0.1, 0.2, 0.3, 0.4]).to(stored),
        ROUTER_BIAS: bias,
    }
    rewrite(folder, lambda tensors: tensors | small)
    for dtype in (None, torch.bfloat16):
        lm = load_pretrained(folder, dtype=dtype)
        mamba, gate = lm.layers[0].mixer, lm.layers[1].mixer.gate
        exact = small["backbone.layers.0.mixer.A_log"].float()
        assert torch.equal(mamba.A_log.detach().float(), exact)
        rates = mamba.A_log.detach().float().exp()
        near = torch.allclose(rates, torch.tensor([59.0, 61, 63, 64]), rtol=1e-5, atol=0)
        assert near == (stored == torch.float32)
        assert gate.e_score_correction_bias.dtype == torch.float32
        assert torch.equal(gate.e_score_correction_bias, bias)
        assert len(set(bias.bfloat16().tolist())) < len(bias)  # what the peer did
        assert not [n for n, _ in lm.named_parameters() if "e_score" in n]
        save_pretrained(lm, out := tmp_path / f"out-{dtype}")
        before, after = contents(folder), contents(out)
        assert {n: after[n] for n in small} == {n: before[n] for n in small}


def test_nothing_is_initialised_after_loading(folder, tmp_path):
    """huggingface/transformers#45591: trained dt_bias and out_proj were replaced by fresh random ones."""
    config = json.loads((folder / "config.json").read_text())
    raw = {**config, "rescale_prenorm_residual": True}
    (folder / "config.json").write_text(json.dumps(raw))
    rewrite(
        folder,
        lambda tensors: (
            tensors
            | {
                "backbone.layers.0.mixer.dt_bias": torch.tensor([0.1, 0.2, 0.3, 0.4]),
                "backbone.layers.0.mixer.out_proj.weight": torch.full((32, 48), 0.05),
            }
        ),
    )
    lm = load_pretrained(folder)
    mixer = lm.layers[0].mixer
    assert torch.equal(mixer.dt_bias.detach(), torch.tensor([0.1, 0.2, 0.3, 0.4]))
    assert torch.equal(mixer.out_proj.weight.detach(), torch.full((32, 48), 0.05))
    save_pretrained(lm, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(folder)


def test_loading_over_existing_values_replaces_all_of_them(reference):
    """In place, into whatever dtype is there; the storage stays."""
    lm = tiny_lm(seed=5, dtype=torch.float64)
    places = {name: tensor.data_ptr() for name, tensor in named_tensors(lm).items()}
    for tensor in named_tensors(lm).values():
        tensor.detach().fill_(torch.nan)
    steps = []
    load_weights(lm, Checkpoint.open(reference), progress=lambda *at: steps.append(at))
    fresh = named_tensors(load_pretrained(reference))
    for name, tensor in named_tensors(lm).items():
        assert torch.equal(tensor.detach(), fresh[name].detach().to(tensor.dtype)), name
        assert tensor.data_ptr() == places[name]
    size = sum(entry.nbytes for entry in Checkpoint.open(reference).entries.values())
    assert steps[-1] == (size, size)
    assert steps == sorted(steps)


def test_a_tensor_that_would_never_be_loaded_is_named(reference):
    lm = tiny_lm()
    lm.layers[2].mixer.register_parameter("extra", torch.nn.Parameter(torch.zeros(3)))
    with pytest.raises(ValueError, match=r"layers\.2\.mixer\.extra"):
        load_weights(lm, Checkpoint.open(reference))
    lm = tiny_lm()
    del lm.norm_f.weight
    with pytest.raises(ValueError, match=r"norm_f\.weight"):
        load_weights(lm, Checkpoint.open(reference))
    lm = HybridLM(lm.config, kernels="torch", device="meta")
    with pytest.raises(ValueError, match=r"embeddings\.weight is on the meta device"):
        load_weights(lm, Checkpoint.open(reference))


def test_rows_are_read_by_slices_and_only_those(reference, monkeypatch):
    """Of rows 10 to 30 no byte outside is touched, and what is converted passes in bounded slices."""
    checkpoint = Checkpoint.open(reference)
    name = "backbone.embeddings.weight"
    entry = checkpoint.entries[name]
    whole = load_file(reference / "model.safetensors")[name]
    pread, ranges = hf_index._pread, []

    def recorded(fd, into, offset, entry):
        ranges.append((offset - entry.start, len(into)))
        pread(fd, into, offset, entry)

    monkeypatch.setattr(hf_index, "_pread", recorded)
    monkeypatch.setattr(hf_index, "SLICE_BYTES", 3 * 32 * 4)
    row = entry.nbytes // entry.shape[0]
    assert torch.equal(checkpoint.read(name, 10, 30), whole[10:30])
    assert ranges == [(10 * row, 20 * row)]
    for out in (torch.full((20, 32), torch.nan, dtype=torch.float64), torch.empty(32, 20).t()):
        ranges.clear()
        checkpoint.read_into(name, out, 10)
        assert torch.equal(out.float(), whole[10:30])
        assert [size for _, size in ranges] == [3 * row] * 6 + [2 * row]
        assert [at for at, _ in ranges] == [(10 + 3 * i) * row for i in range(7)]
    with pytest.raises(ValueError, match=r"embeddings.*from row 90"):
        checkpoint.read_into(name, torch.empty(20, 32), 90)


def test_rows_of_the_base_can_be_read_beside_a_parameter(sharded):
    lm = load_pretrained(sharded)
    checkpoint = Checkpoint.open(sharded)
    specs = checkpoint.check_against(lm.config)
    for name, tensor in named_tensors(lm).items():
        rows = read_local_rows(checkpoint, specs, name, tensor)
        assert torch.equal(rows.to(tensor.dtype), tensor.detach()), name


def test_near_zero_rows(folder):
    """A token that a base model never saw; small but real rows are not among them."""

    def dim(tensors):
        weight = tensors["backbone.embeddings.weight"]
        weight[3] = 0
        weight[11] = 1e-17
        weight[96] *= 1e-5
        weight[20] *= 0.05
        return tensors

    assert near_zero_rows(Checkpoint.open(folder)) == []
    rewrite(folder, dim)
    assert near_zero_rows(Checkpoint.open(folder)) == [3, 11, 96]
    assert near_zero_rows(load_pretrained(folder)) == [3, 11, 96]
    assert near_zero_rows(load_pretrained(folder, dtype=torch.bfloat16)) == [3, 11, 96]


def test_without_a_base_weights_and_config_alone_are_written(tmp_path):
    """Big tensors in the dtype of the config, small ones in float32."""
    from transformers import NemotronHForCausalLM

    lm = HybridLM(tiny_config(dtype="bfloat16"), kernels="torch")
    lm.init_weights(0)
    save_pretrained(lm, tmp_path / "out", max_shard_size="30KB")
    for name, entry in Checkpoint.open(tmp_path / "out").entries.items():
        ours = name.removeprefix("backbone.").replace("lm_head", "head")
        small = ".experts." not in name and is_small(ours)
        assert entry.dtype == ("F32" if small else "BF16"), name
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == lm.config.to_dict()
    again = named_tensors(load_pretrained(tmp_path / "out"))
    for name, tensor in named_tensors(lm).items():
        assert torch.equal(again[name].detach(), tensor.detach().to(again[name].dtype)), name
    _, info = NemotronHForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info


def run_ranks(tmp_path, world, source, dtype):
    """Runs tests/hf_worker.py on each rank; returns what each printed."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    command = [sys.executable, str(REPO / "tests" / "hf_worker.py")]
    rest = [str(world), str(tmp_path / "meeting"), str(source), str(tmp_path / "out"), dtype]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), *rest],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    answers = []
    for process in ranks:
        out, error = process.communicate(timeout=300)
        assert process.returncode == 0, error
        answers.append(json.loads(out.splitlines()[-1]))
    return answers


# 2: the smallest; 4: 5 experts leave one rank without any. float32: every byte is converted twice.
@pytest.mark.slow
@pytest.mark.parametrize(("world", "dtype"), [(2, "bfloat16"), (4, "float32")])
def test_sharded_ranks_load_and_save_the_same_bytes_as_one(world, dtype, sharded, tmp_path):
    answers = run_ranks(tmp_path, world, sharded, dtype)
    lm = load_pretrained(sharded, dtype=getattr(torch, dtype))
    save_pretrained(lm, tmp_path / "alone", max_shard_size="40KB")
    assert file_digests(tmp_path / "out") == file_digests(tmp_path / "alone")
    assert contents(tmp_path / "out") == contents(sharded)

    one = {name: hf_worker.digest(tensor) for name, tensor in named_tensors(lm).items()}
    checkpoint = Checkpoint.open(sharded)
    files = by_parameter(checkpoint.check_against(lm.config))
    for answer in answers:
        # Before that, an export for which rank 1 had no disk: all ranks say so, and nothing is left.
        assert answer["error"].startswith("UserError"), answer
        assert "No space left on device" in answer["error"]
        assert answer["left"] == ["meeting"]
        assert answer["digests"] == one
        assert answer["near_zero"] == []
        assert answer["out_of_place"] == []
        sizes = {n: sum(checkpoint.entries[f].nbytes for f in files[n]) for n in files}
        mine = sum(sizes[n] * answer["held"][n] // len(named_tensors(lm)[n]) for n in files)
        assert answer["read"] == mine  # its own rows, once each, and nothing else
    stack = "layers.1.mixer.experts.up_proj"
    assert [answer["held"][stack] for answer in answers] == ([3, 2] if world == 2 else [2, 2, 1, 0])
    # A small tensor is on every rank and written by one; a sharded one by all that hold rows.
    wrote = [name for answer in answers for name in answer["wrote"]]
    assert wrote.count("layers.0.mixer.A_log") == 1
    assert wrote.count("head.weight") == world
