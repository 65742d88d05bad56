"""The memory estimate against the worked table of the real job, and its behaviour in each argument."""

import json

import pytest

from hymoe.engine.budget import GIB, choose_rounding, estimate
from hymoe.engine.errors import UserError
from hymoe.model.config import HybridConfig

LIGHTNING = "Nemotron-3.5-Lightning-30B-A3B-NVFP4.config.no_quant.json"
JOB = {
    "world_size": 4,
    "micro_tokens": 16384,
    "micro_steps": 1,
    "dtype": "bfloat16",
    "rounding": "stochastic",
    "recompute": True,
}
TOLERANCE = 0.15  # GiB; the table is rounded to 0.1 and leaves the small tensors (0.12) out


@pytest.fixture
def lightning(shared_dir):
    return HybridConfig.from_dict(json.loads((shared_dir / "facts" / LIGHTNING).read_text()))


@pytest.mark.parametrize(
    ("ranks", "wire", "head", "top", "bottom"),
    [(4, "float32", 58.9, 65.7, 76.5), (8, "float32", 35.9, 42.1, 45.3)],
)
def test_phases_of_the_real_job(lightning, ranks, wire, head, top, bottom):
    budget = estimate(lightning, **JOB | {"world_size": ranks}, reduce_dtype=wire)
    assert budget.phases["head"] / GIB == pytest.approx(head, abs=TOLERANCE)
    assert budget.phases["top"] / GIB == pytest.approx(top, abs=TOLERANCE)
    assert budget.phases["bottom"] / GIB == pytest.approx(bottom, abs=TOLERANCE)
    assert budget.peak == budget.phases["bottom"]
    assert budget.peak_phase == "bottom"


def test_bfloat16_reduction_of_the_real_job(lightning):
    budget = estimate(lightning, **JOB, reduce_dtype="bfloat16")
    assert budget.peak / GIB == pytest.approx(73.4, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("part", "four", "eight"),
    [
        ("weights", 14.7, 7.35),
        ("gradients", 14.7, 7.35),
        ("moments", 29.4, 14.7),
        ("exact remainder", 14.7, 7.35),
        ("head in use", 3.3, 3.3),
        ("block inputs", 4.3, 4.3),
        ("block working set", 2.5, 2.5),
        ("logits chunk", 1.1, 1.1),
    ],
)
def test_parts_of_the_real_job(lightning, part, four, eight):
    for ranks, expected in ((4, four), (8, eight)):
        budget = estimate(lightning, **JOB | {"world_size": ranks, "rounding": "exact"})
        assert budget.parts[part] / GIB == pytest.approx(expected, abs=TOLERANCE)


def test_buffers_of_the_real_job(lightning):
    for ranks, expected in ((4, 10.9), (8, 10.3)):
        parts = estimate(lightning, **JOB | {"world_size": ranks}).parts
        buffers = parts["gathered unit"] + parts["unit gradients and reduction"]
        assert buffers / GIB == pytest.approx(expected, abs=TOLERANCE)


def test_disk_of_the_real_job(lightning):
    budget = estimate(lightning, **JOB)
    assert budget.checkpoint / 1e9 == pytest.approx(189, abs=1)
    assert budget.export / 1e9 == pytest.approx(63, abs=0.5)
    exact = estimate(lightning, **JOB | {"rounding": "exact"})
    assert exact.checkpoint / 1e9 == pytest.approx(253, abs=1)


def tiny():
    return HybridConfig(
        vocab_size=64,
        hidden_size=32,
        pattern="M*-",
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=48,
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=1,
        ssm_state_size=16,
        chunk_size=16,
    )


def peak(**changes):
    return estimate(tiny(), **JOB | {"micro_tokens": 256} | changes).peak


def test_each_argument_moves_the_estimate_the_right_way():
    assert peak(world_size=8) < peak()
    assert peak(micro_tokens=512) > peak()
    assert peak(rounding="exact") > peak() == peak(rounding="nearest")
    assert peak(recompute=False) > peak()
    assert peak(dtype="float32") > peak()
    assert peak(dtype="float32", rounding="exact") == peak(dtype="float32")  # no remainder there
    assert peak(on_gpu=False) < peak() - GIB


def test_micro_steps_keep_a_float32_sum_whatever_their_number():
    one, two, nine = (
        estimate(tiny(), **JOB | {"micro_steps": n, "on_gpu": False}) for n in (1, 2, 9)
    )
    local = one.parts["weights"] // 2
    assert two.parts["gradient sum over micro-steps"] == 4 * local
    assert two.phases["bottom"] - one.phases["bottom"] == 4 * local
    assert two == nine


def test_one_process_gathers_nothing():
    budget = estimate(tiny(), **JOB | {"world_size": 1})
    assert budget.parts["gathered unit"] == budget.parts["unit gradients and reduction"] == 0


def test_peak_is_a_maximum_not_a_sum():
    budget = estimate(tiny(), **JOB | {"on_gpu": False})
    assert budget.margin == 0
    assert budget.peak == max(budget.phases.values()) < sum(budget.parts.values())


def test_rows_name_the_peak_once():
    budget = estimate(tiny(), **JOB)
    rows = budget.rows()
    assert [row for row in rows if row[0] == "peak"] == [("peak", budget.peak_phase, budget.peak)]
    assert {name for kind, name, _ in rows if kind == "phase"} == set(budget.phases)
    assert all(size > 0 for kind, _, size in rows if kind == "part")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"world_size": 0}, "world_size = 0; expected 1 or more"),
        ({"micro_tokens": -1}, "micro_tokens = -1"),
        ({"dtype": "int8"}, "dtype = 'int8'; expected bfloat16 or float32"),
        ({"rounding": "auto"}, "rounding = 'auto'; expected exact, stochastic or nearest"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(UserError, match=message):
        estimate(tiny(), **JOB | changes)


def test_auto_rounding_is_exact_where_it_fits(lightning):
    job = {k: v for k, v in JOB.items() if k != "rounding"}
    exact = estimate(lightning, **JOB | {"rounding": "exact"}).peak
    plain = estimate(lightning, **JOB).peak
    assert choose_rounding(lightning, exact, **job)[0] == "exact"
    mode, reason = choose_rounding(lightning, exact - 1, **job)
    assert mode == "stochastic"
    assert "does not fit; stochastic needs" in reason
    assert "either" not in reason
    mode, reason = choose_rounding(lightning, plain - 1, **job)
    assert mode == "stochastic"
    assert reason.endswith("does not fit either")


def test_auto_rounding_of_float32_needs_no_memory():
    job = {k: v for k, v in JOB.items() if k != "rounding"}
    mode, reason = choose_rounding(tiny(), 0, **job | {"dtype": "float32"})
    assert mode == "exact"
    assert "without a remainder" in reason
