"""Float32 to BF16 and back without losing small updates: keyed random bits, stochastic rounding, exact masters.

Everything here is integer arithmetic on the bits of IEEE-754 numbers, so a Triton kernel that follows
this text gives the same bits.

**Random bits.** Philox4x32 (multipliers 0xD2511F53, 0xCD9E8D57; Weyl constants 0x9E3779B9,
0xBB67AE85), NUM_ROUNDS = 7: the fewest rounds of this generator that pass BigCrush; the usual 10 cost
30 to 40 % more in torch, where they are the largest part of the step, and rounding needs no more than unbiased
bits without visible correlation. One call gives four words for four neighbouring elements:

    i        = element index in the WHOLE tensor, 64 bits
    counter  = (low 32 bits of i // 4, high 32 bits of i // 4, parameter key, low 32 bits of the step)
    key      = (low 32 bits of the seed, high 32 bits of the seed XOR domain)
    word(i)  = output number i % 4
    bits     = low 16 of word(i) for the weight, high 16 for the second moment

`domain` is 0 in training and EXPORT_DOMAIN at export, so that the file's rounding is independent of
the run's. Nothing else enters: not the shard, the slice, the launch or the rank.

**Stochastic rounding** adds 16 uniform bits to the float32 magnitude and drops the low half: the
mean is the value, a value that is a BF16 already keeps its bits. From the largest BF16 upwards finite
values are truncated (they saturate, never become infinite); infinities stay; a NaN stays one, made
quiet: bits | 0x00400000, low half 0.

**Exact masters.** A BF16 weight and a signed 16-bit remainder are one float32 number:

    high      = (bits + 0x8000) >> 16           the weight: nearest BF16, ties away from zero
    remainder = bits - (high << 16)             in [-32768, 32767]; a tie leaves -32768
    bits      = (high << 16) + remainder

Ties cannot go to even: an even weight would then have 65,537 preimages and 16 bits hold 65,536. On
ties alone the weight differs from round-half-even, by being the other of two equally near numbers. A
NaN is made quiet, with low half 0, before it is split (CUDA's own NaN, 0x7FFFFFFF, would round up to
-0.0). Every other float32 comes back from `join_master` as it was.

**Memory.** Work is done in slices (`slice_length`); results do not depend on the slice.

Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

NUM_ROUNDS = 7  # see the module docstring
EXPORT_DOMAIN = 0x45585054  # "EXPT": any constant other than 0
SLICE_CPU = 1 << 17  # elements: a slice stays in a core's L2 (23 ns an element, 31 at 2^20)
SLICE_DEVICE = 1 << 22  # elements: launches do not matter and temporaries stay under 200 MB

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK32 = 0xFFFFFFFF
_MAGNITUDE = 0x7FFFFFFF
_LARGEST_BF16 = 0x7F7F0000
_INFINITY = 0x7F800000
_QUIET = 0x00400000  # the bit that a quiet NaN has set


def slice_length(device: torch.device) -> int:
    """Number of elements that are processed at once on this device."""
    return SLICE_CPU if device.type == "cpu" else SLICE_DEVICE


def slices(num_elements: int, length: int) -> Iterator[tuple[int, int]]:
    """Yields (start, stop) of consecutive slices; none for an empty tensor."""
    for start in range(0, num_elements, length):
        yield start, min(start + length, num_elements)


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int], rounds: int = NUM_ROUNDS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32 in int64 arithmetic.

    Args:
        counter: four int64 tensors with values in [0, 2^32); the first and the third have the full
            shape (n,), the others (n,) or ().
        key: two integers in [0, 2^32).
        rounds: number of rounds.

    Returns:
        Four (n,) int64 tensors whose low 32 bits are the output words (the high halves are not
        cleared: the callers truncate to int32 anyway).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        p0 = c0 * MULTIPLIERS[0]  # modulo 2^64, which keeps all bits of the unsigned product
        p1 = c2 * MULTIPLIERS[1]
        # Low halves travel in p0 and p1 with the high halves above them, masked after the next XOR.
        c0 = (p1 >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_MASK32)
        c2 = (p0 >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_MASK32)
        c1, c3 = p1, p0
        k0 = (k0 + WEYL[0]) & _MASK32
        k1 = (k1 + WEYL[1]) & _MASK32
    return c0, c1, c2, c3


def random_words(
    first: int,
    count: int,
    *,
    seed: int,
    key: int,
    step: int | Tensor,
    domain: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The random words of elements first .. first + count - 1 of one tensor.

    Args:
        first: index of the first element in the whole tensor, 0 <= first < 2^63.
        count: number of elements.
        seed: 0 <= seed < 2^64.
        key: the parameter's key, 0 <= key < 2^32.
        step: int or () int64 on `device`; its low 32 bits count.
        domain: 0 in training, EXPORT_DOMAIN at export.
        device: where the words are made.

    Returns:
        (count,) int32, uniform over all 32-bit patterns.

    Raises:
        ValueError: if first, seed or key is out of range.
    """
    if not (0 <= first < 1 << 63 and 0 <= seed < 1 << 64 and 0 <= key < 1 << 32):
        raise ValueError(
            f"random words: first element {first}, seed {seed} or key {key} is out of range:"
            " expected 0 <= first < 2^63, 0 <= seed < 2^64, 0 <= key < 2^32"
        )
    group = torch.arange(first >> 2, (first + count + 3) >> 2, dtype=torch.int64, device=device)
    if not isinstance(step, Tensor):
        step = torch.full((), step, dtype=torch.int64, device=device)
    counter = (group & _MASK32, group >> 32, torch.full_like(group, key), step & _MASK32)
    outputs = philox4x32(counter, (seed & _MASK32, (seed >> 32) ^ domain))
    words = torch.empty(len(group), 4, dtype=torch.int32, device=device)
    for j, output in enumerate(outputs):
        words[:, j].copy_(output)  # int64 -> int32 keeps the low 32 bits
    skipped = first & 3
    return words.view(-1)[skipped : skipped + count]


def low_bits(words: Tensor) -> Tensor:
    """(n,) int32 words -> (n,) int32 in [0, 65535]: the 16 bits that round the weight."""
    return words & 0xFFFF


def high_bits(words: Tensor) -> Tensor:
    """(n,) int32 words -> (n,) int32 in [0, 65535]: the 16 bits that round the second moment."""
    return (words >> 16) & 0xFFFF


def round_with_bits(x: Tensor, bits: Tensor) -> Tensor:
    """Rounds to BF16 with the given 16 bits: away from zero where low half + bits carries.

    Args:
        x: (n,) float32.
        bits: (n,) int32 in [0, 65535].

    Returns:
        (n,) bf16.
    """
    raw = _quiet(x)
    # Room up to the largest finite pattern that truncates to the largest BF16; none at and past infinity.
    room = (raw & _MAGNITUDE).neg_().add_(_LARGEST_BF16 + 0xFFFF).clamp_(min=0)
    return (
        room.clamp_(max=bits)
        .add_(raw)
        .bitwise_right_shift_(16)
        .to(torch.int16)
        .view(torch.bfloat16)
    )


def _quiet(x: Tensor) -> Tensor:
    """float32 -> a new tensor of its bits, int32, in which NaNs are quiet and have no low half.

    Without comparisons and `where`, which cost ten times an integer operation on a CPU.
    """
    raw = x.view(torch.int32)
    is_nan = torch.rsub(raw & _MAGNITUDE, _INFINITY).bitwise_right_shift_(31)  # -1 or 0
    return (is_nan & (_QUIET | 0xFFFF)).bitwise_or_(raw).bitwise_xor_(is_nan.bitwise_and_(0xFFFF))


def stochastic_round(
    x: Tensor, *, seed: int, key: int, offset: int, step: int | Tensor, domain: int = 0
) -> Tensor:
    """Rounds a shard of a tensor to BF16, unbiased, with bits that depend on the arguments alone.

    Args:
        x: float32, any shape, contiguous: elements offset, offset + 1, ... of the whole tensor.
        seed: 0 <= seed < 2^64.
        key: the parameter's key, 0 <= key < 2^32.
        offset: index of x's first element in the whole tensor.
        step: int or () int64 on x's device.
        domain: 0 in training (the bits of `adamw_step`'s weights), EXPORT_DOMAIN at export.

    Returns:
        bf16 of x's shape. Values that are BF16 already keep their bits; finite values stay finite.

    Raises:
        ValueError: if x is not contiguous float32.
    """
    if x.dtype != torch.float32 or not x.is_contiguous():
        raise ValueError(
            f"stochastic_round: expected contiguous float32, found {x.dtype} with stride {x.stride()}"
        )
    out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    flat, flat_out = x.detach().view(-1), out.view(-1)
    for start, stop in slices(flat.numel(), slice_length(x.device)):
        words = random_words(
            offset + start,
            stop - start,
            seed=seed,
            key=key,
            step=step,
            domain=domain,
            device=x.device,
        )
        flat_out[start:stop] = round_with_bits(flat[start:stop], low_bits(words))
    return out


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """Splits float32 numbers into the nearest BF16 (ties away from zero) and a remainder.

    Args:
        master: float32, any shape.

    Returns:
        weight: bf16, same shape. remainder: int16, same shape. A NaN has remainder 0.
    """
    raw = _quiet(master)
    remainder = raw.to(torch.int16)  # the low half, which is raw - (high << 16)
    high = raw.add_(0x8000).bitwise_right_shift_(16)
    return high.to(torch.int16).view(torch.bfloat16), remainder


def join_master(weight: Tensor, remainder: Tensor) -> Tensor:
    """The inverse of `split_master`.

    Args:
        weight: bf16, any shape.
        remainder: int16, same shape.

    Returns:
        float32, same shape.
    """
    high = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return high.add_(remainder).view(torch.float32)


def export_bf16(
    weight: Tensor, remainder: Tensor, *, seed: int, key: int, offset: int, step: int | Tensor
) -> Tensor:
    """BF16 weights for the file: the exact master rounded stochastically by key.

    Rounding the master to nearest would give back the training weight and lose most of a small
    update. A weight whose remainder is 0, such as one that never moved, keeps its bits.

    Args:
        weight: bf16, any shape, contiguous: one shard of the parameter.
        remainder: int16, same shape.
        seed: the run's seed.
        key: the parameter's key.
        offset: index of the shard's first element in the whole tensor.
        step: int or () int64: the count of applied steps.

    Returns:
        bf16 of the same shape.

    Raises:
        ValueError: if dtypes or shapes differ from the above.
    """
    _check_pair(weight, remainder)
    out = torch.empty_like(weight)
    flat = weight.detach().view(-1), remainder.view(-1), out.view(-1)
    for start, stop in slices(weight.numel(), slice_length(weight.device)):
        w, r, o = (tensor[start:stop] for tensor in flat)
        o.copy_(
            stochastic_round(
                join_master(w, r),
                seed=seed,
                key=key,
                offset=offset + start,
                step=step,
                domain=EXPORT_DOMAIN,
            )
        )
    return out


def update_sums(base: Tensor, weight: Tensor, remainder: Tensor | None, file: Tensor) -> Tensor:
    """How much of the master's update a file holds, as two sums that add over shards and tensors.

    The share of the update that reached the file is sums[0] / sums[1]: the projection of the file's
    change on the master's. 1 is all of it, 0 is none; unbiased rounding gives 1 in the mean.

    Args:
        base: float or bf16, any shape, contiguous: the weights before training.
        weight: float32 or bf16, same shape: the weights after it.
        remainder: int16 of the same shape, or None where the weight is the master itself.
        file: float or bf16, same shape: what was exported.

    Returns:
        (2,) float64 on the same device: <file - base, master - base>, <master - base, master - base>.

    Raises:
        ValueError: if the shapes differ.
    """
    if not base.shape == weight.shape == file.shape:
        raise ValueError(
            f"update_sums: base {tuple(base.shape)}, weight {tuple(weight.shape)} and file"
            f" {tuple(file.shape)} must have one shape"
        )
    if remainder is not None:
        _check_pair(weight, remainder)
    sums = torch.zeros(2, dtype=torch.float64, device=base.device)
    base, weight, file = (tensor.detach().reshape(-1) for tensor in (base, weight, file))
    for start, stop in slices(base.numel(), slice_length(base.device)):
        master = weight[start:stop]
        if remainder is not None:
            master = join_master(master, remainder.view(-1)[start:stop])
        old = base[start:stop].double()
        change = master.double() - old
        sums[0] += ((file[start:stop].double() - old) * change).sum()
        sums[1] += change.square().sum()
    return sums


def _check_pair(weight: Tensor, remainder: Tensor) -> None:
    is_pair = weight.dtype == torch.bfloat16 and remainder.dtype == torch.int16
    if not is_pair or weight.shape != remainder.shape:
        raise ValueError(
            f"master: expected a bf16 weight and an int16 remainder of one shape, found {weight.dtype}"
            f" {tuple(weight.shape)} and {remainder.dtype} {tuple(remainder.shape)}"
        )
    if not (weight.is_contiguous() and remainder.is_contiguous()):
        raise ValueError(
            f"master: expected contiguous tensors, found strides {weight.stride()} and"
            f" {remainder.stride()}"
        )
