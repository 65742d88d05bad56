"""Experts on their ranks and tokens that travel: the numbers of one process, however the experts are spread."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hymoe.engine.balance import dead_experts, rank_imbalance
from hymoe.engine.errors import UserError
from hymoe.engine.exchange import choices_here
from hymoe.engine.hf_checkpoint import save_pretrained
from hymoe.engine.parallel import choose_expert_parallel
from hymoe.engine.parallel_bytes import bytes_per_step, expected_copies
from hymoe.kernels.experts import expert_mlp
from tests.close import assert_close_rel, relative_error
from tests.exchange_worker import CHOICES, LAYERS, STEPS, TOKENS, TRAFFIC, nan_memory
from tests.runs import REPO
from tests.tiny import tiny_config, tiny_lm

RANKS = 4
WORKER = REPO / "tests" / "exchange_worker.py"
PLANS = ((1, "gather"), (2, "gather"), (2, "dedup"), (4, "gather"), (4, "dedup"))
NAMES = [f"ep{size}-{kind}" for size, kind in PLANS]
every_plan = pytest.mark.parametrize("plan", PLANS, ids=NAMES)


def environment(**values: object) -> dict[str, str]:
    changes = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO), **values}
    kept = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return kept | {key: str(value) for key, value in changes.items()}


def run_everything(ranks: int, out: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks))
    launcher = torchrun if ranks > 1 else ()
    command = [sys.executable, *launcher, str(WORKER), "everything", str(ranks), str(out)]
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What tests/exchange_worker.py wrote on one process and on four, and a checkpoint that it read."""
    out = tmp_path_factory.mktemp("exchange")
    save_pretrained(tiny_lm(seed=5, **LAYERS), out / "base", max_shard_size="30KB")
    for ranks in (1, RANKS):
        run_everything(ranks, out)
    return out


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict:
    return torch.load(folder / "1_0.pt")


@pytest.fixture(scope="module")
def spread(folder: Path) -> list[dict]:
    return [torch.load(folder / f"{RANKS}_{rank}.pt") for rank in range(RANKS)]


def cases(plan: tuple[int, str]) -> list[tuple]:
    several = [(*plan, "spread", *steps) for steps in STEPS]
    return several + [(*plan, choices, 1, "inputs") for choices in CHOICES if choices != "spread"]


def check_as_alone(alone: dict, found: dict, case: tuple, what: str) -> None:
    """As one process that takes one row after another, keeps all and adds in float32.

    The terms of A_log's gradient cancel: at four rows that the experts' sums are added in another order, a float32
    rounding of each token, changes it by 3e-6, whether rows go together or not.
    """
    expected = alone["one by one", *case[2:4]]
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6), what
    assert found["norm"] == pytest.approx(expected["norm"], rel=1e-6), what
    assert torch.equal(found["loads"], expected["loads"]), what
    for name, grad in found["grads"].items():
        bound = 5e-6 if name.endswith("A_log") else 1e-6
        assert_close_rel(grad, expected["grads"][name], bound, f"{what}: {name}")


def test_rows_together_are_rows_one_by_one(alone: dict) -> None:
    for case in cases((1, "gather")):
        check_as_alone(alone, alone[case], case, f"{case}")


@every_plan
def test_loss_gradients_and_norm_are_those_of_one_process(
    alone: dict, spread: list[dict], plan: tuple
) -> None:
    """Ranks with unequal tokens, one without a supervised token, one expert for all tokens, ranks without tokens."""
    for case in cases(plan):
        for rank in range(RANKS):
            check_as_alone(alone, spread[rank][case], case, f"{case} rank {rank}")


def test_the_cases_are_what_they_say(alone: dict) -> None:
    """Loads (2 layers, 8 experts): of 4 ranks the last two hold the experts 4 to 7."""
    one = alone["one by one", "one", 1]["loads"].view(2, 8)
    idle = alone["one by one", "idle", 1]["loads"].view(2, 8)
    assert one[:, 5].sum() == one.sum()
    assert idle[:, 3:].sum() == 0
    grads = alone["one by one", "idle", 1]["grads"]
    stack = grads["layers.0.mixer.experts.up_proj"]
    assert stack[:3].any()
    assert not stack[3:].any()
    name = "layers.2.mixer.gate.weight"
    free = alone["one by one", "spread", 1]["grads"][name]
    assert relative_error(grads[name], free) > 0.1


@pytest.mark.parametrize("size", [2, 4])
def test_both_exchanges_give_the_same_bits_whatever_is_kept(spread: list[dict], size: int) -> None:
    """Partial sums are added in rank order in both, and a token that did not travel adds zero."""
    for case in cases((size, "gather")):
        found = spread[0][case]["grads"]
        others = [spread[0][size, "dedup", *case[2:]]["grads"]]
        if case[2] == "spread":
            same = [s for s in STEPS if s[0] == case[3]]
            others += [spread[0][size, "gather", "spread", *s]["grads"] for s in same]
        for other in others:
            assert all(torch.equal(grad, other[name]) for name, grad in found.items()), case


@every_plan
def test_two_runs_give_the_same_bits_in_bfloat16(spread: list[dict], plan: tuple) -> None:
    """Whatever is kept; and where fresh memory is NaN, so that what a recomputation leaves out is read by nobody."""
    kept = spread[0][*plan, "again"][0]
    assert all(found[*plan, "again"] == [kept] * 4 for found in spread)


@every_plan
def test_rows_together_are_rounded_once(spread: list[dict], plan: tuple) -> None:
    """Against passes whose gradients are added in float32. A rounding is 1.7e-3: one on each rank, one of the sum, and
    one of each pass lie between; `test_layer_major.py` compares to the bit.
    """
    together, passes = spread[0][*plan, "bfloat16"]
    for name, grad in together.items():
        assert_close_rel(grad.float(), passes[name].float(), 3.5e-3, name)


@every_plan
def test_the_export_is_the_same_bytes(folder: Path, plan: tuple) -> None:
    expected = folder / "export_1_1_gather"
    found = folder / f"export_{RANKS}_{plan[0]}_{plan[1]}"
    names = sorted(file.name for file in expected.iterdir())
    assert names == sorted(file.name for file in found.iterdir())
    assert len(names) > 3
    for name in names:
        assert (found / name).read_bytes() == (expected / name).read_bytes(), name


def test_a_state_is_the_same_wherever_it_was_saved_and_is_loaded(spread: list[dict]) -> None:
    """Weights, moments and remainders: 9 pairs of ranks that share the experts; each pair to the bit."""
    for found in (results["states"] for results in spread):
        assert len(found) == 12
        for saved_at, loaded_at in found:
            assert found[saved_at, loaded_at] == found[saved_at, 0], (saved_at, loaded_at)


@every_plan
@pytest.mark.parametrize("steps", TRAFFIC, ids=lambda steps: "-".join(map(str, steps)))
def test_what_is_sent_is_what_was_predicted(spread: list[dict], plan: tuple, steps: tuple) -> None:
    size, kind = plan
    micro_steps, passes, keep, latent = steps
    found = [results[*plan, "traffic", *steps] for results in spread]
    copies = sum(
        travelled(about["chosen"], rank % size, size) for rank, about in enumerate(found)
    ) / (RANKS * found[0]["chosen"].shape[0] * TOKENS)
    predicted = bytes_per_step(
        tiny_config(**LAYERS, moe_latent_size=latent), world_size=RANKS, expert_parallel=size,
        exchange=kind, micro_tokens=TOKENS, micro_steps=micro_steps, dtype="float32",
        keep=keep, copies=copies, passes=passes,
    )  # fmt: skip
    for purpose, expected in predicted.items():
        sent = sum(about["sent"].get(purpose, 0) for about in found) / RANKS
        assert sent == pytest.approx(expected, rel=0.02), purpose


@every_plan
@pytest.mark.parametrize("steps", TRAFFIC, ids=lambda steps: "-".join(map(str, steps)))
def test_only_inputs_travel_again(spread: list[dict], plan: tuple, steps: tuple) -> None:
    """Collectives of a layer and row: x, weights and ids there, sums back; dsums there, dx and dweights back.

    A block that runs again sends x and weights again; with a latent projection the sums come back again, too. Blocks
    are gathered and reduced as often for four rows as for one.
    """
    size, kind = plan
    micro_steps, passes, keep, latent = steps
    calls = spread[1][*plan, "traffic", *steps]["calls"]
    each = 7 + (kind == "dedup")  # with the numbers of rows
    if keep == "inputs":
        each += 2 if latent is None else 3
    agreed = kind == "gather"  # on the numbers of tokens
    assert calls["exchange"] == (agreed * passes + 2 * micro_steps * each if size > 1 else 0)
    units = len(LAYERS["layers_block_type"])
    assert calls["gather"] == passes * (2 * units + 2)
    assert calls["reduce"] == passes * (units + 2)


def travelled(chosen: torch.Tensor, place: int, size: int) -> int:
    """Tokens of (layers, T, K) choices times the other ranks that they go to."""
    hit = torch.stack([(chosen // (8 // size) == rank).any(-1) for rank in range(size)])
    return int(hit.sum() - hit[place].sum())


def test_expected_copies() -> None:
    """The share of the other ranks that hold one of 6 of 128 experts or more."""
    assert expected_copies(128, 6, 4) / 3 == pytest.approx(0.829, abs=0.001)
    assert expected_copies(128, 6, 8) / 7 == pytest.approx(0.559, abs=0.001)
    assert expected_copies(8, 8, 4) == 3


def test_a_rank_killed_inside_an_exchange_ends_all(tmp_path: Path) -> None:
    """Without a launcher that would end them: the others notice, and say so in one line."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, str(WORKER), "die", "dedup", str(tmp_path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen(command, env=environment(RANK=rank, **place), **pipes)
        for rank in range(RANKS)
    ]
    try:
        processes[2].wait(timeout=120)
        found = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [1, 1, -signal.SIGKILL, 1]
    for rank in (0, 1, 3):
        said, errors = found[rank]
        assert said.startswith("another rank has died"), errors
        assert len(said.splitlines()) == 1


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("is_known", [False, True])
def test_choices_elsewhere_bring_nothing_in(
    kernels: str, dtype: torch.dtype, first: int, is_known: bool
) -> None:
    """Of 8 experts 3 are here; fresh memory, NaN in this test, reaches no result through a choice of another."""
    rng = torch.Generator().manual_seed(3)
    rows, top_k, experts = 21, 3, 3
    ids = torch.stack([torch.randperm(8, generator=rng)[:top_k] for _ in range(rows)])
    ids[5] = -1
    ids[6] = torch.tensor([7, 3, 7])  # all elsewhere
    sizes = ((rows + 1, 16), (rows + 1, top_k), (experts, 8, 16), (experts, 16, 8))
    x, weights, up, down = (torch.randn(size, generator=rng) for size in sizes)
    dout = torch.randn(rows + 1, 16, generator=rng)
    for last in (x, weights, dout):
        last[-1] = 0
    x, up, down, dout = (tensor.to(dtype) for tensor in (x, up, down, dout))
    leaves = [tensor.requires_grad_() for tensor in (x, weights, up, down)]

    expected = torch.zeros(rows + 1, 16)
    for e in range(experts):
        share = (weights[:-1] * (ids == first + e)).sum(-1, keepdim=True)
        hidden = torch.relu(x[:-1].float() @ up[e].float().T).square()
        expected[:-1] += share * (hidden @ down[e].float().T)
    wanted = torch.autograd.grad(expected, leaves, dout.float())

    known = int(((ids >= first) & (ids < first + experts)).sum()) if is_known else None
    with nan_memory():
        here = choices_here(
            ids.to(torch.int32), first, experts, kernels, known, is_static=kernels == "triton"
        )
        out = expert_mlp(*leaves, here, kernels=kernels)
        found = torch.autograd.grad(out, leaves, dout)
    bound = 1e-6 if dtype == torch.float32 else 2e-2
    assert_close_rel(out, expected, bound)
    for name, grad, reference in zip(("x", "weights", "up", "down"), found, wanted, strict=True):
        assert_close_rel(grad, reference, bound, name)
    elsewhere = (ids < first) | (ids >= first + experts)
    assert not out[5:7].any()
    assert not out[-1].any()
    assert not found[1][:-1][elsewhere].any()


def test_expert_parallel_is_chosen_or_refused() -> None:
    assert choose_expert_parallel("auto", 4, 128)[0] == 4
    assert choose_expert_parallel("auto", 16, 128)[0] == 8
    assert choose_expert_parallel("auto", 6, 128)[0] == 2
    assert choose_expert_parallel("auto", 4, 0)[0] == 1
    assert choose_expert_parallel("1", 4, 128)[0] == 1
    assert choose_expert_parallel(2, 4, 128)[0] == 2
    with pytest.raises(UserError, match="divisor of the 4 ranks"):
        choose_expert_parallel("8", 4, 128)
    with pytest.raises(UserError, match="divisor of the 6 experts"):
        choose_expert_parallel("4", 4, 6)


def test_balance() -> None:
    loads = torch.tensor([[3, 1, 0, 0], [2, 2, 2, 2], [0, 0, 0, 0]])
    assert rank_imbalance(loads, 2) == [2.0, 1.0, 1.0]
    assert rank_imbalance(loads, 1) == [1.0, 1.0, 1.0]
    assert dead_experts(loads) == [[2, 3], [], []]
