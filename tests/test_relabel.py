"""Experts dealt out anew: even ranks, the same model, and nothing of it in exports, states or random bits."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hymoe.engine.balance import FILE, rank_imbalance
from hymoe.engine.checkpoint import Part, Saved
from hymoe.engine.errors import UserError
from hymoe.engine.export import file_rows
from hymoe.engine.hf_checkpoint import load_pretrained, save_pretrained
from hymoe.engine.optim import LocalShard, Optimizer
from hymoe.engine.relabel import ATTRIBUTE, Run, even_order, read_loads, resolve_orders, runs_of
from tests.close import assert_close_rel, relative_error
from tests.forked import Ranks, ranks
from tests.relabel_worker import CASES, STEPS, logits
from tests.runs import REPO, make_data, metrics, save_by_transformers, write_recipe
from tests.test_exchange import environment
from tests.tiny import tiny_config, tiny_lm

LAYERS = {"layers_block_type": ["moe", "mamba", "moe"]}


# --- dealing


@pytest.mark.parametrize(("sigma", "size"), [(0.5, 4), (0.5, 8), (1.0, 4), (1.0, 8)])
def test_ranks_are_even_for_lognormal_popularity(sigma: float, size: int) -> None:
    """128 experts, 23 layers; the loads that gave the order, and another draw of tokens; a hot expert stays one."""
    rng = torch.Generator().manual_seed(int(10 * sigma) + size)
    popularity = torch.exp(sigma * torch.randn(23, 128, generator=rng))
    loads = torch.poisson(popularity * 65536 * 6 / popularity.sum(1, keepdim=True), generator=rng)
    orders = torch.tensor([even_order(layer, size) for layer in loads.int().tolist()])
    ascending = loads.sort(1).values
    least = ascending[:, -1] + ascending[:, : 128 // size - 1].sum(
        1
    )  # of the busiest expert's rank
    bound = (least * size / loads.sum(1)).clamp(min=1.04)
    again = torch.poisson(popularity * 65536 * 6 / popularity.sum(1, keepdim=True), generator=rng)
    assert torch.tensor(rank_imbalance(loads, size)).mean() > 1 + sigma / 7
    for drawn in (loads, again):
        after = torch.tensor(rank_imbalance(drawn, size, orders))
        assert after.median() <= 1.02
        assert bool((after <= 1.02 * bound).all())


def test_dealing_is_a_permutation_with_equal_rooms() -> None:
    loads = [0, 7, 7, 1, 90, 3, 2, 2]
    order = even_order(loads, 4)
    assert sorted(order) == list(range(8))
    assert order == even_order(loads, 4)
    assert all(order[i] < order[i + 1] for i in range(0, 8, 2))
    pairs = [set(order[i : i + 2]) for i in range(0, 8, 2)]
    assert {0, 4} in pairs  # the busiest with the idlest, though nothing makes its rank even
    assert even_order([0] * 8, 4) == tuple(range(8))
    assert even_order([5] * 8, 8) == tuple(range(8))


def test_runs_are_the_rows_in_pieces_without_a_gap() -> None:
    assert runs_of(4, 3, None) == [Run(0, 4, 3)]
    assert runs_of(2, 4, (7, 6, 0, 1, 2, 5, 3, 4)) == [Run(0, 0, 3), Run(3, 5, 1)]
    part = Part(torch.arange(8).view(4, 2), (8, 2), 2, (7, 6, 0, 1, 2, 5, 3, 4))
    assert [(list(chunk.offsets), rows.flatten().tolist()) for chunk, rows in part.chunks] == [
        ([0, 0], [0, 1, 2, 3, 4, 5]), ([5, 0], [6, 7]),
    ]  # fmt: skip


# --- the file


def loads_file(folder: Path, total: object) -> Path:
    (folder / "loads.json").write_text(json.dumps({"steps": 3, "total": total}))
    return folder / "loads.json"


def test_orders_come_from_a_file_of_loads(tmp_path: Path) -> None:
    config = tiny_config(**LAYERS)
    path = loads_file(tmp_path, {"0": [9, 8, 1, 0, 0, 0, 0, 0], "2": [1] * 8})
    orders, said = resolve_orders(str(path), config, 2)
    assert orders[0] == (0, 3, 4, 5, 1, 2, 6, 7)  # 9 against 8 + 1
    assert orders[2] == (0, 2, 4, 6, 1, 3, 5, 7)
    assert "2.00, as dealt 1.00" in said[0]
    assert resolve_orders("", config, 2) == ({}, [])
    none, said = resolve_orders(str(path), config, 1)
    assert none == {}
    assert "changes nothing" in said[0]


@pytest.mark.parametrize(
    ("total", "parts"),
    [
        (None, "has no `total`"),
        ({"0": [1] * 8}, "layers 0; the model's with experts are [0, 2]"),
        ({"0": [1] * 8, "2": [1] * 7}, "layer 2 has 7 loads; expected 8"),
        ({"0": [1] * 7 + [-1], "2": [1] * 8}, "layer 0 has a load of -1"),
        ({"0": [1] * 7 + [0.5], "2": [1] * 8}, "layer 0 has a load of 0.5"),
    ],
)
def test_a_file_of_another_model_is_refused(tmp_path: Path, total: object, parts: str) -> None:
    path = loads_file(tmp_path, total)
    with pytest.raises(UserError) as caught:
        read_loads(path, tiny_config(**LAYERS))
    assert str(path) in str(caught.value)
    assert parts in str(caught.value)


def test_no_file_and_no_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        read_loads(tmp_path / "none.json", tiny_config(**LAYERS))
    (tmp_path / "half.json").write_text('{"total": {')
    with pytest.raises(UserError, match="no JSON"):
        read_loads(tmp_path / "half.json", tiny_config(**LAYERS))


# --- the optimiser's bits


@pytest.mark.parametrize("rounding", ["stochastic", "exact"])
def test_the_random_bits_belong_to_the_expert_and_not_to_its_place(rounding: str) -> None:
    """Rows in another order, as the rows 2 to 6 of a rank: the same bits as in their own, export included."""
    rng = torch.Generator().manual_seed(21)
    whole = torch.randn(8, 6, 5, generator=rng).bfloat16()
    grads = [torch.randn(8, 6, 5, generator=rng).bfloat16() for _ in range(3)]
    order, first, count = (3, 7, 6, 2, 4, 5, 0, 1), 2, 4
    mine = list(order[first : first + count])
    name = "layers.0.mixer.experts.up_proj"

    def optimizer(stack: torch.Tensor, shard: LocalShard) -> Optimizer:
        return Optimizer(
            [(name, stack)], beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, clip_norm=1e9, rounding=rounding,
            seed=5, shards={name: shard},
        )  # fmt: skip

    plain, moved = whole.clone(), whole[mine].clone()
    one = optimizer(plain, LocalShard((8, 6, 5), 0, is_counted=True))
    other = optimizer(moved, LocalShard((8, 6, 5), first, is_counted=True, order=order))
    placed = optimizer(whole[mine].clone(), LocalShard((8, 6, 5), first, is_counted=True))
    for grad in grads:
        one.step([grad], lr=1e-3, scale=1.0)
        for optim in (other, placed):
            optim.step([grad[mine]], lr=1e-3, scale=1.0)
    assert torch.equal(moved, plain[mine])
    for kind, tensor in other.state()[name].items():
        assert torch.equal(tensor, one.state()[name][kind][mine]), kind
    expected, found, lain = (
        file_rows(optim, name, optim._locals()[0], torch.bfloat16) for optim in (one, other, placed)
    )
    assert torch.equal(found, expected[mine])
    assert not torch.equal(lain, expected[mine])  # bits do tell


def test_a_stack_carries_its_order_to_the_optimiser() -> None:
    stack = torch.nn.Parameter(torch.zeros(4, 2))
    setattr(stack, ATTRIBUTE, (2, 3, 0, 1))
    optim = Optimizer(
        [("layers.0.mixer.experts.up_proj", stack)], beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0,
        clip_norm=1.0, rounding="nearest", seed=1,
    )  # fmt: skip
    assert optim.shards["layers.0.mixer.experts.up_proj"].order == (2, 3, 0, 1)


# --- on four ranks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What tests/relabel_worker.py has left, of one process and of four."""
    out = tmp_path_factory.mktemp("relabel")
    save_pretrained(tiny_lm(seed=5, **LAYERS), out / "base", max_shard_size="30KB")
    for count in (1, 4):
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
        command = [sys.executable, *(launcher if count > 1 else [])]
        command += [str(REPO / "tests" / "relabel_worker.py"), str(out), str(count)]
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stderr
    return out


def found(folder: Path, rank: int, ranks_: int = 4) -> dict:
    return torch.load(folder / f"{ranks_}_{rank}.pt")


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_one_process(folder: Path, name: str) -> None:
    alone = load_pretrained(folder / "base")
    for rank in range(4):
        expected = logits(alone, rank)
        assert_close_rel(found(folder, rank)[name]["logits"], expected, 1e-6, f"rank {rank}")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_nothing_trained_is_exported_to_the_bit(folder: Path, name: str) -> None:
    before, after = weights(folder / "base"), weights(folder / f"untrained_4_{name}")
    assert before.keys() == after.keys()
    for tensor, expected in before.items():
        assert torch.equal(after[tensor].view(torch.uint8), expected.view(torch.uint8)), tensor


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_one_process(folder: Path, name: str) -> None:
    """Losses, norms, loads by the base's numbers, trained weights; the correction bias has not moved."""
    one, four = found(folder, 0, 1)["fsdp"], found(folder, 0)[name]
    assert four["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert four["norm"] == pytest.approx(one["norm"], rel=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(four["loads"], one["loads"], strict=True))
    assert four["kept"] == pytest.approx(one["kept"], rel=1e-4)
    before = weights(folder / "base")
    expected, after = (weights(folder / f"trained_{n}") for n in ("1_fsdp", f"4_{name}"))
    for tensor, value in after.items():
        assert_close_rel(value, expected[tensor], 1e-5, tensor)
        is_bias = tensor.endswith("e_score_correction_bias")
        assert torch.equal(value, before[tensor]) == is_bias, tensor


@pytest.mark.slow
def test_the_orders_are_no_small_thing(folder: Path) -> None:
    """Experts that were mixed up would show."""
    trained = weights(folder / "trained_1_fsdp")
    one, other = (trained[f"backbone.layers.0.mixer.experts.{e}.up_proj.weight"] for e in (0, 1))
    assert relative_error(one, other) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp", "gather", "gather_2", "groups_3"])
def test_a_state_of_one_order_goes_on_in_any_other(folder: Path, name: str) -> None:
    """Each tensor to the bit: saved in one order, read in another and saved again; experts lie in their own."""
    step = f"step_{STEPS:08d}"
    saved = Saved(folder / "saved_gather_1" / step)
    again = Saved(folder / f"from_gather_1_{name}" / step)
    assert saved.tensors == again.tensors
    stacks = [tensor for tensor in saved.tensors if ".experts." in tensor]
    assert len(stacks) == 2 * 2 * 3  # layers, projections; weight and moments
    for tensor in [*stacks, "model.layers.0.mixer.gate.weight", "model.embeddings.weight"]:
        assert torch.equal(saved.read(tensor), again.read(tensor)), tensor
    exported = weights(folder / "trained_4_gather_1")
    stack = saved.read("model.layers.2.mixer.experts.down_proj")
    for expert, rows in enumerate(stack):
        tensor = f"backbone.layers.2.mixer.experts.{expert}.down_proj.weight"
        assert torch.equal(rows, exported[tensor]), tensor


@pytest.mark.slow
def test_rows_of_an_expert_are_written_once(folder: Path) -> None:
    """A run of rows is a view of a stack: nothing but its own bytes goes to the disk."""
    sizes = {
        name: sum(f.stat().st_size for f in (folder / f"saved_{name}").rglob("*.distcp"))
        for name in ("gather", "gather_1")
    }
    assert sizes["gather_1"] < 1.3 * sizes["gather"]


# --- the command


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with ranks(tmp_path_factory.mktemp("launch")) as parent:
        yield parent


@pytest.mark.slow
def test_a_run_deals_by_an_earlier_one_and_resumes_with_another_order(
    launch: Ranks, tmp_path: Path
) -> None:
    """BF16 with exact masters on 4 ranks: the numbers of the first run within noise; drift goes on from step 1."""
    data = make_data(tmp_path)
    base = save_by_transformers(tmp_path / "base", torch.bfloat16, data["tokenizer"])
    recipe = write_recipe(
        tmp_path / "recipe.toml",
        model={"path": base},
        data={"path": data["train"], "seq_len": 64, "micro_tokens": 64},
        optim={"lr": 1e-3, "warmup_steps": 2, "rounding": "exact"},
        train={"steps": 4, "step_tokens": 512},
        parallel={"expert_parallel": 4},
        run={"dir": tmp_path / "first", "save_every": 2, "save_in_background": False},
    )
    ran = launch(4, recipe)
    assert ran.codes == [0] * 4, ran.out
    assert "load of the run, max over mean: experts layer 1" in ran.out
    loads = tmp_path / "first" / FILE
    content = json.loads(loads.read_text())
    assert content["steps"] == 4
    tokens = sum(m["tokens"] for m in metrics(tmp_path / "first"))
    assert sum(content["total"]["1"]) == tokens * 3  # top 3 of 8
    second = (recipe, "--run.dir", tmp_path / "second")
    order = ("--parallel.expert-order", loads)
    killed = launch(4, *second, *order, fault="at", where="step", step=4, rank=0, action="kill_all")
    assert "experts dealt out by" in killed.out
    assert killed.codes == [-9] * 4
    resumed = launch(4, *second)
    assert resumed.codes == [0] * 4, resumed.out
    assert "experts dealt out by" not in resumed.out
    first, other = metrics(tmp_path / "first"), metrics(tmp_path / "second")
    assert [m["step"] for m in other] == [1, 2, 3, 4]
    for one, two in zip(first, other, strict=True):
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-3)
        assert two["expert_load_drift"] == pytest.approx(one["expert_load_drift"], abs=0.01)
        assert two["dead_experts"] == 0
    assert other[0]["rank_load_max_over_mean"] < first[0]["rank_load_max_over_mean"]
    assert other[0]["expert_load_drift"] == 0 < other[3]["expert_load_drift"]
    assert json.loads((tmp_path / "second" / FILE).read_text())["steps"] == 4
    before, after = weights(base), weights(tmp_path / "second" / "final")
    for name, tensor in weights(tmp_path / "first" / "final").items():
        assert_close_rel(after[name], tensor, 1e-2, name)
        if name.endswith("e_score_correction_bias"):
            assert torch.equal(after[name], before[name])
    nothing = launch(4, recipe, "--run.dir", tmp_path / "none", "--train.steps", 0, *order)
    assert nothing.codes == [0] * 4, nothing.out
    after = weights(tmp_path / "none" / "final")
    for name, tensor in before.items():
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name
    refused = launch(1, recipe, "--run.dir", tmp_path / "no", "--parallel.expert-parallel", 1,
                     "--parallel.expert-order", data["train"])  # fmt: skip
    assert refused.codes == [2]
    assert f"{data['train']}: no JSON" in refused.out
