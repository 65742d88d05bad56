"""A machine is looked at before a run: what hangs, dies or corrupts is named, and the exit status says so."""

import itertools
import json
import multiprocessing
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from hymoe.engine.devices import DEVICES
from hymoe.engine.preflight import check as preflight
from hymoe.engine.preflight.links import Hooks, rounds, verdict
from hymoe.engine.preflight.machine import host_lines, pcie_lines
from hymoe.engine.preflight.ranks import Broken
from hymoe.engine.preflight.report import Line, Result, summary, table
from tests import preflight_worker
from tests.preflight_worker import Corrupts, Fails, Sleeps, Stalls
from tests.runs import REPO

SCRIPT = REPO / "scripts" / "preflight.py"
Command = Callable[..., int]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    """scripts/preflight.py in this process, with broken links where a test wants them; returns the exit status."""
    whole = preflight.preflight

    def run(*arguments: Any, hooks: Hooks | None = None) -> int:
        monkeypatch.setattr(preflight, "preflight", lambda asked, say: whole(asked, say, hooks))
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(SCRIPT), run_name="__main__")
        return left.value.code

    return run


def lines_of(file: Path) -> dict[str, dict[str, Any]]:
    return {line["name"]: line for line in json.loads(file.read_text())["lines"]}


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_link_and_every_rank_has_its_line(
    command: Command, tmp_path: Path, capfd: pytest.CaptureFixture[str], ranks: int
) -> None:
    file = tmp_path / "found.json"
    assert command("--ranks", ranks, "--json", file, "--folder", tmp_path) == 0
    found, lines = json.loads(file.read_text()), lines_of(file)
    assert found["ok"]
    assert found["ranks"] == ranks
    directed = [(a, b) for a, b in itertools.permutations(range(ranks), 2)]
    assert sorted((one["source"], one["target"]) for one in found["pairs"]) == directed
    assert all(one["gb_per_s"] > 0 and one["latency_us"] > 0 for one in found["pairs"])
    printed = capfd.readouterr().out
    names = [f"pair {a} -> {b}" for a, b in directed]
    names += ["all-gather", "all-to-all", "reduce-scatter", "torch", "/dev/shm", "mamba-ssm"]
    names += [
        f"rank {r}: {what}" for r in range(ranks) for what in ("bf16 product", "copy in memory")
    ]
    for name in names:
        assert name in lines
        assert name in printed
    assert "say nothing about GPUs" in lines["device"]["found"]
    assert "0 bad" in printed


BREAKS = [
    # what breaks, ranks, the line that says so, what it says
    (Sleeps("pair", 1), 2, "pair", "HANGS. between ranks 0 and 1: rank 1 did not begin within 4 s"),
    (Sleeps("meet", 2), 4, "first messages", "HANGS. between ranks 1 and 2: rank 2 did not begin"),
    (Stalls("all_to_all", 3), 4, "all-to-all", "HANGS. rank 3 stopped on the way and ranks 0, 1, 2 waited"),
    (Sleeps("join", 1), 2, "join", "HANGS. rank 1 did not begin"),
    (Fails("reduce_scatter", 1), 2, "reduce-scatter", "FAILS. rank 1 failed with MemoryError: no room"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("hooks", "ranks", "name", "said"),
    BREAKS,
    ids=[f"{b[2]}-{type(b[0]).__name__}" for b in BREAKS],
)
def test_what_hangs_is_named_and_ends_the_command(
    command: Command, tmp_path: Path, hooks: Sleeps, ranks: int, name: str, said: str
) -> None:
    file = tmp_path / "found.json"
    assert command("--ranks", ranks, "--timeout", 4, "--json", file, hooks=hooks) == 1
    lines = lines_of(file)
    assert lines[name]["state"] == "bad"
    assert said in lines[name]["found"]
    later = [line for line in lines.values() if line["found"].startswith("not run")]
    assert bool(later) == (name != "reduce-scatter")
    assert not [c for c in multiprocessing.active_children() if c.name.startswith("preflight")]


def test_a_rank_that_cannot_compute_does_not_hide_the_links(
    command: Command, tmp_path: Path
) -> None:
    file = tmp_path / "found.json"
    assert command("--ranks", 2, "--json", file, hooks=Fails("matmul", 1)) == 1
    lines = lines_of(file)
    assert lines["matmul"]["found"] == "FAILS. rank 1 failed with MemoryError: no room"
    assert [name for name, line in lines.items() if line["state"] == "bad"] == ["matmul"]
    assert "reduce-scatter" in lines


@pytest.mark.parametrize(
    ("test", "name"),
    [
        ("meet", "first messages"),
        ("pair", "pairs"),
        ("all_gather", "all-gather"),
        ("reduce_scatter", "reduce-scatter"),
    ],
)
def test_values_that_change_on_their_way_are_named(
    command: Command, tmp_path: Path, test: str, name: str
) -> None:
    file = tmp_path / "found.json"
    assert command("--ranks", 2, "--json", file, hooks=Corrupts(test, 1)) == 1
    line = lines_of(file)[f"{name}: values"]
    assert line["state"] == "bad"
    sender = {"reduce_scatter": "summed", "all_gather": "sent by rank 1"}.get(
        test, "sent by rank 0"
    )
    assert line["found"].startswith("rank 1: 1 of ")
    assert f"{sender} are wrong" in line["found"]
    assert "not run" not in json.dumps(lines_of(file))  # what works is measured all the same


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_number_of_ranks_must_be_said(command: Command, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    assert command("--json", file) == 1
    assert lines_of(file)["GPUs"]["state"] == "bad"
    assert "--ranks" in lines_of(file)["GPUs"]["remedy"]


BAD_OPTIONS = [
    (("--ranks", 0), "--ranks 0: expected 1 or more"),
    (("--ranks", "many"), "ranks"),
    (("--timeout", 0), "--timeout 0: expected more than 0 seconds"),
    (("--timeout", "nan"), "--timeout nan: expected more than 0 seconds"),
    (("--folder", "/nowhere"), "--folder /nowhere: expected a folder that exists"),
    (("--json", "/nowhere/x.json"), "--json /nowhere/x.json: expected a file in a folder that exists"),
    (("--speed", 3), "speed"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "said"), BAD_OPTIONS)
def test_bad_options_end_with_2(
    command: Command, capfd: pytest.CaptureFixture[str], arguments: tuple, said: str
) -> None:
    given = arguments if arguments[0] == "--ranks" else ("--ranks", 2, *arguments)
    assert command(*given) == 2
    assert said in capfd.readouterr().err


@pytest.mark.slow
def test_under_torchrun_it_is_the_same_command(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    command = [sys.executable, *torchrun, str(SCRIPT), "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(file.read_text())["ranks"] == 2
    assert done.stdout.count("0 bad") == 1


# What is judged of GPUs, from figures that stand in for theirs.


class Figures:
    """Ranks that answer without there being any."""

    def __init__(self, answers: dict[str, dict[int, Any]], hangs: str | None = None) -> None:
        self.answers, self.hangs = answers, hangs

    def ask(self, test: str, *arguments: Any, ranks: Any = None) -> dict[int, Any]:
        if test == self.hangs:
            broken = Broken(test, 20.0)
            broken.waiting = dict.fromkeys(ranks or range(4), 1)
            raise broken
        if test == "meet":
            return {rank: {"corrupt": []} for rank in range(4)}
        answer = self.answers.get(test)
        if test == "pair" and answer is not None:
            return {r: answer.get(arguments, answer["other"]) for r in arguments}
        return answer or {}


def speed(rate: float, latency: float = 20.0) -> dict[str, Any]:
    return {"gb_per_s": rate, "latency_us": latency, "corrupt": []}


def judged(device: str | None, hangs: str | None = None, **changes: Any) -> dict[str, Line]:
    """Lines of four RTX Pro 6000 that do as they should, but for the changes."""
    answers = {
        "matmul": {r: {"tflop_per_s": 380.0, "at_end": 378.0} for r in range(4)},
        "copy": {r: {"gb_per_s": 1600.0} for r in range(4)},
        "pair": {"other": speed(50.0)},
        "all_gather": {r: speed(39.0) for r in range(4)},
        "all_to_all": {r: speed(31.0) for r in range(4)},
        "reduce_scatter": {r: speed(39.0) for r in range(4)},
    }
    for key, change in changes.items():
        answers[key] = answers[key] | change
    known = None if device is None else DEVICES[device]
    result = Result("cuda", 4)
    preflight.Judge(result, Figures(answers, hangs), known, lambda line: None).run()
    return {line.name: line for line in result.lines}


def states(lines: dict[str, Line]) -> dict[str, str]:
    return {name: line.state for name, line in lines.items() if line.state != "ok"}


def test_cards_that_do_as_they_should_are_ok() -> None:
    assert not states(judged("rtxpro6000"))
    assert not states(judged(None))  # an unknown card is compared with its neighbours only


def test_a_slow_rank_is_found_among_others_and_by_the_data_sheet() -> None:
    slow = judged("rtxpro6000", matmul={2: {"tflop_per_s": 300.0, "at_end": 300.0}})
    assert states(slow) == {"rank 2: bf16 product": "warn"}
    assert "79% of the median rank" in slow["rank 2: bf16 product"].found
    assert states(judged(None, matmul={2: {"tflop_per_s": 200.0, "at_end": 200.0}})) == {
        "rank 2: bf16 product": "bad"
    }
    all_slow = {r: {"tflop_per_s": 100.0, "at_end": 100.0} for r in range(4)}
    assert set(states(judged("rtxpro6000", matmul=all_slow)).values()) == {"bad"}
    hot = judged("rtxpro6000", matmul={1: {"tflop_per_s": 380.0, "at_end": 300.0}})
    assert states(hot) == {"rank 1: bf16 product": "warn"}


def test_a_slow_link_gets_the_remedy_of_its_kind() -> None:
    ring = {r: speed(22.0) for r in range(4)}  # what NCCL's defaults give such cards
    found = judged("rtxpro6000", all_gather=ring)["all-gather"]
    assert found.state == "warn"
    assert "NCCL_MIN_NCHANNELS=8" in found.remedy
    fast = {r: speed(350.0) for r in range(4)}
    lines = judged(
        "h100", pair={"other": speed(380.0), (1, 3): speed(20.0)},
        all_gather=fast, all_to_all=fast, reduce_scatter=fast,
    )  # fmt: skip
    assert {n: s for n, s in states(lines).items() if "pair" in n} == {
        "pair 1 -> 3": "bad",
        "pair 3 -> 1": "bad",
    }
    assert "nvlink" in lines["pair 1 -> 3"].remedy


def test_a_hanging_pair_of_pcie_cards_gets_the_known_remedies() -> None:
    lines = judged("rtxpro6000", hangs="pair")
    assert lines["pair"].state == "bad"
    assert "between ranks 0 and 1:" in lines["pair"].found
    for word in ("NCCL_P2P_DISABLE=1", "uvm_disable_hmm=1", "iommu", "--shm-size"):
        assert word in lines["pair"].remedy
    assert "uvm_disable_hmm" not in judged("h100", hangs="pair")["pair"].remedy


def card(**changes: Any) -> dict[str, Any]:
    return {
        "name": "NVIDIA H100 80GB HBM3", "uuid": "0a1b", "total_bytes": 85 * 10**9, "free_bytes": 84 * 10**9,
        "capability": "sm_90", "built_for": ["sm_80", "sm_90", "compute_90"], **changes,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "line", "state"),
    [
        ({}, "rank 1: memory", "ok"),
        ({"free_bytes": 70 * 10**9}, "rank 1: memory", "warn"),  # someone else holds the rest
        ({"free_bytes": 20 * 10**9}, "rank 1: memory", "bad"),
        ({"total_bytes": 42 * 10**9, "free_bytes": 42 * 10**9}, "rank 1: memory", "warn"),
        ({"name": "NVIDIA A100-SXM4-80GB"}, "rank 1: card", "warn"),
        ({"built_for": ["sm_80"]}, "rank 1: torch", "bad"),
        ({"built_for": ["sm_100", "compute_100"]}, "rank 1: torch", "bad"),
        ({"built_for": ["sm_90a"]}, "rank 1: card", "ok"),
        ({"built_for": ["sm_80", "compute_80"]}, "rank 1: card", "ok"),
    ],
)
def test_a_card_unlike_the_others_is_named(changes: dict, line: str, state: str) -> None:
    result = Result("cuda", 2)
    assert preflight.device_lines(result, {0: card(), 1: card(**changes)}) is DEVICES["h100"]
    found = {one.name: one.state for one in result.lines}
    assert found[line] == state
    others = {name: one for name, one in found.items() if name != line}
    assert set(others.values()) == {"ok"}


def test_settings_of_the_host_that_p2p_depends_on(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cmdline").write_text("quiet splash\n")
    assert [line.state for line in pcie_lines(tmp_path)] == ["ok"]
    (tmp_path / "sys/class/iommu/ivhd0").mkdir(parents=True)
    hmm = tmp_path / "sys/module/nvidia_uvm/parameters/uvm_disable_hmm"
    hmm.parent.mkdir(parents=True)
    hmm.write_text("N\n")
    assert [line.state for line in pcie_lines(tmp_path)] == ["warn", "warn"]
    hmm.write_text("Y\n")
    (tmp_path / "proc/cmdline").write_text("quiet iommu=pt\n")
    assert [line.state for line in pcie_lines(tmp_path)] == ["ok", "ok"]


def test_host_lines_expect_something_only_where_there_are_gpus(tmp_path: Path) -> None:
    assert {line.state for line in host_lines(tmp_path, False)} == {"info"}
    judged_lines = host_lines(tmp_path, True)
    assert all(line.should and line.state != "info" for line in judged_lines)
    assert all(bool(line.remedy) == (line.state != "ok") for line in judged_lines)


def test_a_table_says_brackets_as_they_are_and_each_remedy_once(capsys: Any) -> None:
    result = Result("cuda", 2)
    for number in range(6):
        result.lines.append(
            Line(section="links", name=f"pair {number}", found="[red]x[/red]", state="bad", remedy="wait")
        )  # fmt: skip
    Console(width=120).print(table(result))
    assert capsys.readouterr().out.count("[red]x[/red]") == 6
    said = summary(result)
    assert said[0] == "help, pair 0, pair 1, pair 2, pair 3 and 2 more: wait"
    assert said[-1].startswith("6 bad, 0 warnings")
    assert not result.is_good


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])  # an odd one out, and none
def test_rounds_have_every_pair_once(size: int) -> None:
    pairs = [pair for one in rounds(size) for pair in one.items()]
    assert sorted(pairs) == sorted(itertools.permutations(range(size), 2))
    assert len(rounds(size)) <= size


# The short form at the start of a run.


def start_of_a_run(
    folder: Path, size: int, hooks: Hooks, absent: int | None = None
) -> list[dict[str, Any] | None]:
    """What each rank found; None of one that has not come back."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hymoe.engine.preflight.ranks"])
    ranks = [
        context.Process(
            target=preflight_worker.check,
            args=(r, size, str(folder), hooks, r == absent),
            daemon=True,
        )
        for r in range(size)
    ]
    for process in ranks:
        process.start()
    for rank, process in enumerate(ranks):
        if rank != absent:
            process.join(60)
            assert process.exitcode == 0
    if absent is not None:
        ranks[absent].kill()
        ranks[absent].join()
    files = [folder / f"{rank}.json" for rank in range(size)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


@pytest.mark.parametrize("size", [2, 3])
def test_check_links_leaves_the_default_group_usable(tmp_path: Path, size: int) -> None:
    found = start_of_a_run(tmp_path, size, Hooks())
    assert [one["total"] for one in found] == [size] * size
    assert len({one["said"] for one in found}) == 1
    for word in ("all ranks answer", "pairs", "all-gather", "all-to-all", "reduce-scatter"):
        assert word in found[0]["said"]


BROKEN_STARTS = [
    (Sleeps("meet", 2), None, "the link between ranks 1 and 2 hangs"),
    (
        Stalls("all_gather", 1),
        None,
        "links, all-gather: rank 1 stopped on the way and ranks 0, 2, 3 waited",
    ),
    (Corrupts("meet", 3), None, "rank 3: 1 of 4,096 values sent by rank 0 are wrong"),
    (Fails("all_to_all", 0), None, "rank 0: MemoryError: no room"),
    (Hooks(), 1, "links, arrival: rank 1 did not answer within 7 s"),
]


@pytest.mark.parametrize(
    ("hooks", "absent", "said"), BROKEN_STARTS, ids=[type(b[0]).__name__ for b in BROKEN_STARTS]
)
def test_check_links_says_the_same_on_every_rank(
    tmp_path: Path, hooks: Hooks, absent: int | None, said: str
) -> None:
    found = start_of_a_run(tmp_path, 4, hooks, absent)
    texts = {one["failed"] for rank, one in enumerate(found) if rank != absent}
    assert len(texts) == 1
    assert said in texts.pop()


def test_a_verdict_names_silent_ranks_and_pairs() -> None:
    partners = {0: 3, 3: 0, 1: 2, 2: 1}
    good = {"hangs": False, "gb_per_s": 1.0, "corrupt": []}
    assert verdict("meet", partners, [good] * 4, 20.0) is None
    hangs = {"hangs": True, "begun": 1}
    said = verdict("meet", partners, [good, hangs, None, good], 20.0)
    assert "rank 2 did not answer within 25 s" in said
    assert "ranks 1 and 2 hangs" in said
