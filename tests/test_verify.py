"""What --verify must see: one bit, one tensor too many or too few, an index that errs, logits that differ."""

import json
import math
import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hymoe.engine import convert as conversion
from hymoe.engine import verify as verification
from hymoe.engine.convert import convert
from hymoe.engine.hf_checkpoint import Checkpoint, read_config
from hymoe.engine.verify import verify
from tests.hf_folder import INDEX, add_shard, refused, save_reference, save_sharded
from tests.runs import REPO

F32 = torch.float32


def say(line: str) -> None:
    """For tests that do not look at what is said."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BF16 checkpoint with mtp tensors and what real folders have beside weights (NVIDIA-NeMo/Automodel#794)."""
    folder = save_sharded(tmp_path_factory.mktemp("verify") / "source")
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "configuration_nemotron_h.NemotronHConfig",
        "AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM",
    }
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("configuration_nemotron_h.py", "modeling_nemotron_h.py"):
        (folder / name).write_text("raise RuntimeError('code of the folder was run')")
    generation = {"do_sample": False, "temperature": 0.6, "top_p": 0.95}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture(scope="module")
def written(source: Path) -> Path:
    convert(source, source.parent / "written", shards=3, say=say)
    return source.parent / "written"


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    """Of `written`, for a test to damage."""
    return Path(shutil.copytree(written, tmp_path / "copy"))


@pytest.fixture
def no_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward pass takes ten seconds, mostly of imports."""
    monkeypatch.setattr(verification, "available_bytes", lambda: 0)


def flip_bit(folder: Path, name: str, seed: int) -> None:
    """One random bit of a tensor."""
    entry = Checkpoint.open(folder).entries[name]
    rng = torch.Generator().manual_seed(seed)
    at = entry.start + int(torch.randint(entry.nbytes, (), generator=rng))
    bit = 1 << int(torch.randint(8, (), generator=rng))
    with entry.file.open("r+b") as file:
        file.seek(at)
        old = file.read(1)[0]
        file.seek(at)
        file.write(bytes([old ^ bit]))


@pytest.mark.parametrize("seed", range(8))
def test_one_flipped_bit_is_found_and_the_tensor_named(
    source: Path, copy: Path, no_logits: None, seed: int
) -> None:
    names = sorted(Checkpoint.open(copy).entries)
    mtp = [name for name in names if name.startswith("mtp.")]
    chosen = mtp if seed % 4 == 0 else names  # those take another path
    name = chosen[
        int(torch.randint(len(chosen), (), generator=torch.Generator().manual_seed(seed)))
    ]
    verify(source, copy, say=say)
    flip_bit(copy, name, seed)
    refused(lambda: verify(source, copy, say=say), f"{name} differs", "in 1 bytes", str(copy))


def test_several_damaged_tensors_are_counted(source: Path, copy: Path, no_logits: None) -> None:
    names = ["backbone.embeddings.weight", "backbone.layers.1.mixer.experts.4.down_proj.weight"]
    for seed, name in enumerate(names):
        flip_bit(copy, name, seed)
    refused(lambda: verify(source, copy, say=say), names[0], "and 1 more tensors differ")


def change_index(folder: Path, change: Any) -> None:
    content = json.loads((folder / INDEX).read_text())
    change(content)
    (folder / INDEX).write_text(json.dumps(content))


def test_names_files_and_index_must_be_exact(source: Path, copy: Path, no_logits: None) -> None:
    def found(*words: str) -> None:
        refused(lambda: verify(source, copy, say=say), *words)

    change_index(copy, lambda c: c["metadata"].update(total_size=12))
    found("total_size = 12")
    shutil.copy(source.parent / "written" / INDEX, copy / INDEX)
    verify(source, copy, say=say)

    extra = torch.zeros(2)
    save_file({"stray": extra}, copy / "stray.safetensors", {"format": "pt"})
    found("stray is unexpected")
    save_file({"lm_head.weight": extra}, copy / "stray.safetensors", {"format": "pt"})
    found("lm_head.weight is in")
    (copy / "stray.safetensors").unlink()

    name = "backbone.norm_f.weight"
    file = Checkpoint.open(copy).entries[name].file
    tensors = load_file(file)
    save_file(tensors, file, {"format": "np"})
    found("metadata", "np")
    save_file(tensors | {name: tensors[name].float()}, file, {"format": "pt"})
    found(f"{name} is F32 [32]", "expected BF16")
    save_file(tensors | {name: tensors[name][:-1].clone()}, file, {"format": "pt"})
    found(name, "[31]")
    del tensors[name]
    save_file(tensors, file, {"format": "pt"})
    found(name)
    os.truncate(file, file.stat().st_size - 1)
    found(str(file), "truncated")


def test_a_tensor_that_config_does_not_ask_for_is_found(
    source: Path, copy: Path, no_logits: None
) -> None:
    """mtp tensors may come along, but only those that the base has."""
    add_shard(copy, {"mtp.layers.9.more.weight": torch.zeros(3)})
    refused(lambda: verify(source, copy, say=say), "mtp.layers.9.more.weight is unexpected")
    refused(lambda: verify(copy, source, say=say), "mtp.layers.9.more.weight is missing")


def test_a_forward_pass_that_is_left_out_is_said(
    source: Path, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(verification, "available_bytes", lambda: 1 << 30)
    verify(source, written, say=said.append)
    tensors = len(Checkpoint.open(written).entries)
    assert said[0] == f"verified {written}: {tensors} tensors read back, each equal to {source}"
    assert said[1].startswith(
        "forward pass not compared: it needs 2.1 GB of memory in BF16, 1.1 GB"
    )
    monkeypatch.setattr(verification.importlib.util, "find_spec", lambda name: None)
    verify(source, written, say=said.append)
    assert "transformers is not installed" in said[3]


def test_what_transformers_does_not_read_is_a_fault(tmp_path: Path) -> None:
    """It ignores attention_bias: logits would be those of another model."""
    folder = save_reference(tmp_path / "base", layers_block_type=["full_attention", "mlp"])
    assert verification._theirs_logits(str(folder), [1, 2, 3], F32).shape == (3, 97)
    add_shard(folder, {"backbone.layers.0.mixer.q_proj.bias": torch.zeros(64)})
    refused(
        lambda: verification._theirs_logits(str(folder), [1, 2], F32),
        "unexpected_keys",
        "q_proj.bias",
    )
    (folder / "config.json").write_text('{"model_type": "nemotron_h", "vocab_size": "many"}')
    refused(
        lambda: verification._theirs_logits(str(folder), [1], F32), "transformers cannot load it"
    )


def run_script(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> int:
    monkeypatch.setattr(sys, "argv", ["convert_to_hf.py", *map(str, arguments)])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit) as left:
        runpy.run_path(str(REPO / "scripts" / "convert_to_hf.py"), run_name="__main__")
    return left.value.code


@pytest.mark.slow
def test_the_command_verifies_and_prints_how_far_the_logits_are(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No code of the folder is run, whatever its auto_map says; generation settings do not stop it."""
    out = tmp_path / "out"
    assert run_script(monkeypatch, source, "--out", out, "--shards", 4, "--verify") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith(f"verified {out}: ")
    assert lines[-1].startswith("logits of transformers and ours differ by ")
    assert lines[-1].endswith("in float32 (bound 1.0e-04)")
    assert float(lines[-1].split(" by ")[1].split()[0]) < 1e-5


@pytest.mark.slow
def test_the_command_ends_with_2_where_a_tensor_differs(
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, original = "backbone.layers.0.mixer.in_proj.weight", conversion.convert

    def damaging(*args: Any, **kwargs: Any) -> Any:
        done = original(*args, **kwargs)
        flip_bit(tmp_path / "out", name, 1)
        return done

    monkeypatch.setattr(conversion, "convert", damaging)
    assert run_script(monkeypatch, source, "--out", tmp_path / "out", "--verify") == 2
    error = capsys.readouterr().err
    assert error.startswith("convert_to_hf.py: ")
    assert error.count("\n") == 1
    assert f"{name} differs" in error


@pytest.mark.parametrize("layers", [4, 26])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_in_the_dtype_of_the_files_keep_a_bound_that_noise_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: int, dtype: torch.dtype
) -> None:
    """As a model is compared that does not fit in float32; another model's logits are far beyond the bound."""
    run_here(monkeypatch)
    kinds = ["mamba", "moe"] * (layers // 2 - 1) + ["attention", "mlp"]
    word = str(dtype).removeprefix("torch.")
    folder, other = (
        save_reference(tmp_path / f"{seed}", dtype=word, seed=seed, layers_block_type=kinds)
        for seed in (0, 1)
    )
    config = read_config(folder)
    error, bound = verification.logits_error(folder, config, dtype)
    assert 1e-5 < error <= bound <= 0.5
    theirs = verification._theirs_logits
    monkeypatch.setattr(verification, "_theirs_logits", lambda _, *rest: theirs(str(other), *rest))
    error, bound = verification.logits_error(folder, config, dtype)
    assert error > 2 * bound


def run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the seconds that processes of their own take to import everything."""
    monkeypatch.setattr(
        verification, "_in_a_process", lambda run, *args: torch.from_numpy(run(*args))
    )


def test_float32_arithmetic_on_narrow_weights_is_that_of_wide_ones(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = verification._ours_logits(str(written), [5, 6, 7], F32)
    narrow = verification._exact_logits(str(written), [5, 6, 7], torch.bfloat16)
    assert torch.equal(torch.from_numpy(wide), torch.from_numpy(narrow))


def test_logits_beyond_the_bound_are_refused(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_config(written)
    for value in (1e-3, math.nan):
        monkeypatch.setattr(verification, "logits_error", lambda *_, v=value: (v, 1e-4))
        refused(lambda: verification._check_logits(written, config, say), f"{value:.2e} in float32")
