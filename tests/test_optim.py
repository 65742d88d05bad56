"""The optimiser: schedule, global norm and clipping, skipped steps, real FSDP2 shards over 2, 3 and 4 ranks."""

import math
from datetime import timedelta
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from hymoe.engine.export import file_rows
from hymoe.engine.optim import LocalShard, Optimizer, clip, grad_norm, parameter_keys, schedule
from hymoe.kernels.rounding import join_master, update_sums
from tests.close import assert_close_rel
from tests.test_adamw import Watch

BF16, F32 = torch.bfloat16, torch.float32
SETTINGS = {
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "clip_norm": 1.0,
    "seed": 7,
}
IN_PROJ, EMBEDDINGS = "layers.0.mixer.in_proj.weight", "embeddings.weight"
EXPERTS, GATE = "layers.1.mixer.experts.up_proj", "layers.1.mixer.gate.weight"
NORM = "norm_f.weight"
WHOLE = {  # 128 rows and 5 rows do not divide by 3; of 5 rows the fourth rank gets none
    IN_PROJ: ((128, 6), BF16),
    EMBEDDINGS: ((5, 4), BF16),
    EXPERTS: ((12, 3, 2), BF16),
    GATE: ((4, 6), F32),
    NORM: ((6,), F32),
}


def normal(*shape: int, seed: int = 0, std: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std


def whole_weights() -> dict[str, torch.Tensor]:
    return {
        name: normal(*shape, seed=i, std=0.02).to(dtype)
        for i, (name, (shape, dtype)) in enumerate(WHOLE.items())
    }


def whole_gradients(step: int) -> dict[str, torch.Tensor]:
    """Sums over 16 tokens; step 1 has a NaN in the last row of one tensor, step 2 an infinity."""
    grads = {
        name: normal(*shape, seed=100 * step + i, std=16.0)
        for i, (name, (shape, _)) in enumerate(WHOLE.items())
    }
    if step == 1:
        grads[IN_PROJ][-1, -1] = math.nan
    if step == 2:
        grads[NORM][3] = math.inf
    return grads


def optimizer(weights: dict[str, torch.Tensor], rounding="exact", **options) -> Optimizer:
    return Optimizer(weights.items(), rounding=rounding, **(SETTINGS | options))


def step(optim: Optimizer, grads: dict[str, torch.Tensor], lr=1e-3, scale=1 / 16):
    return optim.step([grads[name] for name in optim.names], lr=lr, scale=scale)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def everything(optim: Optimizer, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies of all that a step may change, by name."""
    found = {f"{name}.weight": weight.detach() for name, weight in weights.items()}
    for name, tensors in optim.state().items():
        found |= {f"{name}.{part}": tensor for part, tensor in tensors.items()}
    found["count"] = optim.count
    return {name: tensor.clone() for name, tensor in found.items()}


def files(optim: Optimizer, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every weight as an export gets it in its own dtype."""
    return {
        name: file_rows(optim, name, weights[name], weights[name].dtype) for name in optim.names
    }


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(bits(actual[name]), bits(tensor)), name


# Schedule


def test_schedule_by_its_formula():
    rates = [
        schedule(s, lr=1e-3, min_lr_ratio=0.1, warmup_steps=10, steps=100) for s in range(1, 101)
    ]
    assert rates[0] == 1e-3 / 10
    assert rates[9] == 1e-3
    assert rates[-1] == 1e-3 * 0.1
    assert all(a < b for a, b in pairwise(rates[:10]))
    assert all(a > b for a, b in pairwise(rates[9:]))
    assert rates[54] == pytest.approx(1e-3 * (1 + 0.1) / 2)  # half way down
    assert rates[24] == pytest.approx(1e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi / 6)) / 2))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"warmup_steps": 0, "steps": 1}, [0.5]),
        ({"warmup_steps": 0, "steps": 2}, [1.25, 0.5]),
        ({"warmup_steps": 4, "steps": 4}, [0.5, 1.0, 1.5, 2.0]),
        ({"warmup_steps": 8, "steps": 3}, [0.25, 0.5, 0.75]),  # ends within its warm-up
        ({"warmup_steps": 1, "steps": 2, "min_lr_ratio": 0.0}, [2.0, 0.0]),
        ({"warmup_steps": 1, "steps": 3, "min_lr_ratio": 1.0}, [2.0, 2.0, 2.0]),
    ],
)
def test_schedule_of_short_runs(options, expected):
    options = {"lr": 2.0, "min_lr_ratio": 0.25} | options
    rates = [schedule(s, **options) for s in range(1, options["steps"] + 1)]
    assert rates == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize(
    "wrong", [{"step": 0}, {"step": 11}, {"min_lr_ratio": 1.5}, {"warmup_steps": -1}]
)
def test_schedule_refuses_values_out_of_range(wrong):
    arguments = {"step": 1, "lr": 1.0, "min_lr_ratio": 0.1, "warmup_steps": 2, "steps": 10} | wrong
    with pytest.raises(ValueError, match="schedule: "):
        schedule(arguments.pop("step"), **arguments)


# Keys


def test_keys_are_the_same_in_every_run():
    assert parameter_keys([IN_PROJ, NORM]) == {IN_PROJ: 0x8DBC754A, NORM: 0x4FBF1F3C}
    assert parameter_keys([NORM])[NORM] == parameter_keys([IN_PROJ, NORM])[NORM]


def test_two_names_with_one_key_are_refused():
    """Found by search: the first two layers whose names collide."""
    pair = ["layers.5917.mixer.in_proj.weight", "layers.8563.mixer.in_proj.weight"]
    with pytest.raises(ValueError, match=r"layers\.5917.*layers\.8563.*same key"):
        parameter_keys(pair)
    with pytest.raises(ValueError, match="twice"):
        parameter_keys([NORM, NORM])


# Norm and factor


def test_norm_is_not_rounded_to_bf16():
    grads = [torch.full((999,), 31.625).bfloat16(), normal(77)]
    expected = math.sqrt(sum(float(g.double().square().sum()) for g in grads))
    assert float(grad_norm(grads, [True, True])) == pytest.approx(expected, rel=1e-14)
    assert float(grad_norm(grads, [True, False])) == pytest.approx(
        31.625 * math.sqrt(999), rel=1e-14
    )
    assert float(grad_norm([torch.full((4,), 1e30)], [True])) == pytest.approx(
        2 * float(torch.tensor(1e30))
    )
    assert float(grad_norm([torch.zeros(0)], [True])) == 0


@pytest.mark.parametrize(
    ("norm", "scale", "expected"),
    [
        (8.0, 0.25, 0.125),  # scaled norm 2, halved again
        (2.0, 0.25, 0.25),  # scaled norm 0.5: scale alone
        (4.0, 0.25, 0.25),
        (0.0, 0.25, 0.25),
        (math.nan, 0.25, math.nan),
        (math.inf, 0.25, math.nan),
        (8.0, 0.0, math.nan),
        (8.0, math.inf, math.nan),
        (8.0, math.nan, math.nan),
        (8.0, -1.0, math.nan),
    ],
)
@pytest.mark.parametrize("make", [float, torch.tensor], ids=["float", "tensor"])
def test_factor(norm, scale, expected, make):
    scaled, factor = clip(torch.tensor(norm, dtype=torch.float64), make(scale), 1.0)
    assert factor.dtype == F32
    assert float(factor) == pytest.approx(expected, nan_ok=True)
    assert float(scaled) == pytest.approx(norm * scale, nan_ok=True)
    assert clip(torch.tensor(8.0, dtype=torch.float64), 0.25, math.inf)[1] == 0.25


# One process


def test_equals_torch_clipping_and_adamw_in_float32():
    weights = {name: w.float() for name, w in whole_weights().items()}
    peers = {name: torch.nn.Parameter(w.clone()) for name, w in weights.items()}
    decayed = {IN_PROJ, EXPERTS, GATE}
    groups = [
        {"params": [p], "weight_decay": 0.1 if name in decayed else 0.0}
        for name, p in peers.items()
    ]
    peer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    optim = optimizer(weights)
    for i in (0, 3, 4, 5):
        grads = whole_gradients(i)
        report = step(optim, grads)
        for name, p in peers.items():
            p.grad = grads[name] / 16
        norm = torch.nn.utils.clip_grad_norm_(peers.values(), 1.0)
        peer.step()
        assert float(report.grad_norm) == pytest.approx(float(norm), rel=1e-5)
        assert norm > 1
        assert report.is_applied
    for name, p in peers.items():
        assert_close_rel(weights[name], p, 1e-6, name)


@pytest.mark.parametrize("rounding", ["exact", "stochastic", "nearest"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, None])
def test_a_step_without_a_finite_norm_or_without_tokens_is_skipped(rounding, poison):
    """pytorch/pytorch#46849; None: OLMo-core#657, no supervised token in the whole step."""
    weights = whole_weights()
    optim = optimizer(weights, rounding)
    assert step(optim, whole_gradients(0)).is_applied
    before = everything(optim, weights)
    grads = whole_gradients(3)
    if poison is None:
        report = step(optim, {name: torch.zeros_like(g) for name, g in grads.items()}, scale=0.0)
    else:
        grads[GATE][1, 2] = poison
        report = step(optim, grads)
        assert not report.grad_norm.isfinite()
    assert not report.is_applied
    assert report.clip_factor.isnan()
    assert_same(everything(optim, weights), before)
    assert step(optim, whole_gradients(4)).is_applied
    assert optim.count == 2


def test_experts_without_tokens_keep_their_bits():
    """pytorch/pytorch#126616: zero gradients, no decay."""
    weights = whole_weights()
    optim = optimizer(weights, weight_decay=0.0)
    before = weights[EXPERTS].clone()
    for i in (0, 3, 4):
        grads = whole_gradients(i)
        grads[EXPERTS][2:] = 0
        step(optim, grads)
    assert torch.equal(bits(weights[EXPERTS][2:]), bits(before[2:]))
    assert not torch.equal(weights[EXPERTS][:2], before[:2])


def test_gradients_that_are_missing_or_misshapen_are_named():
    optim = optimizer(whole_weights())
    grads = whole_gradients(0)
    with pytest.raises(ValueError, match=f"gradient of {EXPERTS} is None"):
        step(optim, grads | {EXPERTS: None})
    with pytest.raises(ValueError, match=rf"gradient of {GATE} has local shape \(6, 4\).*\(4, 6\)"):
        step(optim, grads | {GATE: grads[GATE].T})
    with pytest.raises(ValueError, match="1 gradients for 5 parameters"):
        optim.step([grads[NORM]], lr=1e-3, scale=1.0)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("rounding is 'kahan'", {"rounding": "kahan"}),
        ("clip_norm is 0.0", {"clip_norm": 0.0}),
        (
            rf"{EXPERTS}: .*\(12, 3, 2\) from row 4",
            {"shards": {EXPERTS: LocalShard((12, 3, 2), 4, True)}},
        ),
        (
            rf"{EXPERTS}: .*\(12, 3, 2\) from row 0",
            {"shards": {EXPERTS: LocalShard((12, 3, 4), 0, True)}},
        ),
    ],
)
def test_bad_settings_are_refused(message, options):
    with pytest.raises(ValueError, match=message):
        optimizer(whole_weights(), **options)


def test_a_step_does_not_wait_for_the_device():
    weights = whole_weights()
    optim = optimizer(weights, "stochastic")
    grads = whole_gradients(0)
    with Watch([]) as watch:
        step(optim, grads)
    assert watch.largest_bytes > 0
    assert watch.asked == []


@pytest.mark.parametrize("rounding", ["exact", "stochastic"])
def test_a_resumed_run_continues_on_the_same_bits(rounding):
    weights = whole_weights()
    optim = optimizer(weights, rounding)
    step(optim, whole_gradients(0))
    saved = {
        name: {k: t.clone() for k, t in parts.items()} for name, parts in optim.state().items()
    }
    copies = {name: w.clone() for name, w in weights.items()}
    resumed = optimizer(copies, rounding)
    for name, parts in resumed.state().items():  # a state is loaded into the live tensors
        for kind, tensor in parts.items():
            tensor.copy_(saved[name][kind])
    resumed.count.copy_(optim.count)
    for i in (3, 4):
        step(optim, whole_gradients(i))
        step(resumed, whole_gradients(i))
    assert_same(everything(resumed, copies), everything(optim, weights))


def test_the_update_reaches_the_exported_file():
    """200 steps at 3e-7 with exact masters: at least 99 % of the update, and what never moved keeps its bits."""
    base = normal(1 << 15, 4, std=0.02).bfloat16()
    weights = {IN_PROJ: base.clone(), NORM: torch.ones(4)}
    optim = optimizer(weights, weight_decay=0.0)
    grad = normal(1 << 15, 4, seed=1)
    grad[:1000] = 0
    for _ in range(200):
        optim.step([grad, torch.zeros(4)], lr=3e-7, scale=1.0)
    file = file_rows(optim, IN_PROJ, weights[IN_PROJ], BF16)
    remainder = optim.state()[IN_PROJ]["remainder"]
    reached, update = update_sums(base, weights[IN_PROJ], remainder, file)
    assert 0.99 < reached / update < 1.01
    reached_by_nearest, _ = update_sums(base, weights[IN_PROJ], remainder, weights[IN_PROJ])
    assert reached_by_nearest / update < 0.97
    master = join_master(weights[IN_PROJ], remainder)
    assert (master[1000:] != base[1000:]).double().mean() > 0.99
    assert torch.equal(bits(file[:1000]), bits(base[:1000]))
    assert torch.equal(file_rows(optim, NORM, weights[NORM], torch.float32), torch.ones(4))


# Several ranks


class Sharded(torch.nn.Module):
    """The two parameters that FSDP2 shards in these tests."""

    def __init__(self):
        super().__init__()
        weights = whole_weights()
        self.in_proj = torch.nn.Parameter(weights[IN_PROJ])
        self.embeddings = torch.nn.Parameter(weights[EMBEDDINGS])


def rows_of(tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """A rank's rows as torch.chunk cuts them: the law of Shard(0), from another source than the optimiser's."""
    chunks = tensor.chunk(ranks)
    return (chunks[rank] if rank < len(chunks) else tensor[:0]).contiguous()


def train_on(mesh: DeviceMesh, rounding: str) -> dict:
    """Five steps, two of them skipped, on the ranks of a 1-D mesh; returns what this rank holds."""
    rank, ranks = mesh.get_local_rank(), mesh.size()
    module = Sharded()
    fully_shard(module, mesh=mesh)
    whole = whole_weights()
    experts = rows_of(whole[EXPERTS], rank, ranks)
    weights = {
        IN_PROJ: module.in_proj,
        EMBEDDINGS: module.embeddings,
        EXPERTS: experts,
        GATE: whole[GATE],
        NORM: whole[NORM],
    }
    shards = {EXPERTS: LocalShard((12, 3, 2), rank * 12 // ranks, True)}
    optim = optimizer(weights, rounding, beta2=0.99, shards=shards, group=mesh.get_group())
    reports = []
    for i in range(5):
        grads = whole_gradients(i)
        local = {n: g if n in (GATE, NORM) else rows_of(g, rank, ranks) for n, g in grads.items()}
        reports.append(step(optim, local))
    local_weights = {n: w.to_local() if isinstance(w, DTensor) else w for n, w in weights.items()}
    exported = {f"{n}.exported": t.clone() for n, t in files(optim, local_weights).items()}
    return {
        "tensors": everything(optim, local_weights) | exported,
        "norms": [r.grad_norm for r in reports],
        "factors": [r.clip_factor for r in reports],
        "first_rows": {name: shard.first_row for name, shard in optim.shards.items()},
    }


def hybrid_norm() -> torch.Tensor:
    """On a mesh of 2 replicas x 2 shards: each row is held by two ranks and counted once."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module = Sharded()
    fully_shard(module, mesh=mesh)
    optim = optimizer({IN_PROJ: module.in_proj, EMBEDDINGS: module.embeddings})
    grads = {n: rows_of(g, mesh.get_local_rank("shard"), 2) for n, g in whole_gradients(0).items()}
    return step(optim, grads).grad_norm


def refuse_columns() -> str:
    mesh = DeviceMesh("cpu", list(range(4)))
    parameter = DTensor.from_local(torch.zeros(4, 2), mesh, [Shard(1)])
    try:
        optimizer({IN_PROJ: parameter})
    except ValueError as error:
        return str(error)
    return "accepted"


def one_rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=4,
        timeout=timedelta(seconds=60),
    )
    found = {"hybrid_norm": hybrid_norm(), "columns": refuse_columns()}
    for ranks in (2, 3, 4):
        mesh = DeviceMesh("cpu", list(range(ranks)))
        if rank < ranks:
            for rounding in ("exact", "stochastic"):
                found[ranks, rounding] = train_on(mesh, rounding)
    torch.save(found, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory) -> list[dict]:
    folder = tmp_path_factory.mktemp("ranks")
    # A server that imports torch once and forks the ranks: four imports take longer than the test.
    mp.get_context("forkserver").set_forkserver_preload(["torch.distributed.fsdp", __name__])
    mp.start_processes(one_rank, (str(folder),), nprocs=4, start_method="forkserver")
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(4)]


@pytest.mark.parametrize("rounding", ["exact", "stochastic"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_any_number_of_ranks_gives_the_same_bits(four_ranks, ranks, rounding):
    weights = whole_weights()
    optim = optimizer(weights, rounding, beta2=0.99)
    reports = [step(optim, whole_gradients(i)) for i in range(5)]
    assert [bool(r.is_applied) for r in reports] == [True, False, False, True, True]
    expected = everything(optim, weights)
    expected |= {f"{n}.exported": t for n, t in files(optim, weights).items()}

    found = [four_ranks[rank][ranks, rounding] for rank in range(ranks)]
    for rank_found in found:
        for norm, factor, report in zip(
            rank_found["norms"], rank_found["factors"], reports, strict=True
        ):
            assert torch.equal(factor.view(torch.int32), report.clip_factor.view(torch.int32))
            assert float(norm) == pytest.approx(float(report.grad_norm), rel=1e-13, nan_ok=True)
        assert rank_found["norms"][0] == found[0]["norms"][0]  # one all-reduce, one number
    for name, tensor in expected.items():
        parts = [rank_found["tensors"][name] for rank_found in found]
        if name.startswith((GATE, NORM, "count")):
            for part in parts:
                assert torch.equal(bits(part), bits(tensor)), name
        else:
            assert torch.equal(bits(torch.cat(parts)), bits(tensor)), name


def test_first_rows_of_uneven_shards(four_ranks):
    def firsts(name, ranks):
        return [four_ranks[r][ranks, "exact"]["first_rows"][name] for r in range(ranks)]

    assert firsts(IN_PROJ, 3) == [0, 43, 86]
    assert firsts(IN_PROJ, 4) == [0, 32, 64, 96]
    assert firsts(EMBEDDINGS, 3) == [0, 2, 4]
    assert firsts(EMBEDDINGS, 4)[:3] == [0, 2, 4]
    assert firsts(NORM, 4) == [0, 0, 0, 0]
    assert four_ranks[3][4, "exact"]["tensors"][f"{EMBEDDINGS}.weight"].shape == (0, 4)


def test_replicas_are_counted_once(four_ranks):
    grads = whole_gradients(0)
    expected = float(grad_norm([grads[IN_PROJ], grads[EMBEDDINGS]], [True, True])) / 16
    for found in four_ranks:
        assert float(found["hybrid_norm"]) == pytest.approx(expected, rel=1e-13)


def test_shards_of_columns_are_refused(four_ranks):
    for found in four_ranks:
        assert found["columns"].startswith(f"{IN_PROJ} is placed as ")
