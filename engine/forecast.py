"""What a dry run says of a step on a machine: memory, host and disk, bytes sent, and a floor of its time.

The floor is what no implementation can go below on the figures of `devices.py`: the operations that are executed, what
runs again included, at the data sheet's rate; bytes between ranks at the rates that users report; both at the same
time. Then the optimiser, which begins when both have ended and is bound by memory. A real step takes longer. Where the
data is not here, attention is counted without its scores, which depend on the documents' lengths.
"""

from dataclasses import dataclass

from hymoe.engine import budget
from hymoe.engine.devices import Device
from hymoe.engine.parallel_bytes import bytes_per_step
from hymoe.engine.resolve import Resolved
from hymoe.model.cost import flops_per_token

GB = 1e9
ALL_TO_ALL = (
    "exchange",
    "reduce",
)  # purposes whose bytes go to all ranks at once; the others go round


@dataclass(frozen=True, kw_only=True, slots=True)
class Floor:
    """Seconds of a step that cannot be saved.

    Attributes:
        compute: the operations.
        link: bytes between ranks.
        update: the optimiser's reads and writes.
    """

    compute: float
    link: float
    update: float

    @property
    def seconds(self) -> float:
        """Arithmetic and communication overlapped, then the optimiser."""
        return max(self.compute, self.link) + self.update


def sent(job: budget.Job) -> dict[str, float]:
    """Bytes that a rank sends in a step, by purpose."""
    return bytes_per_step(
        job.config, world_size=job.world_size, expert_parallel=job.expert_parallel,
        exchange=job.exchange, micro_tokens=job.micro_tokens, micro_steps=job.micro_steps,
        dtype=job.dtype, keep=job.keep, passes=job.passes, replicas=job.replicas,
    )  # fmt: skip


def floor(job: budget.Job, device: Device, context: float | None) -> Floor:
    """The floor of a step's time.

    Args:
        job: what is trained.
        device: of each rank.
        context: mean number of keys that a query sees; None: unknown, scores are left out.
    """
    executed = flops_per_token(job.config, context or 0.0).executed(job.keep)
    rates = {
        purpose: device.all_to_all_rate if purpose in ALL_TO_ALL else device.ring_rate
        for purpose in sent(job)
    }
    state = budget.state_parts(job)
    # Weights, moments and remainder are read and written, gradients read.
    touched = 2 * sum(state[name] for name in ("weights", "moments", "exact remainder"))
    touched += state["weights"]
    return Floor(
        compute=executed * job.micro_tokens * job.micro_steps / device.flops,
        link=sum(size / rates[purpose] for purpose, size in sent(job).items()),
        update=touched / device.memory_rate,
    )


def forecast(resolved: Resolved, context: float | None) -> list[str]:
    """Lines for a person.

    Args:
        resolved: the recipe.
        context: see `floor`.
    """
    job, machine, needs = resolved.needs, resolved.machine, resolved.estimate
    lines = ["", f"memory of a rank, GiB (predicted, not measured; {machine.name})"]
    lines += [
        f"  {kind:<6} {name:<34} {size / budget.GIB:>9.2f}" for kind, name, size in needs.rows()
    ]
    lines.append(f"  {'':<6} {'margin, part of each phase':<34} {needs.margin / budget.GIB:>9.2f}")
    lines += [
        f"host    {machine.ranks} ranks x {budget.gib(needs.host)} GiB = "
        f"{machine.ranks * needs.host / GB:.0f} GB for saving while training goes on",
        f"disk    {resolved.recipe.run.keep_last} states x {needs.checkpoint / GB:.0f} GB, one more being written, "
        f"and the export's {needs.export / GB:.0f} GB: {_disk(resolved) / GB:.0f} GB",
        *_traffic(job, machine.device, context),
        f"verdict {resolved.verdict}",
    ]
    return lines


def _disk(resolved: Resolved) -> int:
    """Bytes of the run folder at its largest."""
    run, needs = resolved.recipe.run, resolved.estimate
    states = run.keep_last + 1 if run.save_every else 0
    return states * needs.checkpoint + (needs.export if run.export else 0)


def _traffic(job: budget.Job, device: Device | None, context: float | None) -> list[str]:
    sizes = sent(job)
    shown = ", ".join(f"{purpose} {size / GB:.2f}" for purpose, size in sizes.items() if size)
    total = sum(sizes.values())
    lines = [f"sent    {total / GB:.2f} GB by a rank in a step" + (f": {shown}" if shown else "")]
    flops = flops_per_token(job.config, context or 0.0)
    lines.append(
        f"flops   {flops.executed(job.keep) / 1e9:.2f} GFLOP a token executed, {flops.training / 1e9:.2f} useful"
        + ("" if context is not None else "; without attention's scores")
    )
    if device is None:
        return [*lines, "floor   nothing is known of this device's rates"]
    least = floor(job, device, context)
    tokens = job.micro_tokens * job.micro_steps
    lines.append(
        f"floor   {least.seconds:.2f} s a step, {tokens / least.seconds:,.0f} tokens/s a device: arithmetic "
        f"{least.compute:.2f} s, or link {least.link:.2f} s, then optimiser {least.update:.2f} s; a step takes longer"
    )
    return lines
