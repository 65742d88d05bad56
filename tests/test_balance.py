"""Loads of experts and ranks: metrics of a step, sums of a run, the file and the line that it leaves."""

import json
import math
from pathlib import Path

import pytest
import torch

from hymoe.engine.balance import (
    FILE,
    ExpertLoads,
    dead_experts,
    drift,
    expert_imbalance,
    rank_imbalance,
)
from hymoe.engine.log import step_line

ROWS = torch.tensor([[4, 0, 2, 2], [1, 1, 1, 5]])  # 2 layers, 4 experts, 8 rows each


def test_imbalance_of_experts_and_ranks() -> None:
    assert expert_imbalance(ROWS).tolist() == [2.0, 2.5]
    assert rank_imbalance(ROWS, 2) == [1.0, 1.5]
    orders = torch.tensor(
        [[0, 2, 1, 3], [3, 0, 1, 2]]
    )  # ranks hold 4 + 2 and 0 + 2; 5 + 1 and 1 + 1
    assert rank_imbalance(ROWS, 2, orders) == [1.5, 1.5]
    assert rank_imbalance(torch.zeros(1, 4), 2) == [1.0]
    assert expert_imbalance(torch.zeros(1, 4)).tolist() == [1.0]
    assert dead_experts(ROWS) == [[1], []]


def test_drift_is_the_mean_total_variation_distance() -> None:
    first = torch.tensor([[8, 0, 0, 0], [1, 1, 1, 1]])
    assert drift(first * 3, first) == 0.0  # shares count, not tokens
    moved = torch.tensor([[0, 5, 5, 0], [2, 1, 1, 0]])
    assert drift(moved, first) == pytest.approx((1.0 + 0.25) / 2)
    assert drift(torch.zeros_like(first), first) == 0.0
    assert drift(torch.tensor([[0, 0, 0, 0], [2, 1, 1, 0]]), first) == pytest.approx(0.25)


def test_drift_of_equal_tokens_alone_is_as_small_as_it_says() -> None:
    rng = torch.Generator().manual_seed(3)
    draws = torch.randint(0, 128, (2, 100_000), generator=rng)
    now, then = (torch.bincount(d, minlength=128)[None] for d in draws)
    assert drift(now, then) == pytest.approx(math.sqrt(128 / (math.pi * 100_000)), rel=0.25)


def test_a_run_of_steps_and_its_resume() -> None:
    """Drift is from the first step of the run, also after a resume; loads of a run add up."""
    rng = torch.Generator().manual_seed(11)
    steps = torch.randint(0, 50, (5, 2 * 4), generator=rng).double()
    steps[0, 3] = steps[4, 3] = 0
    whole = ExpertLoads([1, 4], 4, 2)
    expected = [whole.add(rows) for rows in steps]
    begun = ExpertLoads([1, 4], 4, 2)
    found = [begun.add(rows) for rows in steps[:3]]
    resumed = ExpertLoads([1, 4], 4, 2, record=json.loads(json.dumps(begun.record())))
    found += [resumed.add(rows) for rows in steps[3:]]
    assert found == expected
    assert resumed.record() == whole.record()
    assert expected[0]["expert_load_drift"] == 0.0 < expected[1]["expert_load_drift"]
    assert [step["dead_experts"] for step in expected] == [(rows == 0).sum() for rows in steps]
    loads = steps.view(5, 2, 4)
    for step, rows in zip(expected, loads, strict=True):
        assert step["expert_load_max_over_mean"] == max(max(r) / r.mean() for r in rows)
        halves = rows.view(2, 2, 2).sum(2)  # (layers, ranks)
        assert step["rank_load_max_over_mean"] == max(max(h) / h.mean() for h in halves)
        assert 0 <= step["expert_load_drift"] <= 1


def test_without_rows_or_ranks_there_is_no_number() -> None:
    none = ExpertLoads([1, 4], 4, 2)
    assert set(none.add(torch.zeros(8)).values()) == {None}
    assert none.record() == {}
    assert ExpertLoads([], 0).add(torch.zeros(0))["dead_experts"] is None
    assert ExpertLoads([1], 4).add(torch.ones(4))["rank_load_max_over_mean"] is None


def test_the_file_and_the_line(tmp_path: Path) -> None:
    loads = ExpertLoads([1, 4], 4, 2)
    loads.write(tmp_path, 0)
    assert not list(tmp_path.iterdir())
    loads.add(ROWS.flatten())
    loads.add(ROWS.flatten())
    loads.write(tmp_path, 2)
    content = json.loads((tmp_path / FILE).read_text())
    assert content["steps"] == 2
    assert content["first_step"] == {"1": [4, 0, 2, 2], "4": [1, 1, 1, 5]}
    assert content["total"] == {"1": [8, 0, 4, 4], "4": [2, 2, 2, 10]}
    assert [file.name for file in tmp_path.iterdir()] == [FILE]
    assert loads.summary() == (
        "load of the run, max over mean: experts layer 4 2.50, layer 1 2.00; ranks layer 4 1.50, layer 1 1.00; "
        "never chosen: layer 1: 1"
    )


def test_the_console_names_ranks_and_dead_experts() -> None:
    metrics = {"step": 3, "loss": 1.0, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_second": 1.0}
    metrics |= {"step_seconds": 1.0, "expert_load_max_over_mean": 2.5}
    assert step_line(metrics, 9).endswith("load 2.50")
    metrics |= {"rank_load_max_over_mean": 1.25, "dead_experts": 3}
    assert step_line(metrics, 9).endswith("load 2.50  ranks 1.25  dead 3")
