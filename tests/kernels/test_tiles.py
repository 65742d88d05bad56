"""The table of tiles, what is chosen from it, and the program that writes it."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from triton import OutOfResources

from benchmarks import tune
from hymoe.kernels import tiles
from hymoe.kernels.launch import INTERPRETER, KNOWN_TARGETS, Target, recording
from hymoe.kernels.tiles import TILES, Tile

REPO = Path(__file__).resolve().parents[2]
SOURCE = Path(tiles.__file__).read_text()
LARGE, MIDDLE, SMALL = Tile(128, 256, 64, 8, 4), Tile(128, 128, 64, 8, 3), Tile(64, 64, 32, 4, 2)
CHIP = Target(90, 232_448, 132)


def table(source: str) -> dict[int, dict[str, tuple[Tile, ...]]]:
    scope = {"Tile": Tile, "dict": dict, "tuple": tuple, "int": int, "str": str}
    nodes = [n for n in ast.parse(source).body if isinstance(n, ast.AnnAssign)]
    node = next(n for n in nodes if n.target.id == "TILES")
    return eval(compile(ast.Expression(node.value), "tiles", "eval"), scope)


@pytest.fixture(autouse=True)
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real ones would only be slower: what is asked for does not depend on them."""
    for name, size in {"T": 512, "V": 1024, "D": 256, "E": 8, "F": 192, "K": 2}.items():
        monkeypatch.setattr(tune, name, size)


@functools.cache
def item_sizes(product: str) -> dict[torch.dtype, set[int]]:
    return tune.item_sizes(product, CHIP)


def assert_formatted(source: str) -> None:
    command = [sys.executable, "-m", "ruff", "format", "--check", "--stdin-filename", "tiles.py"]
    done = subprocess.run(
        [*command, "-"], input=source, cwd=REPO, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("arch", KNOWN_TARGETS)
def test_every_chip_has_a_tile_for_every_product_in_every_dtype(arch: int) -> None:
    for product in tune.products():
        for itemsize in set().union(*item_sizes(product).values()):
            assert tiles.candidates(product, KNOWN_TARGETS[arch], itemsize)


def test_the_first_tile_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILES", {80: {"p": (SMALL,)}, 90: {"p": (LARGE, MIDDLE, SMALL)}})
    assert tiles.tile("p", CHIP) == LARGE
    assert tiles.tile("p", CHIP, 4) == MIDDLE
    assert tiles.tile("p", Target(90, 100_000, 132)) == MIDDLE
    assert tiles.tile("p", Target(89, 232_448, 132)) == SMALL  # of the next older chip
    assert tiles.tile("p", Target(103, 232_448, 132)) == LARGE
    assert tiles.tile("p", INTERPRETER) == tiles.INTERPRETER
    with pytest.raises(ValueError, match="p: no tile of sm_90 fits 1000 bytes"):
        tiles.tile("p", Target(90, 1000, 132))


def test_another_tile_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILES", {90: {"p": (LARGE, SMALL), "q": (MIDDLE,)}})
    with tiles.nth_best(1):
        assert [tiles.tile(p, CHIP) for p in "pq"] == [SMALL, MIDDLE]
    with tiles.forced("p", MIDDLE) as asked:
        assert [tiles.tile(p, CHIP, 4) for p in "pq"] == [MIDDLE, MIDDLE]
        with tiles.forced("q", SMALL):
            assert [tiles.tile(p, CHIP) for p in "pq"] == [MIDDLE, SMALL]
    assert asked == {2, 4}
    assert [tiles.tile(p, CHIP) for p in "pq"] == [LARGE, MIDDLE]


def test_writing_the_table_as_it_is_changes_nothing() -> None:
    assert table(SOURCE) == TILES
    source = SOURCE
    for arch, entries in TILES.items():
        for product, chosen in entries.items():
            source = tune.rewrite(source, arch, product, chosen)
    assert source == SOURCE


@pytest.mark.parametrize("arch", [90, 103], ids=["known", "new"])
@pytest.mark.parametrize("product", [tune.products()[0], "new.product"], ids=["known", "new"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_an_entry_is_replaced_or_added(arch: int, product: str, count: int) -> None:
    chosen = (LARGE, MIDDLE, SMALL, Tile(256, 128, 128, 8, 2), Tile(64, 128, 64, 4, 5))[:count]
    source = tune.rewrite(SOURCE, arch, product, chosen)
    assert_formatted(source)
    want = {known: dict(entries) for known, entries in TILES.items()}
    want.setdefault(arch, {})[product] = chosen
    assert table(source) == want
    # What stands outside of the entry stays as it was, comments too.
    assert source.startswith(SOURCE[: SOURCE.index("TILES: dict")])
    assert source.endswith(SOURCE[SOURCE.index("def candidates") :])


def test_entries_of_every_length_are_formatted() -> None:
    """Up to the formatter's width on one line, from there on one tile a line."""
    source = "TILES: dict = {\n    90: {},\n}\n"
    for length in range(30, 60):
        source = tune.rewrite(source, 90, "p" * length, (SMALL, MIDDLE))
    assert_formatted(source)
    assert {len(line) for line in source.splitlines()} >= {99, 100}


def test_an_empty_chip_gets_its_first_entry() -> None:
    source = "TILES: dict = {\n    80: {},\n    90: {},  # none yet\n}\nREST = 1\n"
    found = tune.rewrite(source, 80, "p", (SMALL,))
    assert table(found) == {80: {"p": (SMALL,)}, 90: {}}
    assert "90: {},  # none yet" in found
    assert_formatted(found)
    with pytest.raises(ValueError, match="no dictionary TILES"):
        tune.rewrite("TILES = {}\n", 80, "p", (SMALL,))


def test_an_entry_serves_wider_operands_too() -> None:
    large, huge = LARGE, Tile(256, 128, 64, 8, 4)
    assert tune.choose([large, SMALL, MIDDLE], (), CHIP, {2, 4}) == [large, SMALL]
    assert tune.choose([large, huge, MIDDLE, SMALL], (), CHIP, {2, 4}) == [large, huge, MIDDLE]
    assert tune.choose([large, huge], (SMALL,), CHIP, {2, 4}) == [large, huge, SMALL]
    assert tune.choose([large], (SMALL,), CHIP, {2}) == [large]


@pytest.mark.parametrize("chip", KNOWN_TARGETS.values(), ids=KNOWN_TARGETS)
def test_what_is_tried_fits(chip: Target) -> None:
    for itemsize in (2, 6):
        tried = tune.grid(chip, itemsize)
        assert len(set(tried)) == len(tried) > 5
        assert all(t.shared_bytes(itemsize) <= chip.shared_bytes for t in tried)
    assert len(tune.grid(chip, 2)) < 150  # compiled one by one


@pytest.mark.parametrize("product", tune.products())
def test_an_operation_is_known_for_every_product(product: str) -> None:
    """Its launches are others with another tile of the product: otherwise nothing would be tuned."""
    dtype = next(iter(item_sizes(product)))
    workload, found = tune.WORKLOADS[product.partition(".")[0]], []
    for tile in (MIDDLE, SMALL):
        with recording(CHIP) as launches, tiles.forced(product, tile):
            workload("meta", dtype)()
        found.append([(one.kernel.__name__, one.grid, one.options) for one in launches])
    assert found[0] != found[1]


def test_tiles_that_fail_or_give_other_results_are_dropped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fails, other, nan = Tile(64, 64, 128, 4, 2), Tile(64, 128, 32, 4, 2), Tile(64, 128, 64, 4, 2)

    def workload(device: str, dtype: torch.dtype):
        def run() -> list[torch.Tensor]:
            tile = tiles.tile("p", CHIP)
            if tile == fails:
                raise OutOfResources(300_000, 232_448, "shared memory")
            scale = {other: 1.1, nan: torch.nan}.get(tile, 1.001)
            return [torch.ones(3), torch.full((3,), scale)]

        return run

    monkeypatch.setitem(tune.WORKLOADS, "p", workload)
    monkeypatch.setattr(tiles, "TILES", {90: {"p": (MIDDLE,)}})
    monkeypatch.setattr(tune, "milliseconds", lambda run: float(tiles.tile("p", CHIP).n))
    found = tune.tune("p", torch.bfloat16, [LARGE, fails, other, SMALL, nan, MIDDLE])
    assert found == [(64, SMALL), (128, MIDDLE), (256, LARGE)]
    printed = capsys.readouterr().out
    assert f"{fails}: out of resource" in printed
    assert f"{other}: WRONG" in printed
    assert f"{nan}: WRONG" in printed


def test_the_whole_operation_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    measure = tune.harness.measure_kernels
    monkeypatch.setattr(tune.harness, "measure_kernels", lambda *args: measure(*args[:-1], "cpu"))
    assert tune.milliseconds(lambda: runs.append(1)) >= 0
    assert len(runs) == 1 + tune.ROUNDS


def test_without_a_gpu_nothing_is_tuned() -> None:
    env = {"CUDA_VISIBLE_DEVICES": "", "PATH": ""}
    command = [sys.executable, "benchmarks/tune.py"]
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        "tune.py measures on a GPU and finds none; --dry-run prints its plan"
    ]
    assert Path(tiles.__file__).read_text() == SOURCE
