"""What an export writes beside and instead of the weights, and when it refuses: whole, or not at all."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hymoe.engine import hf_export, hf_header, hf_plan
from hymoe.engine.hf_checkpoint import (
    Checkpoint,
    export_dtypes,
    load_pretrained,
    plan_export,
    save_pretrained,
)
from hymoe.engine.hf_rows import named_tensors
from hymoe.model.net import HybridLM
from tests.hf_folder import (
    add_shard,
    contents,
    file_digests,
    refused,
    rewrite,
    save_reference,
    save_sharded,
)
from tests.tiny import tiny_config, tiny_lm

ROUTER_BIAS = "backbone.layers.1.mixer.gate.e_score_correction_bias"
EXPERT = "backbone.layers.1.mixer.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A float32 checkpoint in one file, saved by transformers. Tests copy it before they change it."""
    return save_reference(tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A BF16 checkpoint in several shards with mtp tensors."""
    return save_sharded(tmp_path_factory.mktemp("sharded"))


@pytest.fixture
def folder(reference, tmp_path):
    """A copy of `reference` that a test may change."""
    return Path(shutil.copytree(reference, tmp_path / "base"))


def test_value_supplies_what_is_written(sharded, tmp_path):
    """The optimiser's own rounding: it gets every tensor once and answers in the file's dtype."""
    lm = load_pretrained(sharded, dtype=torch.float32)
    dtypes = export_dtypes(lm)
    assert dtypes.keys() == named_tensors(lm).keys()
    asked = []

    def value(name, parameter):
        asked.append(name)
        assert parameter is named_tensors(lm)[name]
        return (parameter.detach() + 1).to(dtypes[name]) if "experts" in name else None

    save_pretrained(lm, tmp_path / "out", value=value)
    assert sorted(asked) == sorted(dtypes)
    after, before = load_pretrained(tmp_path / "out"), load_pretrained(sharded)
    for name, tensor in named_tensors(after).items():
        old = named_tensors(before)[name].detach()
        new = (old.float() + 1).to(old.dtype) if "experts" in name else old
        assert torch.equal(tensor.detach(), new), name

    with pytest.raises(ValueError, match=r"embeddings.*torch\.float32; expected torch\.bfloat16"):
        save_pretrained(lm, tmp_path / "bad", value=lambda _, parameter: parameter)
    with pytest.raises(ValueError, match=r"embeddings.*\[96, 32\]; expected \[97, 32\]"):
        save_pretrained(lm, tmp_path / "bad", value=lambda _, p: p[:-1].bfloat16())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_model_without_memory_can_be_exported_by_value(tmp_path):
    """So a checkpoint larger than memory can be made; without values there is nothing to write."""
    lm = HybridLM(tiny_config(), kernels="torch", device="meta")
    save_pretrained(lm, tmp_path / "out", value=lambda _, p: torch.ones(p.shape))
    assert all(
        bool((t == 1).all()) for t in named_tensors(load_pretrained(tmp_path / "out")).values()
    )
    with pytest.raises(ValueError, match=r"embeddings\.weight is on the meta device"):
        save_pretrained(lm, tmp_path / "none")


def test_a_failed_export_leaves_nothing_and_a_dead_one_is_cleared(reference, tmp_path):
    lm = load_pretrained(reference)
    partial = tmp_path / ".out.partial"
    partial.mkdir()
    (partial / "model.safetensors").write_text("what a killed run left")

    def interrupted(name, parameter):
        if name == "norm_f.weight":
            assert (partial / "model.safetensors").stat().st_size > 1000
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        save_pretrained(lm, tmp_path / "out", value=interrupted)
    assert not list(tmp_path.iterdir())

    partial.mkdir()
    (partial / "model-00001-of-00009.safetensors").write_text("what a killed run left")
    (tmp_path / "out").mkdir()
    save_pretrained(lm, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert file_digests(tmp_path / "out").keys() == file_digests(reference).keys()


def test_bytes_that_were_not_written_are_noticed(reference, tmp_path, monkeypatch):
    """A hole in a shard would read as zeros: the sum of what the ranks wrote must be the whole."""
    lm = load_pretrained(reference)
    put = hf_export._Shards.put

    def forgetful(self, planned, begin, rows):
        put(self, planned, begin, rows[:-1] if "norm_f" in planned.name else rows)

    monkeypatch.setattr(hf_export._Shards, "put", forgetful)
    with pytest.raises(RuntimeError, match=r"model\.safetensors: \d+ bytes written of \d+"):
        save_pretrained(lm, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_everything_but_weights_is_carried_over(folder, tmp_path):
    """NVIDIA-NeMo/Automodel#794: modelling files, tokenizer, template, generation settings were lost."""
    auto_map = {
        "AutoConfig": "configuration_nemotron_h.NemotronHConfig",
        "AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM",
    }
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**config, "auto_map": auto_map, "own_key": [1]})
    )
    generation = {"do_sample": False, "temperature": 0.6, "top_p": 0.95}  # invalid to some tools
    files = {
        "configuration_nemotron_h.py": "class NemotronHConfig: ...",
        "modeling_nemotron_h.py": "class NemotronHForCausalLM: ...",
        "generation_config.json": json.dumps(generation),
        "tokenizer.json": "{}",
        "tokenizer_config.json": "{}",
        "special_tokens_map.json": "{}",
        "chat_template.jinja": "{{ messages }}",
        "additional_chat_templates/tool.jinja": "{{ tools }}",
        "README.md": "card",
        "LICENSE": "words",
    }
    left = {
        "pytorch_model.bin": "weights",
        "consolidated.SAFETENSORS": "weights",
        "optimizer.pt": "weights",
        ".git": "hidden",
        "runs/metrics.jsonl": "not a regular file",
    }
    for name, text in {**files, **left}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (tmp_path / "secret.txt").write_text("outside")
    (folder / "notes.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "alias.json").symlink_to("tokenizer.json")

    plan = save_pretrained(load_pretrained(folder), tmp_path / "out")
    expected = {*files, "alias.json", "config.json", "model.safetensors"}
    before, after = file_digests(folder), file_digests(tmp_path / "out")
    assert after.keys() == expected
    assert {n: after[n] for n in expected - {"model.safetensors"}} == {
        n: before[n] for n in expected - {"model.safetensors"}
    }
    assert not (tmp_path / "out" / "alias.json").is_symlink()
    assert plan.skipped == {
        "pytorch_model.bin": "weights",
        "consolidated.SAFETENSORS": "weights",
        "model.safetensors": "weights",
        "optimizer.pt": "weights",
        ".git": "hidden",
        "runs": "not a regular file",
        "notes.txt": "a link out of the folder",
    }


def test_large_files_stay_behind(folder, tmp_path, monkeypatch):
    (folder / "dump.json").write_bytes(b" " * 5000)
    monkeypatch.setattr(hf_plan, "CARRY_BYTES", 4999)
    plan = plan_export(load_pretrained(folder), tmp_path / "out")
    assert plan.skipped["dump.json"] == "5000 bytes, more than 4999"
    assert not (tmp_path / "out").exists()


def test_a_base_may_be_given(reference, folder, tmp_path):
    """Dtypes and files are those of the base that is named, whatever the weights came from."""

    def half(tensors):
        return {n: t if n == ROUTER_BIAS else t.bfloat16() for n, t in tensors.items()}

    rewrite(folder, half)
    save_pretrained(load_pretrained(reference), tmp_path / "out", base=folder)
    assert contents(tmp_path / "out") == contents(folder)


def test_odd_sizes_stay_aligned(folder, tmp_path):
    """A float32 tensor after an odd number of BF16 values could not be read: wide ones come first."""
    odd = {"mtp.a": torch.ones(3).bfloat16(), "mtp.b": torch.ones(5) > 0, "mtp.c": torch.ones(2)}
    add_shard(folder, odd)
    save_pretrained(load_pretrained(folder), tmp_path / "out")
    assert contents(tmp_path / "out") == contents(folder)
    for entry in Checkpoint.open(tmp_path / "out").entries.values():
        assert entry.start % (hf_header.BITS[entry.dtype] // 8) == 0, entry.name


@pytest.mark.parametrize("size", ["", "5 XB", "-1GB", "0", 0, "GB", "1e9", "0.1KB5"])
def test_shard_size_that_is_no_size(size, tmp_path):
    refused(lambda: save_pretrained(tiny_lm(), tmp_path / "out", max_shard_size=size), repr(size))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("size", "number"),
    [("4GB", 4 * 10**9), ("1.5 kib", 1536), ("500MiB", 500 << 20), (77, 77), ("77", 77)],
)
def test_shard_sizes(size, number):
    assert hf_plan._size(size) == number


def test_targets_that_are_taken(tmp_path, reference):
    lm = load_pretrained(reference)
    (tmp_path / "file").write_text("x")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thing.txt").write_text("x")
    before = sorted(path.as_posix() for path in tmp_path.rglob("*"))
    refused(lambda: save_pretrained(lm, tmp_path / "file"), "file", "expected a folder")
    refused(lambda: save_pretrained(lm, tmp_path / "full"), "full", "not empty", "thing.txt")
    refused(lambda: save_pretrained(lm, reference), "not empty")
    refused(lambda: save_pretrained(lm, tmp_path / "file" / "out"), "file")
    assert sorted(path.as_posix() for path in tmp_path.rglob("*")) == before


def test_bases_that_do_not_fit(folder, tmp_path):
    lm = load_pretrained(folder)
    refused(lambda: save_pretrained(lm, tmp_path / "out", base=tmp_path / "gone"), "gone")
    rewrite(folder, lambda tensors: {n: t for n, t in tensors.items() if n != EXPERT})
    refused(lambda: save_pretrained(lm, tmp_path / "out"), EXPERT, "missing")
    bare = tiny_lm()
    object.__setattr__(bare, "config", tiny_config())
    object.__setattr__(bare.config, "raw", {})
    refused(lambda: save_pretrained(bare, tmp_path / "out"), "no base folder and no config.json")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


def test_disk_that_is_too_small(reference, tmp_path, monkeypatch):
    monkeypatch.setattr(hf_plan.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    refused(
        lambda: save_pretrained(load_pretrained(reference), tmp_path / "out"), "out", "GB are free"
    )
    assert not list(tmp_path.iterdir())


def test_config_of_the_base_that_cannot_come_along(folder, tmp_path):
    lm = load_pretrained(folder)
    (folder / "config.json").rename(tmp_path / "config.json")
    (folder / "config.json").symlink_to(tmp_path / "config.json")
    refused(lambda: save_pretrained(lm, tmp_path / "out"), "config.json", "link out of the folder")
