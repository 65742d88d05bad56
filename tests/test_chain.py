"""The whole chain on the embedded default, by the commands that a user types.

synthesize -> filter -> prepare -> train -> generate -> check -> sweep -> bundle -> answer in transformers. What each
command promises in its own tests is not tested again; here the files of one are what the next one reads, and training
on the verified answers teaches what the base cannot do.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.runs import metrics

REPO = Path(__file__).resolve().parent.parent
DATA = """
python scripts/make_demo.py --out runs/chain/demo
python scripts/synthesize.py prompts --count 6000 --constraints 1 --kinds list:bulleted,json:list,case:upper_list \
    --words runs/chain/words.txt --wordings runs/chain/wordings.toml --out runs/chain/prompts.jsonl \
    --solved runs/chain/solved.jsonl
head -n 100 runs/chain/prompts.jsonl > runs/chain/some.jsonl
python scripts/generate.py --model runs/chain/demo/base --prompts runs/chain/some.jsonl --max-new-tokens 16 \
    --out runs/chain/base_answers.jsonl
python scripts/synthesize.py filter --prompts runs/chain/prompts.jsonl --out runs/chain/data.jsonl --held-out 0.02 \
    --answers runs/chain/base_answers.jsonl runs/chain/solved.jsonl --rejected runs/chain/rejected.jsonl
python scripts/prepare_data.py runs/chain/mixture.toml --base runs/chain/demo/base --out runs/chain/packed
"""
TRAIN = """
torchrun --standalone --nproc_per_node 2 scripts/train.py runs/chain/job.toml
"""
MEASURE = """
python scripts/generate.py --model runs/chain/run/final --prompts runs/chain/data.heldout_prompts.jsonl \
    --system-prompt runs/chain/system_prompt.txt --max-new-tokens 32 --out runs/chain/answers.jsonl
python scripts/evaluate.py instructions --prompts runs/chain/data.heldout_prompts.jsonl \
    --answers runs/chain/answers.jsonl --json runs/chain/verdicts.json
"""
SWEEP = """
python scripts/evaluate.py sweep runs/chain/sweep.toml
"""
BUNDLE = """
python scripts/convert_to_hf.py runs/chain/run --bundle runs/chain/bundle.toml --out runs/chain/served
"""
ANSWER = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, question = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
messages = [
    {"role": "system", "content": open(f"{folder}/system_prompt.txt").read().strip()},
    {"role": "user", "content": question},
]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
made = model.generate(**inputs)[0, inputs["input_ids"].shape[1] :]
print(tokenizer.decode(made, skip_special_tokens=True))
"""


class Chain:
    """A folder in which the README's commands work: scripts, and runs/chain with its recipes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.work = folder, folder / "runs" / "chain"
        (folder / "scripts").symlink_to(REPO / "scripts")
        (folder / "runs").mkdir()
        self.work.mkdir()
        for path in (REPO / "scripts" / "recipes" / "chain").iterdir():
            (self.work / path.name).write_bytes(path.read_bytes())

    def run(self, commands: str, *arguments: str) -> str:
        """What they print, in bash, with this Python's programs first."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            ["bash", "-euc", commands, "bash", *arguments],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=env,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, f"{commands}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.work / name).read_text().splitlines()]

    def json(self, name: str) -> Any:
        return json.loads((self.work / name).read_text())


@pytest.mark.slow
def test_from_prompts_to_an_answer_in_transformers(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    chain.run(DATA)
    data, held = chain.rows("data.jsonl"), chain.rows("data.heldout_prompts.jsonl")
    assert len(data) > 5000
    assert 60 < len(held) < 200
    asked = {row["prompt"] for row in held}
    assert not asked & {row["messages"][0]["content"] for row in data}
    assert len(chain.rows("rejected.jsonl")) == 100  # the untrained base is right nowhere
    assert chain.json("packed/manifest.json")["documents"] == len(data)

    chain.run(TRAIN)
    losses = [row["loss"] for row in metrics(chain.work / "run")]
    assert losses[-1] < losses[0] / 4
    chain.run(MEASURE)
    printed = chain.run(SWEEP)
    assert "None of its" in printed  # the split was compared with the training file
    results = chain.json("sweep/results.json")
    rates = {row["setting"]: row["value"] for row in results["splits"]["rules"]["settings"]}
    assert set(rates) == {f"{c}/serving/{p}" for c in ("base", "trained") for p in ("1", "1.2")}
    after = chain.json("verdicts.json")["prompts"]["strict_rate"]
    assert rates["trained/serving/1"] == pytest.approx(after)
    assert after > rates["base/serving/1"] + 0.3
    assert results["chosen"].startswith("trained/")
    assert (chain.work / "sweep" / "plot.png").read_bytes().startswith(b"\x89PNG")

    chain.run(BUNDLE)
    assert len(list((chain.work / "served").glob("*.safetensors"))) == 2
    ours = chain.rows("answers.jsonl")[0]
    question = next(row["prompt"] for row in held if row["key"] == ours["id"])
    (tmp_path / "answer.py").write_text(ANSWER)
    theirs = chain.run('python answer.py runs/chain/served "$1"', question)
    assert theirs.removesuffix("\n") == ours["response"]
