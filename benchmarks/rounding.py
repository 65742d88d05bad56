"""What a BF16 weight keeps of small updates: 200 steps that each move a million weights of N(0, 0.02) by 3e-7.

Prediction: `exact` is a float32 master to the bit; `stochastic` moves as far in the mean, with noise of a few times the
move; `nearest` loses nearly all (a BF16 step at 0.02 is 1.2e-4). Of the export: stochastic rounding of the exact master
keeps the move, nearest rounding of it about half.
"""

import torch
from harness import finish, parser, show, stamp

from hymoe.kernels.adamw import adamw_step
from hymoe.kernels.rounding import export_bf16, join_master, update_sums

LR, STEPS, COUNT = 3e-7, 200, 1 << 20
# With these a constant gradient of 1 makes AdamW's update the learning rate itself, whatever the step.
CONSTANT = {"beta1": 0.0, "beta2": 0.0, "eps": 0.0}


def run(rounding: str, initial: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights, and the remainders of exact masters, after all steps."""
    weight = initial.clone()
    moments = [[torch.zeros_like(weight)], [torch.zeros_like(weight)]]
    remainder = torch.zeros_like(weight, dtype=torch.int16) if rounding == "exact" else None
    count = torch.zeros((), dtype=torch.int64)
    for _ in range(STEPS):
        adamw_step(
            [weight],
            [torch.ones_like(weight)],
            *moments,
            remainders=None if remainder is None else [remainder],
            keys=[1],
            offsets=[0],
            weight_decays=[0.0],
            lr=LR,
            **CONSTANT,
            step=count,
            clip_factor=torch.ones(()),
            seed=4242,
            rounding=rounding,
        )
    return weight, remainder


def main() -> None:
    """Runs the three roundings and prints what each kept."""
    args = parser(__doc__.partition("\n")[0], rounds=1).parse_args()
    torch.set_num_threads(args.threads)
    initial = torch.randn(COUNT, generator=torch.Generator().manual_seed(0)).mul(0.02).bfloat16()
    master = initial.float()
    for _ in range(STEPS):
        master -= torch.tensor(LR)
    wanted = (master.double() - initial.double()).mean()
    rows, figures = [], {"benchmark": "rounding", "stamp": stamp(), "roundings": {}}
    for rounding in ("exact", "stochastic", "nearest"):
        weight, remainder = run(rounding, initial)
        trained = weight.float() if remainder is None else join_master(weight, remainder)
        file = weight
        if remainder is not None:
            file = export_bf16(weight, remainder, seed=4242, key=1, offset=0, step=STEPS)
        kept, whole = update_sums(initial, master, None, file)
        found = {
            "mean_move_over_wanted": ((trained.double() - initial.double()).mean() / wanted).item(),
            "equals_float32_master": torch.equal(trained, master),
            "moved_share": (trained != initial.float()).double().mean().item(),
            "update_kept_in_file": (kept / whole).item(),
        }
        figures["roundings"][rounding] = found
        cells = [f"{found['mean_move_over_wanted']:.4f}", str(found["equals_float32_master"])]
        cells += [f"{found['moved_share']:.2%}", f"{found['update_kept_in_file']:.2%}"]
        rows.append([rounding, *cells])
    kept, whole = update_sums(initial, master, None, master.bfloat16())
    figures["nearest_export_of_exact_master"] = (kept / whole).item()
    show(["rounding", "mean move", "float32 master", "weights moved", "update in file"], rows)
    print(f"the exact master exported by rounding to nearest: {(kept / whole).item():.2%} in file")
    finish(figures, args.json)


if __name__ == "__main__":
    main()
