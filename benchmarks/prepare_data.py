"""From JSONL to packed rows: tokens a second and peak memory, hymoe beside TRL's own path over the same file.

    python benchmarks/prepare_data.py --chat MESSAGES.jsonl --tokenizer tokenizer.json [--megabytes 100] [--processes 2]

The input is the given conversations again and again, each time with another first sentence, up to so many megabytes.
Both sides render ChatML with the mask of the answers, tokenise, and pack rows of 8,192 tokens without cutting a
document that fits. TRL's path is `SFTTrainer`'s (assistant_only_loss, packing, dataset_num_proc = processes), made
with a model of a few hundred weights. Every run is a process tree of its own; its peak is the sum of the anonymous
memory of all its processes, sampled.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SEQ_LEN = 8192
TRL_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
)


def grow(chat: Path, megabytes: float, out: Path) -> None:
    """Writes the conversations again and again, none equal to another, until the file is large enough."""
    rows = [json.loads(line) for line in chat.read_text(encoding="utf-8").splitlines()]
    room, number = int(megabytes * 1e6), 0
    with out.open("w", encoding="utf-8") as file:
        while room > 0:
            messages = [dict(m) for m in rows[number % len(rows)]["messages"]]
            messages[0]["content"] = f"Number {number}. {messages[0]['content']}"
            line = json.dumps({"messages": messages}, ensure_ascii=False) + "\n"
            file.write(line)
            room -= len(line.encode())
            number += 1


def run_hymoe(source: Path, tokenizer: Path, processes: int, folder: Path) -> dict[str, Any]:
    """Prepares the file as a mixture of one source."""
    from hymoe.engine.data.mixture import Mixture, Source
    from hymoe.engine.data.pipeline import prepare

    mixture = Mixture(
        folder=source.parent,
        sources=(Source(name="chat", path=source.name),),
        seq_len=SEQ_LEN,
        tokenizer=str(tokenizer),
        chat_template="chatml",
        too_long="cut",
    )
    started = time.perf_counter()
    manifest = prepare(mixture, None, folder / "packed", processes, lambda line: None)
    return {
        "seconds": time.perf_counter() - started,
        "tokens": manifest["tokens"],
        "trained": manifest["supervised_tokens"],
        "rows": manifest["rows"],
        "full": manifest["packing_efficiency"],
    }


def run_trl(source: Path, tokenizer: Path, processes: int, folder: Path) -> dict[str, Any]:
    """Lets `SFTTrainer` prepare the file."""
    import datasets
    import transformers
    import trl

    peer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer), eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    peer.chat_template = TRL_TEMPLATE
    config = transformers.LlamaConfig(
        vocab_size=len(peer), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1,
    )  # fmt: skip
    settings = trl.SFTConfig(
        output_dir=str(folder / "trl"), max_length=SEQ_LEN, packing=True, assistant_only_loss=True,
        dataset_num_proc=processes, report_to=[], use_cpu=True, bf16=False,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    started = time.perf_counter()
    data = datasets.load_dataset(
        "json", data_files=str(source), split="train", cache_dir=str(folder / "cache")
    )
    trainer = trl.SFTTrainer(model=model, args=settings, train_dataset=data, processing_class=peer)
    seconds = time.perf_counter() - started
    packed = trainer.train_dataset
    tokens = sum(len(row) for row in packed["input_ids"])
    trained = sum(label != -100 for row in packed["labels"] for label in row)
    full = tokens / (len(packed) * SEQ_LEN)
    return {
        "seconds": seconds,
        "tokens": tokens,
        "trained": trained,
        "rows": len(packed),
        "full": full,
    }


RUNS = {"hymoe": run_hymoe, "trl": run_trl}


def measure(name: str, source: Path, tokenizer: Path, processes: int) -> dict[str, Any]:
    """One run in a process tree of its own, with its peak memory."""
    folder = Path(tempfile.mkdtemp(prefix="hymoe-prepare-"))
    try:
        command = [sys.executable, __file__, "--run", name, "--source", source, "--folder", folder]
        command += ["--tokenizer", tokenizer, "--processes", processes]
        process = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)
        peak = [0]
        watcher = threading.Thread(target=_watch, args=(process, peak))
        watcher.start()
        out, _ = process.communicate()
        watcher.join()
        if process.returncode:
            sys.exit(f"{name} failed with status {process.returncode}")
        return {**json.loads(out.splitlines()[-1]), "peak_bytes": peak[0]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _watch(process: subprocess.Popen[str], peak: list[int]) -> None:
    parent = psutil.Process(process.pid)
    while process.poll() is None:
        try:
            tree = [parent, *parent.children(recursive=True)]
            peak[0] = max(peak[0], sum(map(_anonymous_bytes, tree)))
        except psutil.NoSuchProcess:
            continue  # one ended between being listed and being read
        time.sleep(0.1)


def _anonymous_bytes(process: psutil.Process) -> int:
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return 0  # it ended
    line = next((x for x in status.splitlines() if x.startswith("RssAnon")), "RssAnon: 0 kB")
    return int(line.split()[1]) * 1024


def main() -> None:
    """Prints the table."""
    from benchmarks import (
        harness,
    )  # imports torch, which worker processes that import this file can do without

    options = harness.parser(__doc__, rounds=3)
    options.formatter_class = argparse.RawDescriptionHelpFormatter
    options.add_argument("--chat", type=Path, help="JSONL with messages")
    options.add_argument("--tokenizer", type=Path, required=True)
    options.add_argument("--megabytes", type=float, default=100)
    options.add_argument("--processes", type=int, default=2)
    options.add_argument("--only", choices=RUNS, help="leave the other side out")
    options.add_argument("--run", choices=RUNS, help=argparse.SUPPRESS)
    options.add_argument("--source", type=Path, help=argparse.SUPPRESS)
    options.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.run:
        run = RUNS[arguments.run]
        print(
            json.dumps(
                run(arguments.source, arguments.tokenizer, arguments.processes, arguments.folder)
            )
        )
        return
    if arguments.chat is None:
        options.error("--chat is missing")
    names = [arguments.only] if arguments.only else list(RUNS)
    with tempfile.TemporaryDirectory(prefix="hymoe-prepare-") as folder:
        source = Path(folder) / "chat.jsonl"
        grow(arguments.chat, arguments.megabytes, source)
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        for number in range(arguments.rounds):
            for name in names if number % 2 else names[::-1]:
                found[name].append(
                    measure(name, source, arguments.tokenizer.resolve(), arguments.processes)
                )
        size = source.stat().st_size
    rows, figures = [], {**harness.stamp(), "bytes": size, "processes": arguments.processes}
    for name, runs in found.items():
        middle = sorted(runs, key=lambda run: run["seconds"])[len(runs) // 2]
        figures[name] = {**middle, "all_seconds": [round(run["seconds"], 2) for run in runs]}
        rows.append(
            [
                name,
                f"{middle['seconds']:.1f}",
                f"{middle['tokens'] / middle['seconds']:,.0f}",
                f"{max(run['peak_bytes'] for run in runs) / 2**20:,.0f}",
                f"{middle['tokens']:,}",
                f"{middle['trained']:,}",
                f"{middle['full']:.2%}",
            ]
        )
    harness.show(["path", "seconds", "tokens/s", "peak MiB", "tokens", "trained", "full"], rows)
    if len(names) == 2:
        figures["ratio"] = figures["trl"]["seconds"] / figures["hymoe"]["seconds"]
        print(
            f"hymoe is {figures['ratio']:.2f} times as fast with {arguments.processes} processes each"
        )
    harness.finish(figures, arguments.json)


if __name__ == "__main__":
    main()
