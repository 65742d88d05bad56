"""Hashes of a base: found where something states them; a turned bit found; not taken over into an export."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from hymoe.engine import hf_hashes
from hymoe.engine.hf_checkpoint import Checkpoint, plan_export, save_pretrained
from hymoe.engine.hf_hashes import fault, stated
from tests.forked import ranks
from tests.hf_folder import refused
from tests.runs import make_data, save_by_transformers, write_recipe
from tests.tiny import tiny_lm


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A checkpoint of several files."""
    folder = tmp_path / "run" / "final"
    save_pretrained(tiny_lm(), folder, max_shard_size="60KB")
    return folder


def digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob("*.safetensors"))
    }


def as_files(hashes: dict[str, str]) -> dict[str, dict[str, object]]:
    return {name: {"bytes": 1, "sha256": digest} for name, digest in hashes.items()}


def in_evidence(folder: Path, hashes: dict[str, str]) -> Path:
    (folder / "evidence.json").write_text(json.dumps({"files": as_files(hashes)}))
    return folder / "evidence.json"


def in_a_bundle(folder: Path, hashes: dict[str, str]) -> Path:
    content = {"weights": as_files(hashes), "files": {"config.json": {"sha256": "0" * 64}}}
    (folder / "training_evidence.json").write_text(json.dumps(content))
    return folder / "training_evidence.json"


def in_the_run(folder: Path, hashes: dict[str, str]) -> Path:
    content = {"export": {"folder": folder.name, "weights": as_files(hashes)}}
    (folder.parent / "evidence.json").write_text(json.dumps(content))
    return folder.parent / "evidence.json"


def as_sums(folder: Path, hashes: dict[str, str]) -> Path:
    lines = [f"{digest.upper()} *./{name}\n" for name, digest in hashes.items()]
    (folder / "SHA256SUMS").write_text("# a comment\n" + "".join(lines))
    return folder / "SHA256SUMS"


WAYS = (in_evidence, in_a_bundle, in_the_run, as_sums)


def turn_a_bit(file: Path, back: int = 5) -> None:
    content = bytearray(file.read_bytes())
    content[-back] ^= 4
    file.write_bytes(content)


@pytest.mark.parametrize("state", WAYS)
def test_a_turned_bit_is_found(state, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_hashes, "READ_BYTES", 7_000)
    source = state(base, digests(base))
    checkpoint = Checkpoint.open(base)
    known = stated(checkpoint)
    assert {file.name: about.sha256 for file, about in known.items()} == digests(base)
    assert {about.by for about in known.values()} == {source}
    seen: list[tuple[int, int]] = []
    assert fault(known, progress=lambda *now: seen.append(now)) is None
    size = sum(file.stat().st_size for file in known)
    assert seen[-1] == (size, size)
    assert [now for now, _ in seen] == sorted({now for now, _ in seen})

    files = sorted(known)
    before = digests(base)
    turn_a_bit(files[1])
    Checkpoint.open(base)  # its header and size are as they were
    message = fault(known)
    assert before[files[1].name] in message
    assert digests(base)[files[1].name] in message
    assert str(files[1]) in message
    assert str(source) in message
    found = [fault(known, rank, 3) for rank in range(3)]  # the ranks share the files
    assert found == [None, message, None]


def test_a_download_cache_names_its_blobs_by_their_hash(base: Path, tmp_path: Path) -> None:
    repo = tmp_path / "hub" / "models--owner--name"
    snapshot, blobs = repo / "snapshots" / "abc", repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(base.iterdir())):
        blob = digests(base).get(
            file.name, f"{number:040x}"
        )  # a small file's is git's own, of 40 digits
        shutil.copy(file, blobs / blob)
        (snapshot / file.name).symlink_to(f"../../blobs/{blob}")
    known = stated(Checkpoint.open(snapshot))
    assert {file.name: about.sha256 for file, about in known.items()} == digests(base)
    assert fault(known) is None
    turn_a_bit(blobs / next(iter(digests(base).values())))
    assert "was damaged" in fault(known)


def test_nothing_is_stated(base: Path) -> None:
    """No evidence, or evidence of other files."""
    assert stated(Checkpoint.open(base)) == {}
    assert fault({}) is None
    content = {"export": {"folder": "another", "weights": as_files(digests(base))}}
    (base.parent / "evidence.json").write_text(json.dumps(content))
    in_evidence(base, {"other.safetensors": "0" * 64})
    (base / "training_evidence.json").write_text("[]")
    (base / "x.sha256").write_text("nothing of the kind\n")
    assert stated(Checkpoint.open(base)) == {}


def test_the_first_that_names_a_file_counts(base: Path) -> None:
    hashes = digests(base)
    first = dict([*hashes.items()][:1])
    one, two = as_sums(base, dict.fromkeys(hashes, "0" * 64)), in_evidence(base, first)
    known = stated(Checkpoint.open(base))
    assert [about.by for about in known.values()] == [two, *[one] * (len(hashes) - 1)]


def test_what_states_them_is_broken(base: Path) -> None:
    name = next(iter(digests(base)))
    for wrong in ("abc", "Z" * 64, 3):
        in_evidence(base, {name: wrong})
        refused(lambda: stated(Checkpoint.open(base)), "evidence.json", name, "64 hexadecimal")
    (base / "evidence.json").write_text("{")
    refused(lambda: stated(Checkpoint.open(base)), "evidence.json", "not valid JSON")
    with (base / "evidence.json").open("wb") as file:
        file.truncate(1 << 40)
    refused(lambda: stated(Checkpoint.open(base)), "evidence.json", str(1 << 40))


def test_an_export_has_other_bytes_and_does_not_take_them_over(base: Path, tmp_path: Path) -> None:
    for state in WAYS:
        state(base, digests(base))
    plan = plan_export(tiny_lm(), tmp_path / "out", base=base)
    assert plan.carried == ["config.json"]
    assert {
        name for name, reason in plan.skipped.items() if reason.startswith("states hashes")
    } == {"SHA256SUMS", "evidence.json", "training_evidence.json"}


@pytest.mark.slow
def test_a_run_does_not_start_from_a_damaged_base(tmp_path: Path) -> None:
    data = make_data(tmp_path)
    base = save_by_transformers(tmp_path / "base", torch.bfloat16, data["tokenizer"])
    recipe = write_recipe(
        tmp_path / "recipe.toml",
        model={"path": base},
        data={"path": data["train"], "seq_len": 64, "micro_tokens": 64},
        train={"steps": 1, "step_tokens": 128, "eval_every": 0},
        run={"dir": tmp_path / "run", "export": ""},
    )
    as_sums(base, digests(base))
    with ranks(tmp_path) as launch:
        ran = launch(2, recipe, "--run.dir", tmp_path / "whole")
        assert ran.codes == [0, 0], ran.out
        assert f"checked the sha256 of {len(digests(base))} files of the base" in ran.out
        turn_a_bit(sorted(base.glob("*.safetensors"))[1])  # the second rank's
        ran = launch(2, recipe)
        assert ran.codes == [2, 2], ran.out
        assert "SHA256SUMS states" in ran.out
        assert "Traceback" not in ran.out
        ran = launch(2, recipe, "--run.replace", "true", "--model.check-hashes", "false")
        assert ran.codes == [0, 0], ran.out
