"""What causal-conv1d is given, and what it makes of it: its own Python around a stand-in of its extension.

The stand-in checks what the extension checks (and what it should), and computes by the package's own reference.
"""

import importlib
import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch

from hymoe.kernels import conv1d
from hymoe.kernels.conv1d import causal_conv1d, causal_conv1d_ref
from hymoe.kernels.launch import Choice
from hymoe.kernels.packed import Packed
from tests.kernel_check import RAGGED, check, normal

CHANNELS = 16


class Extension(ModuleType):
    """`causal_conv1d_cuda` in Python."""

    def causal_conv1d_fwd(self, x, weight, bias, ids, initial, out, final, silu) -> None:
        check_given(x, weight, bias, ids)
        assert initial is None
        assert final is None
        assert silu
        assert is_channels_last(out)
        out.copy_(reference(x, weight, bias, ids))

    def causal_conv1d_bwd(
        self, x, weight, bias, dout, ids, initial, dfinal, dx, dweight, dbias, dinitial, silu
    ) -> None:
        check_given(x, weight, bias, ids)
        assert {initial, dfinal, dinitial} == {None}
        assert silu
        assert is_channels_last(dout)
        assert is_channels_last(dx)
        assert torch.are_deterministic_algorithms_enabled()
        # In a thread of its own: inside a custom operator autograd records nothing.
        with ThreadPoolExecutor() as threads:
            found = threads.submit(gradients, x, weight, bias, dout, ids).result()
        for to, gradient in zip((dx, dweight, dbias), found, strict=False):
            to.copy_(gradient)


def gradients(x, weight, bias, dout, ids) -> tuple[torch.Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
    y = reference(*leaves, *([None] if bias is None else []), ids)
    return torch.autograd.grad(y, leaves, dout)


def reference(x, weight, bias, ids) -> torch.Tensor:
    interface = importlib.import_module("causal_conv1d.causal_conv1d_interface")
    return interface.causal_conv1d_ref(x, weight, bias, activation="silu", seq_idx=ids)


def is_channels_last(x: torch.Tensor) -> bool:
    """Rows of at least two channels that lie at multiples of 16 bytes."""
    aligned = x.stride(0) % 8 == 0 and x.stride(2) % 8 == 0 and x.data_ptr() % 16 == 0
    return x.stride(1) == 1 and x.stride(2) > 1 and x.shape[1] % 8 == 0 and aligned


def check_given(x, weight, bias, ids) -> None:
    assert is_channels_last(x)
    assert 2 <= weight.shape[1] <= 4
    assert bias is None or bias.dtype == weight.dtype
    assert bias is None or bias.stride(0) == 1
    assert ids.dtype == torch.int32
    assert ids.is_contiguous()
    assert ids.shape == (1, x.shape[2])
    assert ids[0, 0] == 0
    steps = ids[0, 1:] - ids[0, :-1]
    assert ((steps == 0) | (steps == 1)).all(), "an id that comes back would join two documents"
    # A tile of 64 ids from any start within the row is memory of their own.
    assert ids.untyped_storage().nbytes() >= 4 * (x.shape[2] + 63)


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice that a GPU machine with the package makes, on the CPU."""
    if importlib.util.find_spec("causal_conv1d") is None:
        pytest.skip("causal-conv1d is not installed: scripts/env.sh makes a pure-Python build")
    extension = Extension("causal_conv1d_cuda")
    if importlib.util.find_spec("causal_conv1d_cuda") is None:
        monkeypatch.setitem(sys.modules, "causal_conv1d_cuda", extension)
    functions = importlib.import_module("causal_conv1d.cpp_functions")
    monkeypatch.setattr(functions, "causal_conv1d_cuda", extension)
    monkeypatch.setattr(conv1d, "choose", lambda *_: Choice("causal_conv1d", "asked for"))


def compare(
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    first: int = 8,
    width: int = 32,
    taps: int = 4,
    bias: bool = True,
) -> None:
    """x is a column slice of a wider tensor, as in the model."""
    inputs = normal(1, wide=(sum(lengths), width), weight=(CHANNELS, taps), b=(CHANNELS,))
    if not bias:
        del inputs["b"]
    packed = Packed.from_lengths(lengths)

    def sliced(function):
        return lambda wide, weight, b=None: function(
            wide[:, first : first + CHANNELS], weight, b, packed
        )

    check(sliced(causal_conv1d), sliced(causal_conv1d_ref), inputs, dtype, small=("b",))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED)
@pytest.mark.usefixtures("package")
def test_ragged_documents(lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    compare(lengths, dtype)


@pytest.mark.parametrize(("first", "width"), [(3, 32), (4, 32), (8, 30), (8, 28), (5, 27)])
@pytest.mark.usefixtures("package")
def test_rows_that_lie_between_its_multiples_are_copied(first: int, width: int) -> None:
    compare((5, 12), torch.bfloat16, first, width)
    compare((1,), torch.bfloat16, first, width)


@pytest.mark.usefixtures("package")
def test_a_bias_of_any_dtype_and_stride() -> None:
    inputs = normal(2, x=(9, CHANNELS), weight=(CHANNELS, 4), wide=(CHANNELS, 2))
    packed = Packed.from_lengths((2, 7))
    for dtype in (torch.float32, torch.bfloat16):
        check(
            lambda x, weight, wide: causal_conv1d(x, weight, wide[:, 1], packed),
            lambda x, weight, wide: causal_conv1d_ref(x, weight, wide[:, 1], packed),
            inputs,
            dtype,
        )


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("taps", [2, 3])
@pytest.mark.usefixtures("package")
def test_fewer_taps(taps: int, bias: bool) -> None:
    compare((2, 9, 1), torch.bfloat16, taps=taps, bias=bias)


@pytest.mark.usefixtures("package")
def test_an_upstream_gradient_without_memory_of_its_own() -> None:
    x = torch.randn(6, CHANNELS, requires_grad=True)
    weight = torch.randn(CHANNELS, 4)
    packed = Packed.from_lengths((2, 4))
    (found,) = torch.autograd.grad(causal_conv1d(x, weight, None, packed).sum(), x)
    (right,) = torch.autograd.grad(causal_conv1d_ref(x, weight, None, packed).sum(), x)
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.usefixtures("package")
def test_torchs_switch_for_determinism_is_put_back(before: bool) -> None:
    torch.use_deterministic_algorithms(before, warn_only=before)
    fills = torch.utils.deterministic.fill_uninitialized_memory
    try:
        compare((3,), torch.float32)
        assert torch.are_deterministic_algorithms_enabled() is before
        assert torch.is_deterministic_algorithms_warn_only_enabled() is before
        assert torch.utils.deterministic.fill_uninitialized_memory is fills
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("channels", "taps", "complaint"),
    [(12, 4, "12 channels, not a multiple of 8"), (8, 5, "5 taps, not 2 to 4")],
)
@pytest.mark.usefixtures("package")
def test_what_it_does_not_take_is_refused(channels: int, taps: int, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        causal_conv1d(
            torch.ones(3, channels), torch.ones(channels, taps), None, Packed.from_lengths((3,))
        )


def test_a_row_beyond_its_offsets_is_refused() -> None:
    with pytest.raises(ValueError, match="too many for its 32-bit offsets"):
        conv1d._check_package(torch.empty(2**28, 8, device="meta"), torch.ones(8, 4))


def test_a_build_without_its_extension_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "causal_conv1d", None)
    with pytest.raises(ImportError, match="pip install --no-build-isolation 'causal-conv1d"):
        conv1d._package()


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED)
def test_the_package_itself(lengths: tuple[int, ...]) -> None:
    """On a GPU, with its own kernels; a second run gives the same bits."""
    pytest.importorskip("causal_conv1d_cuda")
    packed = Packed.from_lengths(lengths)
    inputs = normal(1, x=(sum(lengths), CHANNELS), weight=(CHANNELS, 4), b=(CHANNELS,))

    def theirs(x, weight, b):
        on_gpu = Packed.from_lengths(lengths, "cuda")
        return causal_conv1d(*(t.cuda() for t in (x, weight, b)), on_gpu, kernels="packages").cpu()

    def reference(x, weight, b):
        return causal_conv1d_ref(x, weight, b, packed)

    check(theirs, reference, inputs, torch.bfloat16, small=("b",))
