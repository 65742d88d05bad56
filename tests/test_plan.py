"""The loss is one sum over one count, whatever rank or micro-step a token lies in; no step can hang or harm.

`spread` is (ranks, ranks that share the experts; 1: FSDP2 alone).
"""

import os
import subprocess
import sys

import pytest
import torch

from tests.close import assert_close_rel
from tests.runs import REPO

ALONE = (1, 1)
SPREAD = [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]
spreads = pytest.mark.parametrize("spread", SPREAD, ids=[f"{n}-ep{e}" for n, e in SPREAD])
spreads_and_alone = pytest.mark.parametrize("spread", [ALONE, *SPREAD])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int, int], dict]:
    """(*spread, rank) -> what tests/plan_worker.py saw there."""
    out = tmp_path_factory.mktemp("plan")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    for ranks in (1, 2, 4):
        launcher = (
            ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
            if ranks > 1
            else []
        )
        command = [
            sys.executable,
            *launcher,
            str(REPO / "tests" / "plan_worker.py"),
            str(ranks),
            str(out),
        ]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr
    return {tuple(map(int, f.stem.split("_"))): torch.load(f) for f in out.glob("*.pt")}


@spreads
def test_a_token_weighs_the_same_on_every_rank(results: dict, spread: tuple[int, int]) -> None:
    """torchtitan#2206: a mean of per-rank means gives a token on a sparse rank more weight (OLMo-core#657: or NaN)."""
    alone = results[*ALONE, 0]["uneven"]
    # Adam's first step is a gradient's sign, but for those as small as eps: there it shows their rounding, and rows
    # that go together share a product of the head. tests/test_exchange.py compares gradients.
    bound = 1e-4
    for rank in range(spread[0]):
        found = results[*spread, rank]["uneven"]
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6)
        assert found["norm"] == pytest.approx(alone["norm"], rel=1e-6)
        for name, tensor in found["weights"].items():
            assert_close_rel(tensor, alone["weights"][name], bound, name)


@spreads_and_alone
def test_a_step_without_supervised_tokens_changes_nothing(
    results: dict, spread: tuple[int, int]
) -> None:
    for rank in range(spread[0]):
        found = results[*spread, rank]["masked"]
        assert found["loss"] == 0
        assert not found["applied"]
        assert (found["moments"], found["count"]) == (0, 0)
        for name, tensor in found["weights"].items():
            assert torch.equal(tensor, found["before"][name]), name


@spreads_and_alone
def test_a_gradient_that_is_not_finite_on_one_rank_is_skipped_by_all(
    results: dict, spread: tuple[int, int]
) -> None:
    """pytorch#46849."""
    for rank in range(spread[0]):
        found = results[*spread, rank]["not_finite"]
        assert found["applied"] == [True, False, True]
        assert found["count"] == 2
        first, second, third = found["weights"]
        for name, tensor in second.items():
            assert torch.equal(tensor, first[name]), name
            assert torch.isfinite(third[name]).all(), name
        assert any(not torch.equal(third[name], second[name]) for name in third)


@spreads
@pytest.mark.parametrize("keep", ["all", "inputs"])
def test_experts_without_tokens_stay_as_they_are(
    results: dict, spread: tuple[int, int], keep: str
) -> None:
    """pytorch#126616: no rank misses a collective, and the norm is one number."""
    found = [results[*spread, rank][f"idle_{keep}"] for rank in range(spread[0])]
    assert all(f["norms"] == found[0]["norms"] for f in found)
    assert found[0]["norms"] == results[*spread, 0]["idle_all"]["norms"]
    for name, tensor in found[0]["weights"].items():
        if ".experts." in name:
            before = found[0]["before"][name]
            assert torch.equal(tensor[spread[0] :], before[spread[0] :]), name
            assert all(not torch.equal(tensor[e], before[e]) for e in range(spread[0])), name


@pytest.mark.parametrize("rank", range(4))
def test_copies_send_what_is_predicted_and_give_the_same_gradient(results: dict, rank: int) -> None:
    """BF16 gradients travel narrow inside a copy and are added wide between the copies."""
    found = results[4, 0, rank]
    for (_, replicas), seen in found.items():
        assert seen["norm"] == pytest.approx(found[1, 1]["norm"], rel=5e-3)
        assert seen["sent"].pop("figures") > 0
        assert seen["sent"] == {purpose: n for purpose, n in seen["predicted"].items() if n}
        assert ("gather" in seen["sent"]) == (replicas < 4)
