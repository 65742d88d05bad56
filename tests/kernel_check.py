"""Forward and every gradient of a kernel against its reference, by the rule of `tests/close.py`."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tests.close import assert_close_rel, assert_twice_as_close

FLOAT64_BOUND = 1e-12  # another order of sums, nothing else
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
DTYPE_IDS = ("float64", "float32", "bfloat16")

# Documents in a row, each set with what it is there for; a chunk is CHUNK tokens, a convolution has 4 taps.
CHUNK = 16
RAGGED = {
    "one-token": (1,),
    "one-document": (53,),  # divided by no chunk
    "tokens-alone": (1, 1, 1, 1, 1),
    "shorter-than-the-taps": (1, 2, 3, 1, 3, 2),
    "around-a-chunk": (CHUNK - 1, CHUNK, CHUNK + 1),
    "starts-inside-chunks": (5, 40, 1, 3, 33, 2, 18),
    "around-two-chunks": (2 * CHUNK - 1, 2 * CHUNK + 1, 2 * CHUNK),
}

Inputs = Mapping[str, Tensor]
Function = Callable[..., Tensor]


def run(
    function: Function, inputs: Inputs, seed: int = 7, twice: bool = False
) -> dict[str, Tensor]:
    """The output under "y" and the gradient of each input under its name, for a random upstream gradient.

    Args:
        function: takes the inputs by name.
        inputs: floating tensors; each gets a gradient.
        seed: of the upstream gradient.
        twice: asserts that a second backward pass gives the same bits: the first may not spoil what was saved.
    """
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    y = function(**leaves)
    rng = torch.Generator().manual_seed(seed)
    # The same upstream gradient in every precision: its values are bfloat16's.
    upstream = torch.randn(y.shape, generator=rng).bfloat16().to(y.dtype)
    given = upstream.clone()
    gradients = torch.autograd.grad(y, list(leaves.values()), given, retain_graph=twice)
    assert torch.equal(given, upstream), "the backward pass wrote into its upstream gradient"
    if twice:
        again = torch.autograd.grad(y, list(leaves.values()), given)
        for name, one, other in zip(leaves, gradients, again, strict=True):
            assert torch.equal(one, other), f"a second backward pass differs: {name}"
    return {"y": y.detach(), **dict(zip(leaves, gradients, strict=True))}


def check(
    kernel: Function,
    reference: Function,
    inputs: Inputs,
    dtype: torch.dtype,
    small: tuple[str, ...] = (),
    beside: Mapping[str, str] | None = None,
    plain: Function | None = None,
) -> None:
    """Asserts that output and gradients of `kernel` are right, and that it leaves its inputs alone.

    Args:
        kernel: takes the inputs by name.
        reference: the same in plain torch.
        inputs: any floating dtype; they are rounded to `dtype` first, so that all sides see the same values.
        dtype: of the kernel's run.
        small: inputs that are float32 in training whatever the others are.
        beside: gradients whose true value is a full cancellation (zero, or next to it), each with the gradient whose
            scale its terms have: the two are compared as one vector.
        plain: what plain torch computes in `dtype`, where that is not the reference in `dtype`.
    """
    given = {
        name: x.to(torch.promote_types(dtype, torch.float32) if name in small else dtype)
        for name, x in inputs.items()
    }
    before = {name: x.clone() for name, x in given.items()}
    actual = run(kernel, given, twice=True)
    for name, x in given.items():
        assert torch.equal(x, before[name]), f"the kernel wrote into {name}"
    exact = run(reference, {name: x.double() for name, x in given.items()})
    usual = run(plain or reference, given)
    for name, result in actual.items():
        assert result.dtype == usual[name].dtype, f"{name} is {result.dtype}"
        names = (name, beside[name]) if beside and name in beside else (name,)
        found, same, right = (_join(results, names) for results in (actual, usual, exact))
        if dtype == torch.float64:
            assert_close_rel(found, right, FLOAT64_BOUND, name)
        else:
            assert_twice_as_close(found, same, right, name)


def _join(results: Inputs, names: tuple[str, ...]) -> Tensor:
    return (
        results[names[0]] if len(names) == 1 else torch.cat([results[n].flatten() for n in names])
    )


def normal(seed: int, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Standard normal float64 inputs by name."""
    rng = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=rng, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def spans(lengths: tuple[int, ...]) -> list[slice]:
    """Where each document lies in the row."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [slice(end - n, end) for end, n in zip(ends, lengths, strict=True)]


def assert_documents_alone(
    function: Callable[[Any, Mapping[str, Tensor]], Tensor],
    make_packed: Callable[[tuple[int, ...]], Any],
    lengths: tuple[int, ...],
    rows: Inputs,
    bound: float = 1e-5,
) -> None:
    """Asserts that a packed row is its documents one by one, and that no document sees another.

    Args:
        function: of the boundaries and the row inputs, (T, ...) each -> (T, ...).
        make_packed: lengths -> boundaries.
        lengths: tokens of the documents.
        rows: inputs with T rows.
        bound: relative, for packed against alone; what one document sees of another is bitwise nothing.
    """
    packed = make_packed(lengths)
    together = run(lambda **r: function(packed, r), rows)
    upstream = torch.randn(
        together["y"].shape, generator=torch.Generator().manual_seed(7)
    ).bfloat16()
    for number, span in enumerate(spans(lengths)):
        leaves = {name: x[span].clone().requires_grad_() for name, x in rows.items()}
        y = function(make_packed((lengths[number],)), leaves)
        gradients = torch.autograd.grad(y, list(leaves.values()), upstream[span].to(y.dtype))
        for name, alone in {"y": y, **dict(zip(leaves, gradients, strict=True))}.items():
            assert_close_rel(together[name][span], alone, bound, f"document {number}: {name}")
        # Everything in this document becomes NaN: not a bit changes in the others, forward or backward.
        poisoned = {name: x.clone() for name, x in rows.items()}
        for x in poisoned.values():
            x[span] = torch.nan
        found = run(lambda **r: function(packed, r), poisoned)
        others = torch.ones(sum(lengths), dtype=torch.bool)
        others[span] = False
        for name, result in found.items():
            assert torch.equal(result[others], together[name][others]), (
                f"document {number} reaches others: {name}"
            )
