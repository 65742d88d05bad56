"""A saved state converted to an HF folder: the bytes of the run's own export, in little memory, whole or not at all."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hymoe.engine import checkpoint_files, log
from hymoe.engine import convert as conversion
from hymoe.engine.checkpoint import Group, Part, Saved, write
from hymoe.engine.checkpoint_files import read_manifest, states
from hymoe.engine.checkpoint_slices import SavedRows
from hymoe.engine.convert import convert
from hymoe.engine.hf_checkpoint import Checkpoint, load_pretrained
from tests.forked import Ranks, ranks
from tests.hf_folder import INDEX, add_mtp, contents, file_digests, refused, save_sharded
from tests.runs import REPO, make_data, save_by_transformers, write_recipe

MTP = {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["full_attention", "moe"]}
SIZE = "40KB"


def say(line: str) -> None:
    """For tests that do not look at what is said."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer, data, and a recipe of 3 steps that saves after each and exports to shards of SIZE."""
    root = tmp_path_factory.mktemp("convert")
    data = make_data(root)
    write_recipe(
        root / "recipe.toml",
        data={"path": data["train"], "seq_len": 64, "micro_tokens": 64},
        optim={"lr": 1e-3, "warmup_steps": 1},
        train={"steps": 3, "step_tokens": 256},
        run={"save_every": 1, "keep_last": 3, "max_shard_size": SIZE},
    )
    return root


@pytest.fixture(scope="module")
def launch(root: Path) -> Iterator[Ranks]:
    with ranks(root) as parent:
        yield parent


def make_base(root: Path, name: str, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    """A base of transformers' own making, with what else a checkpoint folder has."""
    base = root / name
    save_by_transformers(base, dtype, root / "tokenizer.json", **MTP, **changes)
    add_mtp(base, dtype=torch.float32 if name == "mixed" else dtype)
    (base / "chat_template.jinja").write_text("{{ messages }}")
    (base / "modeling_nemotron_h.py").write_text("class NemotronHForCausalLM: ...")
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool.jinja").write_text("{{ tools }}")
    return base


def rewrite_shards(base: Path, change: Any) -> None:
    """Gives the tensors of a folder other values or dtypes: change(name, tensor) -> tensor."""
    for file in base.glob("*.safetensors"):
        tensors = {name: change(name, t) for name, t in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})


def mix_dtypes(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Small tensors in float32 as trained ones often are, one expert wider than its neighbours, one matrix in F16."""
    if name.endswith(("A_log", "dt_bias", ".D", "norm.weight")) or "experts.3.up_proj" in name:
        return tensor.float()
    return tensor.half() if name.endswith("o_proj.weight") else tensor


def tie_head(base: Path, *, absent: bool) -> None:
    """Makes the head that transformers has written the embeddings, or takes it away."""
    embeddings = Checkpoint.open(base).read("backbone.embeddings.weight")
    rewrite_shards(base, lambda name, t: embeddings if name == "lm_head.weight" else t)
    if not absent:
        return
    index = json.loads((base / INDEX).read_text())
    file = base / index["weight_map"].pop("lm_head.weight")
    (base / INDEX).write_text(json.dumps(index))
    rest = {name: t for name, t in load_file(file).items() if name != "lm_head.weight"}
    save_file(rest, file, {"format": "pt"})


@pytest.fixture(scope="module")
def run(root: Path, launch: Ranks) -> Path:
    """Exact rounding from BF16, on 2 ranks."""
    make_base(root, "base")
    return trained(root, launch, "run", "base", 2)


def trained(root: Path, launch: Ranks, name: str, base: str, size: int, *flags: Any) -> Path:
    ran = launch(
        size,
        root / "recipe.toml",
        *("--model.path", root / base, "--run.dir", root / name, *flags),
    )
    assert ran.codes == [0] * size, ran.out
    return root / name


def assert_as_exported(run: Path, out: Path) -> None:
    assert file_digests(out) == file_digests(run / "final")


CASES = {
    "exact-ep2": ("base", 4, ("--parallel.expert-parallel", 2)),
    "exact-alone": ("base", 1, ()),
    "stochastic": ("base", 2, ("--optim.rounding", "stochastic")),
    "nearest": ("base", 1, ("--optim.rounding", "nearest")),
    "mixed": ("mixed", 2, ()),
    "float32": ("base", 1, ("--model.dtype", "float32")),
    "tied": ("tied", 2, ()),
    "tied-absent": ("tied-absent", 1, ()),
}


def test_a_run_converts_to_the_bytes_of_its_export(run: Path, tmp_path: Path) -> None:
    """Weights by keyed rounding, `mtp.*`, config, tokenizer, templates, modelling files."""
    said: list[str] = []
    done = convert(run, tmp_path / "out", max_shard_size=SIZE, say=said.append)
    assert_as_exported(run, tmp_path / "out")
    newest = states(run / "checkpoints")[0]
    assert (done.state, done.step, done.base) == (newest, 3, run.parent / "base")
    assert sorted(done.files) == sorted(f.name for f in (tmp_path / "out").glob("*.safetensors"))
    assert len(done.files) > 3
    assert said[0] == f"taking {newest}"
    assert f"{done.bytes / 1e9:.2f} GB in" in said[-1]
    assert said[-1].endswith("GB/s")
    assert {"modeling_nemotron_h.py", "tokenizer.json", "additional_chat_templates"} <= {
        path.name for path in (tmp_path / "out").iterdir()
    }
    before, after = contents(run.parent / "base"), contents(tmp_path / "out")
    assert {n for n in before if before[n] == after[n] and n.startswith("mtp.")} != set()
    assert all(before[n] == after[n] for n in before if n.startswith("mtp."))
    changed = [n for n in before if before[n] != after[n]]
    assert any("experts" in n for n in changed), "nothing was trained: this test sees nothing"
    nearest = Saved(newest).read("model.embeddings.weight")
    written = Checkpoint.open(tmp_path / "out").read("backbone.embeddings.weight")
    assert not torch.equal(nearest, written), "rounded to nearest: the masters are lost"


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_any_run_converts_to_the_bytes_of_its_export(
    root: Path, launch: Ranks, run: Path, tmp_path: Path, case: str
) -> None:
    """Any number of ranks and spread of experts, every rounding, every mixture of dtypes, a tied head written out."""
    base, size, flags = CASES[case]
    if base == "mixed":
        rewrite_shards(make_base(root, "mixed"), mix_dtypes)
    if base.startswith("tied"):
        tie_head(make_base(root, base, tie_word_embeddings=True), absent=base == "tied-absent")
    made = trained(root, launch, f"run_{case}", base, size, *flags)
    convert(made, tmp_path / "out", max_shard_size=SIZE, say=say)
    assert_as_exported(made, tmp_path / "out")
    before, after = contents(root / base), contents(tmp_path / "out")
    assert {n: t[:2] for n, t in before.items()} == {n: t[:2] for n, t in after.items()}


@pytest.mark.parametrize("size", [1, 1000, 5000])
def test_the_bytes_do_not_depend_on_the_pieces(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Rounding goes by the element's index in its tensor; one row at a time, and pieces that end unevenly."""
    monkeypatch.setattr(conversion, "PIECE_BYTES", size)
    convert(run, tmp_path / "out", max_shard_size=SIZE, say=say)
    assert_as_exported(run, tmp_path / "out")


@pytest.mark.parametrize("count", [1, 5, 16])
def test_exactly_as_many_shards_as_asked_for(run: Path, tmp_path: Path, count: int) -> None:
    done = convert(run, tmp_path / "out", shards=count, say=say)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [f.name for f in files] == sorted(done.files)
    assert len(files) == count
    assert contents(tmp_path / "out") == contents(run / "final")
    sizes = [f.stat().st_size for f in files]
    largest_tensor = max(e.nbytes for e in Checkpoint.open(tmp_path / "out").entries.values())
    assert max(sizes) < done.bytes / count + largest_tensor + 8000
    load_pretrained(tmp_path / "out")


def test_as_many_shards_as_tensors_and_no_more(run: Path, tmp_path: Path) -> None:
    tensors = len(contents(run / "final"))
    convert(run, tmp_path / "out", shards=tensors, say=say)
    assert contents(tmp_path / "out") == contents(run / "final")
    for count in (0, tensors + 1):
        refused(
            lambda c=count: convert(run, tmp_path / "no", shards=c, say=say), f"shards = {count}"
        )
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_hf_folder_is_dealt_to_other_shards(tmp_path: Path) -> None:
    base = save_sharded(tmp_path / "base")
    said: list[str] = []
    done = convert(base, tmp_path / "out", shards=2, say=said.append)
    assert (done.step, done.state, done.base) == (None, base, base)
    assert contents(tmp_path / "out") == contents(base)
    assert (tmp_path / "out" / "config.json").read_bytes() == (base / "config.json").read_bytes()
    convert(tmp_path / "out", tmp_path / "again", shards=1, say=say)
    assert contents(tmp_path / "again") == contents(base)


def test_rows_straight_from_the_files_are_those_of_torchs_reader(run: Path) -> None:
    state = states(run / "checkpoints")[0]
    whole, rows = Saved(state), SavedRows(state)
    rng = torch.Generator().manual_seed(0)
    assert rows.tensors == whole.tensors
    for name, (_, shape) in whole.tensors.items():
        expected = whole.read(name)
        assert torch.equal(rows.read(name), expected), name
        first = int(torch.randint(shape[0], (), generator=rng))
        count = int(torch.randint(1, shape[0] - first + 1, (), generator=rng))
        assert torch.equal(rows.read(name, first, count), expected[first : first + count]), name
    rows.close()


def test_rows_of_a_stack_that_was_spread_anew(tmp_path: Path) -> None:
    """The experts of one rank lie in several chunks then, each a view of the rank's memory."""
    stack, scalar = torch.randn(7, 5, 3), torch.tensor(3.0)
    order = (4, 0, 1, 6, 5, 2, 3)
    parts = {"w": Part(stack[list(order)], (7, 5, 3), 0, order), "s": Part(scalar, (), 0)}
    rows = SavedRows(write(tmp_path, 1, parts, {}, Group()))
    assert len(rows._chunks["w"]) == 5
    assert torch.equal(rows.read("s"), scalar)
    for first in range(7):
        for end in range(first + 1, 8):
            assert torch.equal(rows.read("w", first, end - first), stack[first:end])
    with pytest.raises(KeyError):
        rows.read("v")
    rows.close()


@pytest.mark.slow
def test_untouched_weights_keep_their_bits_through_every_stage(
    root: Path, launch: Ranks, run: Path, tmp_path: Path
) -> None:
    """transformers#45591: loaded weights initialised again; radixark/miles#975: A_log through BF16."""
    base = make_base(root, "untouched", rescale_prenorm_residual=True)
    values = {
        "A_log": torch.tensor([59.0, 61.0, 63.0, 64.0]).log(),
        "dt_bias": torch.tensor([0.1, 0.2, 0.3, 0.4]),
        "mixer.D": torch.randn(4),
        "conv1d.bias": torch.randn(
            112, dtype=torch.bfloat16
        ),  # a zero would take the smallest update
        "out_proj.weight": torch.full((32, 48), 0.05, dtype=torch.bfloat16),
    }

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return next((new for end, new in values.items() if name.endswith(end)), tensor)

    rewrite_shards(base, change)
    still = ("--optim.lr", 1e-30, "--optim.weight-decay", 0, "--train.steps", 1)
    made = trained(root, launch, "run_untouched", "untouched", 2, *still)
    convert(made, tmp_path / "out", max_shard_size=SIZE, say=say)
    assert contents(tmp_path / "out") == contents(base)
    assert_as_exported(made, tmp_path / "out")


def test_progress_is_said_with_bytes_a_second(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "PROGRESS_SECONDS", 0)
    said: list[str] = []
    convert(run, tmp_path / "out", say=said.append)
    for what in ("checked of step_00000003", "written"):
        lines = [line for line in said if line.startswith(f"{what}: ")]
        assert len(lines) > 1
        assert all(line.endswith(" GB/s") and " of 0.0 GB, " in line for line in lines), lines


# Bad input: one line, nothing left behind.


def damaged(run: Path, tmp_path: Path) -> Path:
    """A copy of a run that a test may damage."""
    return Path(shutil.copytree(run, tmp_path / "run"))


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 4]))


def test_the_newest_whole_state_is_taken_and_the_others_named(run: Path, tmp_path: Path) -> None:
    """NVIDIA-NeMo/Automodel#3261: leftovers of a kill, newest by text, damage."""
    copy = damaged(run, tmp_path)
    folder = copy / "checkpoints"
    names = ["step_00000009", "step_00000010", "step_100000000"]
    for old, new in zip(sorted(p.name for p in folder.iterdir()), names, strict=True):
        (folder / old).rename(folder / new)
    (folder / ".step_00000011.partial").mkdir()
    data = next((folder / "step_100000000").glob("*.distcp"))
    flip(data, data.stat().st_size // 2)
    said: list[str] = []
    done = convert(copy, tmp_path / "out", say=said.append)
    assert done.state == folder / "step_00000010"
    assert done.step == 2
    assert "skipped .step_00000011.partial: a save that was cut short" in said[0]
    assert said[1].startswith(f"skipped step_100000000: {data.name} has another checksum")
    assert said[2] == f"taking {folder / 'step_00000010'}"
    assert (folder / ".step_00000011.partial").is_dir(), "the run may be under way"

    for state in names[:2]:
        data = next((folder / state).glob("*.distcp"))
        os.truncate(data, data.stat().st_size - 1)
    message = refused(lambda: convert(copy, tmp_path / "no", say=say), "none of its 3 saved states")
    assert "bytes, expected" in message
    explicit = folder / "step_00000009"
    refused(lambda: convert(explicit, tmp_path / "no", say=say), str(explicit), "expected")
    (explicit / "manifest.json").unlink()
    refused(lambda: convert(explicit, tmp_path / "no", say=say), "no manifest.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def change_manifest(state: Path, **changes: Any) -> None:
    body = {**read_manifest(state), **changes}
    crc = checkpoint_files._crc_of(body)
    (state / "manifest.json").write_text(json.dumps({"crc32": crc, **body}))


def test_what_is_no_state_of_ours_is_refused(run: Path, tmp_path: Path) -> None:
    copy = damaged(run, tmp_path)
    newest = states(copy / "checkpoints")[0]
    out = tmp_path / "out"
    change_manifest(newest, format=2)
    refused(lambda: convert(newest, out, say=say), "format 2, expected 1")
    refused(lambda: convert(tmp_path / "absent", out, say=say), "absent: no such folder")
    (tmp_path / "empty").mkdir()
    refused(lambda: convert(tmp_path / "empty", out, say=say), "empty: no config.json and no saved")
    shutil.rmtree(copy / "checkpoints")
    refused(lambda: convert(copy, out, say=say), "run: no config.json and no saved state")
    assert not out.exists()


def test_the_base_may_have_moved_but_not_changed(run: Path, tmp_path: Path) -> None:
    state = states(damaged(run, tmp_path) / "checkpoints")[0]
    base = Path(shutil.copytree(run.parent / "base", tmp_path / "moved"))
    change_manifest(state, base=str(tmp_path / "gone"))
    out = tmp_path / "out"
    refused(
        lambda: convert(state, out, say=say), f"its base {tmp_path / 'gone'} is not there", "--base"
    )
    convert(state, out, base=base, max_shard_size=SIZE, say=say)
    assert_as_exported(run, out)

    config = (base / "config.json").read_text()
    (base / "config.json").write_text(
        config.replace('"norm_topk_prob": true', '"norm_topk_prob": false')
    )
    assert (base / "config.json").read_text() != config
    refused(lambda: convert(state, tmp_path / "no", base=base, say=say), str(base), "config.json")
    (base / "config.json").write_text(config)
    with (base / "tokenizer.json").open("a") as file:
        file.write("\n")
    refused(lambda: convert(state, tmp_path / "no", base=base, say=say), str(base), "tokenizer")
    refused(lambda: convert(run / "final", tmp_path / "no", base=base, say=say), "HF folder")
    assert not (tmp_path / "no").exists()


def test_a_state_of_another_model_is_refused_by_the_tensors_name(run: Path, tmp_path: Path) -> None:
    """With the base's hashes right: what is compared are the tensors themselves."""
    state = states(run / "checkpoints")[0]
    saved, content = Saved(state), read_manifest(state)
    del content["files"]
    parts = {name: Part(saved.read(name), shape, 0) for name, (_, shape) in saved.tensors.items()}
    name = "model.layers.1.mixer.experts.up_proj"
    short = Part(parts[name].tensor[:-1], (7, *parts[name].shape[1:]), 0)
    changes = {
        "has shape [7,": parts | {name: short},
        "has no": {n: p for n, p in parts.items() if n != name},
        "is not in the model": parts | {f"{name}_2": parts[name]},
    }
    for step, (word, changed) in enumerate(changes.items(), 1):
        other = write(tmp_path / "states", step, changed, content, Group())
        refused(lambda s=other: convert(s, tmp_path / "out", say=say), str(other), name, word)
    assert not (tmp_path / "out").exists()


def test_a_full_folder_and_a_small_disk_are_refused_before_writing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    refused(lambda: convert(run, out, say=say), "not empty, it holds mine.txt")
    assert (out / "mine.txt").read_text() == "keep"
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    refused(lambda: convert(run, tmp_path / "new", say=say), "0.00 GB are free")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = os.pwrite, []

    def pwrite(*args: Any) -> int:
        calls.append(1)
        if len(calls) > 20:
            assert (tmp_path / ".out.partial").is_dir()
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(*args)

    monkeypatch.setattr(os, "pwrite", pwrite)
    refused(lambda: convert(run, tmp_path / "out", say=say), "No space left on device")
    assert not list(tmp_path.iterdir())


def test_a_state_removed_while_it_is_read_is_read_to_its_end(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on prunes its old states."""
    copy = damaged(run, tmp_path)
    state = states(copy / "checkpoints")[0]
    original = conversion.plan_export

    def plan_export(*args: Any, **kwargs: Any) -> Any:
        checkpoint_files.remove(state)
        return original(*args, **kwargs)

    monkeypatch.setattr(conversion, "plan_export", plan_export)
    convert(state, tmp_path / "out", max_shard_size=SIZE, say=say)
    assert_as_exported(run, tmp_path / "out")


def command(*arguments: Any) -> subprocess.CompletedProcess[str]:
    script = [sys.executable, str(REPO / "scripts" / "convert_to_hf.py"), *map(str, arguments)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(script, capture_output=True, text=True, env=env, timeout=300, check=False)


def test_the_command_converts_and_refuses(run: Path, tmp_path: Path) -> None:
    done = command(run, "--out", tmp_path / "out", "--max-shard-size", SIZE)
    assert done.returncode == 0, done.stderr
    assert_as_exported(run, tmp_path / "out")
    assert f"taking {states(run / 'checkpoints')[0]}" in done.stdout
    again = command(run, "--out", tmp_path / "out")
    assert (again.returncode, again.stdout) == (2, done.stdout.splitlines()[0] + "\n")
    assert again.stderr.startswith("convert_to_hf.py: ")
    assert again.stderr.count("\n") == 1
    assert "not empty" in again.stderr
    assert_as_exported(run, tmp_path / "out")
