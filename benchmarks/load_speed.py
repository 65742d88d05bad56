"""How fast a checkpoint is loaded beside plain reading, and how long a save in the background stops the training.

**Loading.** `--ranks` processes load a BF16 checkpoint of `--gb` GB with many experts into their shards (expert
parallel, as the real job does). Two peers read the same bytes with as many processes, in turns with us: `cat` of the
same files to /dev/null, each process its share of the files, from a cold cache; and `preadv` of exactly the ranges
that the ranks read, into memory that nobody has touched, from a warm one. A time is from the first process that
begins to the last that ends; the CPU time of all of them, which neighbours on the machine change less, stands beside
it. Aims: 70 % of cat's speed, 80 % of preadv's. The cache is dropped with posix_fadvise; what is left of the files in
it is measured and said, because a file system may not care. Gate: rows of every parameter against the safetensors
package.

**Saving.** A run of scripts/train.py under torchrun that saves every few steps, in the background. What a save stops
is the longest step with a save under way less the median of the others. Aim: at most one step.
"""

import json
import mmap
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from harness import Timing, finish, parser, ratio, show, stamp
from load_memory import check, config_of

from hymoe.engine import hf_index, parallel
from hymoe.engine import recipe as recipes
from hymoe.engine.demo import write_demo
from hymoe.engine.hf_checkpoint import Checkpoint, load_weights, save_pretrained
from hymoe.model.config import HybridConfig
from hymoe.model.net import HybridLM

REPO = Path(__file__).resolve().parent.parent
AIMS = {"cold": 0.7, "warm": 0.8}
FILES_PER_RANK = 4  # so that cat's processes have shares of one size
PROBE_BYTES = 1 << 20  # between the places where the cache is looked at
SAVE_EVERY, SAVE_STEPS = 6, 30
Work = Callable[[int], Callable[[], None]]  # a rank -> what is timed, all else done


def make_checkpoint(folder: Path, config: HybridConfig, files: int) -> int:
    """Random weights in BF16, in so many files of one size; returns their bytes."""
    lm = HybridLM(config, kernels="torch", dtype=torch.bfloat16, device="meta")
    rng = torch.Generator().manual_seed(0)

    def value(name: str, parameter: torch.Tensor) -> torch.Tensor:
        del name
        made = torch.empty(parameter.shape, dtype=parameter.dtype)
        return made.uniform_(-0.02, 0.02, generator=rng)

    total = sum(parameter.numel() * 2 for parameter in lm.parameters())
    return save_pretrained(
        lm, folder, max_shard_size=total // files + (1 << 22), value=value
    ).total_size


def race(work: Work, ranks: int) -> tuple[float, float]:
    """Runs all ranks at once, each a process with memory of its own.

    Returns:
        Seconds from the first that begins to the last that ends; CPU seconds of all.
    """
    context = multiprocessing.get_context("fork")
    barrier, times = context.Barrier(ranks), context.Array("d", 3 * ranks)

    def run(rank: int) -> None:
        timed = work(rank)
        barrier.wait(timeout=300)
        used, times[3 * rank] = cpu_seconds(), perf_counter()
        timed()
        times[3 * rank + 1], times[3 * rank + 2] = perf_counter(), cpu_seconds() - used
        barrier.wait(timeout=300)
        os._exit(0)  # nothing of the parent's is to be cleaned up here

    processes = [context.Process(target=run, args=(rank,)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError(f"a rank failed: exit codes {[p.exitcode for p in processes]}")
    return max(times[1::3]) - min(times[::3]), sum(times[2::3])


def cpu_seconds() -> float:
    """Of this process and the ended ones that it started: what a busy machine does not change much."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


class Loading:
    """What is timed, for one checkpoint folder."""

    def __init__(self, base: Path, notes: Path, ranks: int) -> None:
        """Reads nothing yet.

        Args:
            base: the checkpoint.
            notes: where the ranks meet, and note what they read.
            ranks: processes.
        """
        self.base, self.notes, self.ranks = base, notes, ranks
        self.files = sorted(base.glob("*.safetensors"))
        self._meetings = 0

    def _model(self, rank: int) -> HybridLM:
        """This rank's part of the model, in memory that nobody has touched."""
        meeting = f"file://{self.notes}/meeting_{self._meetings}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=self.ranks)
        plan = parallel.start(torch.device("cpu"), self.ranks, self.ranks)
        config = HybridConfig.from_pretrained(self.base)
        return plan.shard(HybridLM(config, kernels="torch", dtype=torch.bfloat16, device="meta"))

    def ours(self) -> tuple[float, float]:
        """`load_weights`, with the check of the whole folder before it."""
        self._meetings += 1

        def work(rank: int) -> Callable[[], None]:
            lm = self._model(rank)
            return lambda: load_weights(lm, Checkpoint.open(self.base))

        return race(work, self.ranks)

    def cat(self) -> tuple[float, float]:
        """As many processes of cat, each with its share of the files."""

        def work(rank: int) -> Callable[[], None]:
            command = ["cat", *map(str, self.files[rank :: self.ranks])]
            return lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=True) and None

        return race(work, self.ranks)

    def preadv(self) -> tuple[float, float]:
        """The same ranges into one piece of fresh memory a process."""

        def work(rank: int) -> Callable[[], None]:
            ranges = json.loads((self.notes / f"ranges_{rank}.json").read_text())
            opened = {file: os.open(file, os.O_RDONLY) for file, _, _ in ranges}
            size = sum(size for _, _, size in ranges)
            memory = memoryview(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

            def read() -> None:
                at = 0
                for file, offset, size in ranges:
                    end = at + size
                    while at < end:
                        count = os.preadv(opened[file], [memory[at:end]], offset)
                        at, offset = at + count, offset + count

            return read

        return race(work, self.ranks)

    def gate(self) -> None:
        """Loads once, notes the ranges that were read, and compares rows with what the package reads."""
        self._meetings += 1

        def work(rank: int) -> Callable[[], None]:
            lm = self._model(rank)
            ranges: list[tuple[str, int, int]] = []
            pread = hf_index._pread

            def noted(fd: int, into: memoryview, offset: int, entry: Any) -> None:
                ranges.append((str(entry.file), offset, len(into)))
                pread(fd, into, offset, entry)

            hf_index._pread = noted

            def load() -> None:
                load_weights(lm, Checkpoint.open(self.base))
                (self.notes / f"ranges_{rank}.json").write_text(json.dumps(sorted(ranges)))
                check(self.base, lm)

            return load

        race(work, self.ranks)

    def drop_cache(self) -> float:
        """Asks the system to forget the files; returns the share of them that is in memory all the same."""
        for file in self.files:
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        return self.cached()

    def warm_cache(self) -> float:
        """Reads everything once; returns the share of the files that is in memory."""
        subprocess.run(["cat", *map(str, self.files)], stdout=subprocess.DEVNULL, check=True)
        return self.cached()

    def cached(self) -> float:
        """The share of the files that can be read without waiting, looked at every PROBE_BYTES."""
        found, buffer = [], bytearray(1)
        for file in self.files:
            fd = os.open(file, os.O_RDONLY)
            for offset in range(0, file.stat().st_size, PROBE_BYTES):
                try:
                    found.append(os.preadv(fd, [buffer], offset, os.RWF_NOWAIT))
                except BlockingIOError:
                    found.append(0)
            os.close(fd)
        return statistics.mean(found)


def measure_loading(folder: Path, gigabytes: float, ranks: int, rounds: int) -> dict[str, Any]:
    """Both peers, in turns with us."""
    base, notes = folder / "base", folder / "notes"
    notes.mkdir()
    size = make_checkpoint(base, config_of(gigabytes * 1e9), FILES_PER_RANK * ranks)
    loading = Loading(base, notes, ranks)
    loading.gate()
    kinds = {
        "cold": {"prepare": loading.drop_cache, "ours": loading.ours, "peer": loading.cat},
        "warm": {"prepare": loading.warm_cache, "ours": loading.ours, "peer": loading.preadv},
    }
    figures: dict[str, Any] = {"checkpoint_bytes": size, "ranks": ranks}
    for kind, does in kinds.items():
        times, cached = {"ours": Timing(), "peer": Timing()}, []
        cpu: dict[str, list[float]] = {"ours": [], "peer": []}
        for number in range(rounds):
            for name in ("ours", "peer") if number % 2 else ("peer", "ours"):
                cached.append(does["prepare"]())
                seconds, used = does[name]()
                times[name].rounds.append(seconds)
                cpu[name].append(used / size * 1e9)
        share = ratio(times["peer"], times["ours"])
        figures[kind] = {
            "peer": {"cold": "cat", "warm": "preadv"}[kind],
            "ours_gb_per_s": size / times["ours"].median / 1e9,
            "peer_gb_per_s": size / times["peer"].median / 1e9,
            "share": share["ratio"],
            "lowest": share["lowest"],
            "highest": share["highest"],
            "aim": AIMS[kind],
            "ours_cpu_seconds_per_gb": statistics.median(cpu["ours"]),
            "peer_cpu_seconds_per_gb": statistics.median(cpu["peer"]),
            "in_cache_before": max(cached) if kind == "cold" else min(cached),
            "seconds": {name: timing.rounds for name, timing in times.items()},
        }
    return figures


def measure_saving(folder: Path, ranks: int) -> dict[str, Any]:
    """A run of SAVE_STEPS steps that saves every SAVE_EVERY."""
    demo = folder / "demo"
    demo.mkdir()
    write_demo(demo, demo)
    recipe = recipes.load(demo / "recipe.toml")
    narrow = {"hidden_size": 256, "moe_intermediate_size": 256, "intermediate_size": 1024}
    narrow |= {"vocab_size": HybridConfig.from_pretrained(recipe.model.path).vocab_size}
    narrow |= {"moe_shared_expert_intermediate_size": 512, "mamba_num_heads": 8}
    narrow |= {"num_attention_heads": 4}
    base = folder / "narrow"
    bytes_ = make_checkpoint(base, HybridConfig.from_dict({**config_of(0).to_dict(), **narrow}), 1)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        source = Path(recipe.model.path) / name
        if source.is_file():
            (base / name).write_bytes(source.read_bytes())
    recipe = replace(
        recipe,
        model=replace(recipe.model, path=str(base), dtype="bfloat16"),
        train=replace(recipe.train, steps=SAVE_STEPS, step_tokens=256 * ranks * 2, eval_every=0),
        data=replace(recipe.data, micro_tokens=256, eval=None),
        run=replace(
            recipe.run, dir=str(folder / "run"), save_every=SAVE_EVERY, keep_last=1, export=""
        ),
    )
    (folder / "recipe.toml").write_text(recipe.to_toml(), encoding="utf-8")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    script = [str(REPO / "scripts" / "train.py"), str(folder / "recipe.toml")]
    subprocess.run([sys.executable, *command, *script], check=True, stdout=subprocess.DEVNULL)
    return {"weights_bytes": bytes_, **stops(folder / "run")}


def stops(run: Path) -> dict[str, Any]:
    """What the saves of a run cost its steps, by its own metrics and events."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = {line["step"]: line["step_seconds"] for line in map(json.loads, lines)}
    lines = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    saves = [line for line in map(json.loads, lines) if line["event"] == "save"]
    longest, plain, busy = 0.0, [], set()
    for save in saves:
        # From the end of its step until it is written: those steps have the save under way.
        step, left = int(save["state"].removeprefix("step_")), save["seconds"]
        while left > 0 and step + 1 in steps:
            step += 1
            busy.add(step)
            left -= steps[step]
    plain = [seconds for step, seconds in steps.items() if step not in busy and step > 1]
    longest, middle = max(steps[step] for step in busy), statistics.median(plain)
    return {
        "state_bytes": saves[0]["bytes"],
        "saves": len(saves),
        "save_seconds": statistics.median(save["seconds"] for save in saves),
        "save_waited_seconds": max(save["waited_seconds"] for save in saves),
        "step_seconds": middle,
        "longest_step_seconds_without_a_save": max(plain),
        "longest_step_seconds_with_a_save": longest,
        "steps_stopped": max(0.0, longest - middle) / middle,
        "aim": 1.0,
    }


def main() -> None:
    """Measures, prints both tables and the JSON line; exit status 1 where an aim is missed."""
    options = parser(__doc__.partition("\n")[0], rounds=5)
    options.add_argument("--gb", type=float, default=2.0, help="size of the checkpoint in GB")
    options.add_argument("--ranks", type=int, default=4, help="processes")
    options.add_argument(
        "--folder", type=Path, help="where the files go; the default for such files"
    )
    args = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        loading = measure_loading(Path(folder), args.gb, args.ranks, args.rounds)
        saving = measure_saving(Path(folder), args.ranks)
    rows = []
    for kind in AIMS:
        one = loading[kind]
        row = [f"{kind} cache", f"{one['ours_gb_per_s']:.2f}", f"{one['peer_gb_per_s']:.2f}"]
        row += [one["peer"], f"{one['share']:.0%}", f"{one['lowest']:.0%}-{one['highest']:.0%}"]
        row += [f"{one['aim']:.0%}", f"{one['in_cache_before']:.0%}"]
        rows.append(row + [f"{one[f'{who}_cpu_seconds_per_gb']:.2f}" for who in ("ours", "peer")])
    headers = ["load", "GB/s", "peer GB/s", "peer", "share", "rounds", "aim", "in cache before"]
    show([*headers, "CPU s/GB", "peer"], rows)
    if loading["cold"]["in_cache_before"] > 0.05:
        print("the cache could not be dropped here: the cold figures are warm ones")
    show(["save", "value"], [[key, f"{value:,.3f}"] for key, value in saving.items()])
    finish(
        {"benchmark": "load_speed", "stamp": stamp(), "loading": loading, "saving": saving},
        args.json,
    )
    missed = any(loading[kind]["share"] < aim for kind, aim in AIMS.items())
    sys.exit(int(missed or saving["steps_stopped"] > saving["aim"]))


if __name__ == "__main__":
    main()
