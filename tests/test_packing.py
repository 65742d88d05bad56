"""A packed row is its documents one by one: nothing of one enters another, forward or backward."""

from typing import Any

import pytest
import torch
from torch import Tensor

from hymoe.kernels.packed import Packed
from hymoe.model.net import HybridLM
from tests.close import assert_close_rel, relative_error
from tests.kernel_check import assert_documents_alone, spans
from tests.tiny import tiny_lm

CHUNK = 16  # of the tiny config
LENGTHS = (5, 1, 40, 1, 3, 33, 2, 18)  # single tokens, shorter than the taps, starts inside chunks
KINDS: dict[str, dict[str, Any]] = {
    "mamba": {"layers_block_type": ["mamba"] * 2},
    "attention": {"layers_block_type": ["attention"] * 2},
    "experts": {"layers_block_type": ["moe"] * 2},
    "hybrid": {"layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba", "moe"]},
}
both_ways = pytest.mark.parametrize("keep", ["all", "inputs"])
every_kind = pytest.mark.parametrize("kind", KINDS)


def row(lengths: tuple[int, ...], seed: int = 1) -> tuple[Tensor, Tensor]:
    """Ids and shifted labels; a document's last token has no successor in the row."""
    input_ids = torch.randint(0, 97, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    labels = torch.cat([input_ids[1:], input_ids[:1]])
    labels[torch.tensor(lengths).cumsum(0) - 1] = -100
    return input_ids, labels


def gradients(lm: HybridLM, *batch: Any) -> dict[str, Tensor]:
    lm.zero_grad()
    lm.loss(*batch)[0].backward()
    return {name: p.grad.clone() for name, p in lm.named_parameters()}


@both_ways
@every_kind
@pytest.mark.parametrize("lengths", [LENGTHS, (1, 1, 1), (CHUNK - 1, CHUNK + 1, CHUNK)], ids=str)
def test_packed_is_the_documents_alone(lengths: tuple[int, ...], kind: str, keep: str) -> None:
    """Hidden states, logits, loss, and the gradient of every parameter: the sum over the documents."""
    lm = tiny_lm(seed=5, **KINDS[kind])
    lm.set_keep(keep)
    input_ids, labels = row(lengths)
    labels[labels == -100] = 3  # every token counts, so that a document of one token does, too
    packed = Packed.from_lengths(lengths)
    hidden = lm(input_ids, packed).detach()
    together = gradients(lm, input_ids, labels, packed)
    loss = lm.loss(input_ids, labels, packed)[0]
    total, alone = torch.zeros(()), {name: torch.zeros_like(x) for name, x in together.items()}
    for number, span in enumerate(spans(lengths)):
        document = (input_ids[span], labels[span], Packed.from_lengths((lengths[number],)))
        found = lm(document[0], document[2])
        assert_close_rel(hidden[span], found, 1e-5, f"document {number}")
        assert_close_rel(lm.logits(hidden[span]), lm.logits(found), 1e-5, f"logits {number}")
        total += lm.loss(*document)[0].detach()
        for name, gradient in gradients(lm, *document).items():
            alone[name] += gradient
    assert_close_rel(loss, total, 1e-5, "loss")
    for name, gradient in together.items():
        assert_close_rel(*_without_noise(name, gradient, alone, together), 1e-5, name)


def _without_noise(
    name: str, gradient: Tensor, alone: dict[str, Tensor], together: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Rows of one token leave rounding in the gradients of queries and keys: measured at the scale of the values'."""
    value = name.replace("q_proj", "v_proj").replace("k_proj", "v_proj")
    if value == name:
        return gradient, alone[name]
    return tuple(torch.cat([x[name].flatten(), x[value].flatten()]) for x in (together, alone))


@pytest.mark.parametrize("kind", ["mamba", "attention"])
@pytest.mark.parametrize("lengths", [(20, 1, 40, 2), (CHUNK, CHUNK)], ids=str)
def test_a_mixer_alone(lengths: tuple[int, ...], kind: str) -> None:
    """The gradient of the mixer's input, too; a document of NaN leaves the others' bits alone."""
    mixer = tiny_lm(seed=5, **KINDS[kind]).layers[0].mixer
    x = torch.randn(sum(lengths), 32, generator=torch.Generator().manual_seed(2))
    assert_documents_alone(
        lambda packed, rows: mixer(rows["x"], packed), Packed.from_lengths, lengths, {"x": x}
    )


def disjoint_row(lengths: tuple[int, ...]) -> Tensor:
    """Ids of which each belongs to one document."""
    share = 97 // len(lengths)
    rng = torch.Generator().manual_seed(4)
    ids = [torch.randint(share, (n,), generator=rng) + i * share for i, n in enumerate(lengths)]
    return torch.cat(ids)


@both_ways
@every_kind
@pytest.mark.parametrize("number", [0, 2, 4])
def test_a_document_of_nan_stays_alone(number: int, kind: str, keep: str) -> None:
    """The embeddings of one document's ids are NaN: hidden states, losses and embedding gradients of the others stay.

    To the bit, except where experts are: NaN chooses experts, too, and with the number of an expert's rows the
    order of a product's sums may change.
    """
    lengths = (7, 1, 20, 2, 30)
    lm = tiny_lm(seed=6, **KINDS[kind])
    lm.set_keep(keep)
    input_ids = disjoint_row(lengths)
    packed = Packed.from_lengths(lengths)
    inside = torch.zeros(sum(lengths), dtype=torch.bool)
    inside[spans(lengths)[number]] = True
    labels = row(lengths)[1].masked_fill(inside, -100)
    its_ids = input_ids[inside].unique()
    others = torch.ones(97, dtype=torch.bool)
    others[its_ids] = False

    def outcome() -> tuple[Tensor, Tensor, Tensor]:
        loss = lm.loss(input_ids, labels, packed)[0]
        gradient = torch.autograd.grad(loss, lm.embeddings.weight)[0]
        return lm(input_ids, packed)[~inside].detach(), loss.detach(), gradient[others]

    clean = outcome()
    with torch.no_grad():
        lm.embeddings.weight[its_ids] = torch.nan
        assert lm(input_ids, packed)[inside].isnan().all()
    for name, one, other in zip(("hidden", "loss", "gradient"), outcome(), clean, strict=True):
        if "moe" in KINDS[kind]["layers_block_type"]:
            assert_close_rel(one, other, 1e-6, name)
        else:
            assert torch.equal(one, other), name


PRIME_RL = {
    "mamba": ["mamba"] * 2,
    "attention": ["attention"] * 2,
    "hybrid": ["mamba", "moe", "attention", "mlp", "mamba"],
}


@both_ways
@pytest.mark.parametrize("kind", PRIME_RL)
def test_a_changed_neighbour_changes_nothing(kind: str, keep: str) -> None:
    """prime-rl#3000: A = 5 6 7 8 (or 42), B = 9 to 13 behind it; four taps, the border inside a chunk of 4."""
    lm = tiny_lm(seed=7, layers_block_type=PRIME_RL[kind], conv_kernel=4, chunk_size=4)
    lm.set_keep(keep)
    b_ids = torch.arange(9, 14)
    b_labels = torch.tensor([10, 11, 12, 13, -100])
    results = []
    for a_ids, b in (([5, 6, 7, 8], slice(4, 9)), ([5, 6, 7, 42], slice(4, 9)), ([], slice(5))):
        input_ids = torch.cat([torch.tensor(a_ids, dtype=torch.int64), b_ids])
        labels = torch.cat([torch.full((len(a_ids),), -100), b_labels])
        packed = Packed.from_lengths([n for n in (len(a_ids), 5) if n])
        hidden = lm(input_ids, packed)[b].detach()
        loss = lm.loss(input_ids, labels, packed)[0].detach()
        found = gradients(lm, input_ids, labels, packed)
        results.append({"hidden": hidden, "logits": lm.logits(hidden), "loss": loss, **found})
    packed, changed, alone = results
    for name, expected in alone.items():
        assert_close_rel(packed[name], expected, 1e-5, name)
        assert_close_rel(changed[name], expected, 1e-5, name)
        if kind != "hybrid":  # another id may choose other experts: see the test above
            assert torch.equal(packed[name], changed[name]), name


def test_without_the_boundary_the_neighbour_shows() -> None:
    """The inputs above would tell: as one document, B's hidden states depend on A's last id in every kind."""
    for kind in PRIME_RL:
        lm = tiny_lm(seed=7, layers_block_type=PRIME_RL[kind], conv_kernel=4, chunk_size=4)
        one = Packed.from_lengths((9,))
        first, second = (
            lm(torch.tensor([5, 6, 7, last, *range(9, 14)]), one)[4:] for last in (8, 42)
        )
        assert relative_error(first, second) > 1e-3, kind


@both_ways
def test_boundaries_as_a_tensor_are_the_row(keep: str) -> None:
    lm = tiny_lm(seed=8)
    lm.set_keep(keep)
    input_ids, labels = row(LENGTHS)
    packed = Packed.from_lengths(LENGTHS)
    found = gradients(lm, input_ids, labels, packed.cu_seqlens)
    for name, expected in gradients(lm, input_ids, labels, packed).items():
        assert torch.equal(found[name], expected), name


@every_kind
def test_recomputation_changes_no_bit(kind: str) -> None:
    lm = tiny_lm(seed=9, **KINDS[kind])
    batch = (*row(LENGTHS), Packed.from_lengths(LENGTHS))
    kept = gradients(lm, *batch)
    lm.set_keep("inputs")
    for name, found in gradients(lm, *batch).items():
        assert torch.equal(found, kept[name]), name
