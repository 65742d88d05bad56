"""The memory estimate against the worked table of the real job, and its behaviour in each argument."""

import json
from dataclasses import replace

import pytest

from hymoe.engine import forecast, run
from hymoe.engine import recipe as recipes
from hymoe.engine.budget import (
    GIB,
    Job,
    choose_keep,
    choose_rounding,
    estimate,
    state_parts,
    verdict,
)
from hymoe.engine.devices import DEVICES, World, named_machine
from hymoe.engine.errors import UserError
from hymoe.engine.resolve import resolve
from hymoe.model.config import HybridConfig
from tests.runs import REPO, train
from tests.tiny import tiny_config

LIGHTNING = "Nemotron-3.5-Lightning-30B-A3B-NVFP4.config.no_quant.json"


@pytest.fixture(scope="module")
def lightning(shared_dir) -> HybridConfig:
    return HybridConfig.from_dict(json.loads((shared_dir / "facts" / LIGHTNING).read_text()))


def real(config: HybridConfig, ranks: int, **changes) -> Job:
    """The reference job: 16,384 tokens a rank in one micro-step, every block runs again."""
    values = {
        "micro_tokens": 16384, "micro_steps": 1, "dtype": "bfloat16", "rounding": "stochastic",
        "keep": "inputs", "expert_parallel": ranks, "exchange": "gather" if ranks <= 4 else "dedup",
    }  # fmt: skip
    return Job(config=config, world_size=ranks, **values | changes)


def gib(size: float) -> float:
    return size / GIB


@pytest.mark.parametrize(
    ("ranks", "weights", "gradients", "moments", "remainder"),
    [(4, 14.7, 14.7, 29.4, 14.7), (8, 7.35, 7.35, 14.7, 7.35), (2, 29.4, 29.4, 58.8, 29.4)],
)
@pytest.mark.parametrize("shared", [True, False], ids=["experts stay", "fsdp"])
def test_state_of_the_real_job(lightning, ranks, weights, gradients, moments, remainder, shared):
    job = real(lightning, ranks, rounding="exact", expert_parallel=ranks if shared else 1)
    parts = estimate(job).parts
    assert gib(parts["weights"]) == pytest.approx(weights, abs=0.06)
    assert gib(parts["gradients"]) == pytest.approx(gradients, abs=0.06)
    assert gib(parts["moments"]) == pytest.approx(moments, abs=0.06)
    assert gib(parts["exact remainder"]) == pytest.approx(remainder, abs=0.06)


def test_parts_of_the_real_job(lightning):
    parts = estimate(real(lightning, 4)).parts
    assert gib(parts["block inputs"]) == pytest.approx(53 * 16384 * 2688 * 2 / GIB, abs=0.01)
    assert gib(parts["logits chunk"]) == pytest.approx(1.0, abs=0.1)
    # Weight, the buffer that it came in, float32 gradient: 8 bytes of 352 M values.
    assert gib(parts["head in use"]) == pytest.approx(2.6, abs=0.05)


# The peak of a plan in the worked table of scale estimates, and what ours differs by, in GiB, with its reason.
TABLE = {
    # Units are counted block by block: a MoE block's buffers never meet a Mamba block's activations.
    "4 fsdp": (4, {"expert_parallel": 1}, 73.4, -4.1),
    # The table's 8 ranks reduce in float32, too.
    "8 fsdp": (8, {"expert_parallel": 1}, 45.3, -6.5),
    # The same design as the table's.
    "4 dedup": (4, {"exchange": "dedup"}, 66.2, -0.2),
    "8 dedup": (8, {}, 35.9, +0.2),
    # Room for every choice of every row that comes, because a GPU is not asked how many are at hand.
    "4 gather": (4, {}, 66.2, +3.1),
    "2 gather": (2, {}, 127.0, +0.2),
}


@pytest.mark.parametrize("name", TABLE)
def test_peaks_of_the_real_job(lightning, name):
    ranks, changes, expected, differs = TABLE[name]
    budget = estimate(real(lightning, ranks, **changes))
    assert gib(budget.peak) == pytest.approx(expected + differs, abs=0.3)


def test_phases_of_the_real_job(lightning):
    """Gradients come as inputs go, so that the worst moment is near the bottom; the optimiser needs no activations."""
    budget = estimate(real(lightning, 4))
    assert budget.peak == budget.phases["bottom"]
    assert list(budget.phases) == ["forward", "head", "top", "bottom", "update"]
    state = 14.7 + 29.4 + 14.7 + 0.12
    assert gib(budget.phases["update"]) == pytest.approx(1.04 * state + 1.5, abs=0.15)


def test_what_is_kept_in_the_real_job(lightning):
    """Of 23 MoE blocks at 16,384 tokens: received rows 4 x 16,384 x 2,688 x 2 bytes, and so on."""
    job = real(lightning, 4, implementation="torch", load_skew=1.0)
    found = {keep: estimate(replace(job, keep=keep), on_gpu=False) for keep in ("inputs", "acts")}
    tables = 16384 * 6 * 24 + 65537 * 6 * 4
    assert found["inputs"].parts["kept activations"] / 23 == pytest.approx(tables, rel=1e-3)
    rows, act, shared = 65537 * 2688 * 2, 16384 * 6 * 1856 * 2, 16384 * 3712 * 2
    normed = 16384 * 2688 * (2 + 4)  # and the router's float32 copy of it
    large = rows + act + shared + normed
    assert found["acts"].parts["kept activations"] / 23 == pytest.approx(large, rel=0.1)


def test_disk_and_host_of_the_real_job(lightning):
    budget = estimate(real(lightning, 4))
    assert budget.checkpoint / 1e9 == pytest.approx(189, abs=1)
    assert budget.export / 1e9 == pytest.approx(63, abs=0.5)
    assert 4 * budget.host / 1e9 == pytest.approx(189, abs=1)
    exact = estimate(real(lightning, 4, rounding="exact"))
    assert exact.checkpoint / 1e9 == pytest.approx(253, abs=1)
    assert 4 * exact.host / 1e9 == pytest.approx(253, abs=1)


def tiny(**changes) -> Job:
    config = tiny_config(layers_block_type=["moe", "linear_attention", "full_attention", "moe"])
    values = {
        "world_size": 4, "micro_tokens": 512, "micro_steps": 1, "dtype": "bfloat16",
        "rounding": "stochastic", "keep": "inputs",
    }  # fmt: skip
    return Job(config=config, **values | changes)


def peak(on_gpu: bool = False, **changes) -> int:
    return estimate(tiny(**changes), on_gpu=on_gpu).peak


def test_each_argument_moves_the_estimate_the_right_way():
    assert peak(world_size=8, micro_tokens=8) < peak(micro_tokens=8)
    assert peak(micro_tokens=1024) > peak()
    assert peak(rounding="exact") > peak() == peak(rounding="nearest")
    assert peak(keep="all") > peak(keep="acts") > peak()
    assert peak(dtype="float32") > peak()
    assert peak(dtype="float32", rounding="exact") == peak(dtype="float32")  # no remainder there
    assert peak(on_gpu=True) > peak() + GIB
    assert peak(micro_steps=2) > peak()
    assert peak(expert_parallel=4, load_skew=2.0, exchange="dedup") > peak(
        expert_parallel=4, exchange="dedup"
    )


def test_experts_that_stay_are_divided_by_their_group():
    """Of 8 ranks in groups of 4 each group has a copy; the dense part is spread over all."""
    alone = state_parts(tiny(world_size=1))["weights"]
    experts = 2 * 2 * (2 * 8 * 32 * 24)  # two layers, BF16, up and down of 8 experts
    for ranks, group in ((8, 4), (4, 4), (4, 2), (4, 1), (8, 8)):
        found = state_parts(tiny(world_size=ranks, expert_parallel=group))
        share = experts / (group if group > 1 else ranks)
        # Rows that do not divide are rounded up on the first rank.
        assert found["weights"] == pytest.approx((alone - experts) / ranks + share, rel=0.02)
        assert found["moments"] == 2 * found["weights"]


def test_micro_steps_in_several_passes_keep_a_float32_sum():
    one = state_parts(tiny(micro_steps=3))
    several = state_parts(tiny(micro_steps=3, together=2))
    assert one["gradient sum over passes"] == 0
    assert several["gradient sum over passes"] == pytest.approx(2 * several["weights"], rel=0.2)
    assert tiny(micro_steps=3, together=2).passes == 2
    assert tiny(micro_steps=3).passes == 1


def test_one_process_gathers_nothing():
    parts = estimate(tiny(world_size=1)).parts
    assert parts["gathered unit"] == parts["unit gradients and reduction"] == 0


def test_peak_is_a_maximum_not_a_sum():
    budget = estimate(tiny(), on_gpu=False)
    assert budget.margin == 0
    assert budget.peak == max(budget.phases.values()) < sum(budget.parts.values())


def test_rows_name_the_peak_once():
    budget = estimate(tiny())
    rows = budget.rows()
    assert [row for row in rows if row[0] == "peak"] == [("peak", budget.peak_phase, budget.peak)]
    assert {name for kind, name, _ in rows if kind == "phase"} == set(budget.phases)
    assert all(size > 0 for kind, _, size in rows if kind == "part")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world_size": 0}, "world_size = 0; expected 1 or more"),
        ({"micro_tokens": -1}, "micro_tokens = -1"),
        ({"dtype": "int8"}, "dtype = 'int8'; expected bfloat16, float32"),
        ({"rounding": "auto"}, "rounding = 'auto'; expected exact, stochastic, nearest"),
        ({"keep": "auto"}, "keep = 'auto'; expected all, acts, inputs"),
        ({"exchange": "post"}, "exchange = 'post'; expected gather, dedup"),
        ({"expert_parallel": 3}, "expert_parallel = 3; expected a divisor of 4 ranks"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(UserError, match=message):
        estimate(tiny(**changes))


def test_auto_rounding_is_exact_where_it_fits(lightning):
    job = real(lightning, 4)
    exact, plain = estimate(replace(job, rounding="exact")).peak, estimate(job).peak
    assert choose_rounding(job, exact)[0] == "exact"
    mode, reason = choose_rounding(job, exact - 1)
    assert mode == "stochastic"
    assert "does not fit; stochastic needs" in reason
    assert "either" not in reason
    mode, reason = choose_rounding(job, plain - 1)
    assert mode == "stochastic"
    assert reason.endswith("does not fit either")


def test_auto_rounding_of_float32_needs_no_memory():
    mode, reason = choose_rounding(tiny(dtype="float32"), 0)
    assert mode == "exact"
    assert "without a remainder" in reason


def test_auto_keep_is_the_most_that_fits():
    peaks = {keep: peak(keep=keep) for keep in ("all", "acts", "inputs")}
    for keep, needed in peaks.items():
        assert choose_keep(tiny(), needed, on_gpu=False)[0] == keep
    assert choose_keep(tiny(), peaks["inputs"] - 1, on_gpu=False)[0] == "inputs"


def test_verdict_says_what_to_change(lightning):
    def said(job: Job, memory: float) -> str:
        return verdict(estimate(job), job, int(memory * GIB))

    job = real(lightning, 4, rounding="exact")
    assert said(job, 95).startswith("fits: ")
    assert " of 95.0 GiB" in said(job, 95)
    tight = said(job, 79.2)
    assert tight.startswith("does not fit: needs ")
    assert "the largest part is moments (29.4)" in tight
    assert tight.endswith("try optim.rounding = stochastic")
    assert said(replace(job, keep="all", rounding="stochastic"), 79.2).endswith(
        "try train.keep = inputs"
    )
    assert said(job, 45).endswith("try 8 ranks")
    assert "no number of ranks" in said(job, 3)


# Reference recipes: device, ranks, and the GiB of the verdict.
RECIPES = {
    "lightning_4x95": ("rtxpro6000", 4, 81.3, 95.0),
    "lightning_8x80": ("h100", 8, 63.6, 79.2),
    "lightning_4x80": ("h100", 4, 66.0, 79.2),
    "lightning_2xh200": ("h200", 2, 129.2, 139.0),
}


@pytest.fixture
def base(shared_dir, tmp_path):
    """A checkpoint of which only the config is here."""
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_bytes((shared_dir / "facts" / LIGHTNING).read_bytes())
    return folder


@pytest.mark.parametrize("name", RECIPES)
def test_reference_recipes_fit_their_machines(name, base):
    device, ranks, needed, there = RECIPES[name]
    recipe = recipes.load(REPO / "scripts" / "recipes" / f"{name}.toml")
    recipe = replace(recipe, model=replace(recipe.model, path=str(base)))
    here = World(0, 0, 1)
    resolved = resolve(recipe, here, named_machine(device, ranks, here))
    said = run.dry_run(resolved)
    assert f"verdict fits: {needed} of {there} GiB" in said
    assert "weights are not here; their headers were not checked" in said
    assert "packed is not here; it was not checked" in said
    assert "predicted, not measured" in said
    floor = forecast.floor(resolved.needs, DEVICES[device], None)
    assert 0.1 < floor.seconds < 2
    assert f"floor   {floor.seconds:.2f} s a step" in said


def test_a_dry_run_on_the_command_line_for_a_machine_that_is_not_here(base, tmp_path):
    recipe = REPO / "scripts" / "recipes" / "lightning_4x80.toml"
    flags = ("--model.path", base, "--run.dir", tmp_path / "run")
    done = train(1, recipe, "--dry-run", "--device", "rtxpro6000", "--ranks", 4, *flags)
    assert done.returncode == 0, done.stderr
    assert "verdict fits: 66.0 of 95.0 GiB" in done.stdout
    assert not (tmp_path / "run").exists()
    for wrong, message in (
        (("--dry-run", "--device", "abacus"), "--device abacus: expected one of h100"),
        (("--dry-run", "--ranks", 0), "--ranks 0: expected 1 or more"),
        (("--device", "h100"), "expected --dry-run beside it"),
        ((), "no model.safetensors"),  # a real run needs the weights
    ):
        done = train(1, recipe, *wrong, *flags)
        assert done.returncode == 2, done.stdout
        assert message in done.stderr


def test_floors_by_hand(lightning):
    """4 x RTX Pro 6000: bytes at 32 and 41 GB/s, operations at 503 TFLOP/s, state at 1.79 TB/s."""
    job, device = real(lightning, 4), DEVICES["rtxpro6000"]
    sent = forecast.sent(job)
    assert sent["exchange"] == pytest.approx(5 * 3 * 16384 * 2688 * 2 * 23, rel=0.01)
    floor = forecast.floor(job, device, None)
    link = (sent["exchange"] + sent["reduce"]) / 32e9 + (sent["gather"] + sent["replicas"]) / 41e9
    assert floor.link == pytest.approx(link)
    assert floor.compute == pytest.approx(22.95e9 * 16384 / 503e12, rel=0.001)
    # Weights, two moments read and written, gradients read: 14 bytes of 7.9 G values.
    assert floor.update == pytest.approx(14 * 31.57e9 / 4 / 1.79e12, rel=0.01)
    assert floor.seconds == max(floor.compute, floor.link) + floor.update
