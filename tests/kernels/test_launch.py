"""The choice of an implementation: all or an error, never another one in silence."""

import pytest
import torch

from hymoe.kernels import launch
from hymoe.kernels.launch import (
    OPERATIONS,
    arithmetic_dtype,
    backends,
    check_shape,
    choose,
    summary,
)


@pytest.fixture(autouse=True)
def fresh_choices():
    choose.cache_clear()
    yield
    choose.cache_clear()


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("interpreted", [True, False])
def test_a_cpu_runs_the_torch_versions(
    kernels: str, interpreted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", interpreted)
    assert {c.name for c in backends(kernels, "cpu").values()} == {"torch"}


@pytest.mark.parametrize("kernels", ["triton", "packages"])
def test_kernels_that_need_a_gpu_are_refused_without_one(
    kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with pytest.raises(ValueError, match=f"kernels = '{kernels}': rms_norm is on a CPU"):
        backends(kernels, "cpu")


def test_the_interpreter_runs_the_kernels_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", True)
    assert choose("rms_norm", "triton", "cpu", torch.float32).name == "triton"


@pytest.mark.parametrize("installed", [True, False])
def test_a_gpu_runs_packages_where_installed_and_says_where_not(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "_is_installed", lambda name: installed)
    chosen = backends("auto", "cuda")
    assert set(chosen) == set(OPERATIONS)
    assert chosen["expert_mlp"].name == "triton"
    assert chosen["ssd_scan"].name == ("mamba_ssm" if installed else "triton")
    lines = summary(chosen)
    assert sum(line.count("ssd_scan") for line in lines) == 1
    if not installed:
        assert any(
            line.startswith("triton (mamba_ssm is not installed): ssd_scan") for line in lines
        )
        with pytest.raises(
            ValueError,
            match=r"needs causal_conv1d, of which causal_conv1d is not installed; pip install",
        ):
            backends("packages", "cuda")
    assert choose("ssd_scan", "triton", "cuda").name == "triton"


def test_a_build_without_cuda_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_is_installed", lambda name: not name.endswith("_cuda"))
    choice = choose("ssd_scan", "auto", "cuda")
    assert (choice.name, choice.reason) == ("triton", "selective_scan_cuda is not installed")


def test_float64_is_for_torch() -> None:
    assert choose("rms_norm", "triton", "cuda", torch.float64).name == "torch"


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kernels = 'cuda'; expected one of auto, torch, triton"):
        backends("cuda", "cuda")


def test_arithmetic_is_float32_or_wider() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert arithmetic_dtype(torch.ones(1, dtype=dtype)) == torch.float32
    assert arithmetic_dtype(torch.ones(1, dtype=torch.float64)) == torch.float64


def test_shapes() -> None:
    check_shape("x", torch.ones(2, 3), (2, None))
    for shape in ((2,), (2, 3, 1), (3, 3)):
        with pytest.raises(ValueError, match=r"x: expected shape .*, found \(2, 3\)"):
            check_shape("x", torch.ones(2, 3), shape)
