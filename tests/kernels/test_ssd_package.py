"""mamba-ssm's kernels on our path: made safe, and agreeing with ours for outputs and every gradient."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hymoe.kernels import launch
from hymoe.kernels.launch import choose
from hymoe.kernels.packed import Packed
from hymoe.kernels.ssd import package
from hymoe.kernels.ssd.op import ssd_scan
from hymoe.kernels.ssd.ref import ssd_scan_ref
from tests.close import assert_close_rel
from tests.kernel_check import run
from tests.kernels.mamba_peer import mamba_chunk_scan_combined
from tests.kernels.test_ssd_triton import CHUNK, LIMIT, inputs_of, sliced

BOUND = 1e-5  # relative, float32: two orders of sums


@pytest.fixture(autouse=True)
def peer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A pure-Python build has no extension; its Triton kernels do without."""
    monkeypatch.setattr(launch, "_is_installed", lambda module: True)
    with mamba_chunk_scan_combined():
        choose.cache_clear()
        yield
    choose.cache_clear()


@pytest.mark.parametrize(
    ("lengths", "limit"),
    [
        ((40,), LIMIT),  # no ids at all
        ((5, 20, 1, 3, 18), LIMIT),  # starts inside chunks, documents shorter than one
        ((16, 17, 15), (0.1, 0.4)),  # around a chunk, both ends of the clamp
    ],
    ids=str,
)
def test_theirs_and_ours_agree(lengths: tuple[int, ...], limit: tuple[float, float]) -> None:
    packed = Packed.from_lengths(lengths)
    inputs = {name: x.float() for name, x in inputs_of(sum(lengths)).items()}
    found = {
        kernels: run(sliced(ssd_scan, packed, limit, chunk_size=CHUNK, kernels=kernels), inputs)
        for kernels in ("packages", "triton")
    }
    right = run(sliced(ssd_scan_ref, packed, limit), {n: x.double() for n, x in inputs.items()})
    for name, theirs in found["packages"].items():
        assert_close_rel(theirs, right[name], BOUND, f"theirs: {name}")
        assert_close_rel(theirs, found["triton"][name], BOUND, f"theirs and ours: {name}")


def test_what_is_known_to_go_wrong_never_reaches_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """First id 0, ids that never come back, dt without a wide stride, a chunk that is a power of two."""
    seen: dict[str, Any] = {}

    def record(x: Tensor, dt: Tensor, *args: Any, seq_idx: Tensor, **named: Any) -> Tensor:
        seen.update(dt=dt, seq_idx=seq_idx, chunk=args[3], **named)
        return x

    scan = SimpleNamespace(mamba_chunk_scan_combined=record)
    monkeypatch.setattr(package, "_deterministic", lambda: scan)
    packed = Packed.from_lengths((3, 1, 3))
    inputs = {name: x.float() for name, x in inputs_of(7).items()}
    sliced(ssd_scan, packed, (0.1, 0.4), chunk_size=100, kernels="packages")(**inputs)
    assert seen["seq_idx"].tolist() == [[0, 0, 0, 1, 2, 2, 2]]
    assert seen["seq_idx"].dtype == torch.int32
    assert seen["dt"].stride()[1:] == (seen["dt"].shape[2], 1)
    assert seen["chunk"] == 64
    assert seen["dt_softplus"]
    assert seen["dt_limit"] == (0.1, 0.4)
    assert torch.equal(seen["D"], inputs["skip"])
    assert torch.equal(seen["dt_bias"], inputs["dt_bias"])


@pytest.mark.parametrize(
    ("tokens", "row", "fits"),
    [
        (16_384, 6_144, True),  # the real model
        (262_143, 6_144, False),  # 64 heads' shares of db, 128 states each
        (262_016, 6_144, True),
        (120_000, 17_984, False),  # of the whole projection
    ],
)
def test_offsets_past_32_bits_are_refused(tokens: int, row: int, fits: bool) -> None:
    def make(*shape: int) -> Tensor:
        wide = torch.empty(tokens, row, device="meta")
        return wide[:, : shape[0] * shape[1]].unflatten(1, shape)

    def call() -> None:
        package.check_offsets(make(64, 64), make(8, 128), make(8, 128), 128)

    if fits:
        call()
        return
    with pytest.raises(ValueError, match=r"mamba-ssm's kernels, which count to 2\^31; use kernels"):
        call()


def test_their_kernels_keep_one_tile_and_no_atomics() -> None:
    """Also where they were imported in their other mode, with many tiles to choose from."""
    module = package._deterministic()
    kernel = module._chunk_scan_chunk_state_bwd_dx_kernel
    before = kernel.configs
    kernel.configs = [*before, *before, *before]
    try:
        package._deterministic()
        assert len(kernel.configs) == 1
    finally:
        kernel.configs = before
    assert module.use_deterministic_mode()


def test_a_package_that_does_not_import_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise ImportError("no selective_scan_cuda")

    monkeypatch.setattr(package.importlib, "import_module", broken)
    with pytest.raises(ImportError, match=r"no selective_scan_cuda\); pip install .* or use"):
        package._deterministic()
