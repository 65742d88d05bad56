"""The peer that the scan is compared with is what it should be: it agrees with the specification."""

import torch

from hymoe.kernels.packed import Packed
from hymoe.kernels.ssd.ref import ssd_scan_ref
from tests.close import assert_close_rel
from tests.kernel_check import normal, run
from tests.kernels.mamba_peer import mamba_chunk_scan_combined

H, P, G, N = 2, 16, 1, 16
LIMIT = (0.0, float("inf"))


def test_mamba_ssm_agrees_with_the_specification() -> None:
    """Documents that start inside a chunk; output and every gradient."""
    lengths = (5, 20, 1, 14)
    packed = Packed.from_lengths(lengths)
    rows = sum(lengths)
    inputs = normal(
        5, x=(rows, H, P), dt=(rows, H), a_log=(H,), b=(rows, G, N), c=(rows, G, N), skip=(H,), dt_bias=(H,)
    )  # fmt: skip
    inputs = {name: x.float() for name, x in inputs.items()}

    def theirs(x, dt, a_log, b, c, skip, dt_bias):
        return scan(
            *(x[None], dt[None], -torch.exp(a_log), b[None], c[None], 16),
            D=skip,
            dt_bias=dt_bias,
            seq_idx=packed.seq_idx[None],
            dt_softplus=True,
            dt_limit=LIMIT,
        )[0]

    with mamba_chunk_scan_combined() as scan:
        found = run(theirs, inputs)
    right = run(lambda **given: ssd_scan_ref(**given, dt_limit=LIMIT, packed=packed), inputs)
    for name, result in found.items():
        assert_close_rel(result, right[name], 1e-5, name)
