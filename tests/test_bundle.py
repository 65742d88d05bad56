"""A served folder holds together, and one that does not is refused with what and where."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hymoe.engine.bundle import check as bundle_check
from hymoe.engine.bundle import make as bundle
from hymoe.engine.bundle.card import snippet_of
from hymoe.engine.bundle.check import check_bundle
from hymoe.engine.bundle.make import make_bundle
from hymoe.engine.data.chat import CHAT_TEMPLATE
from hymoe.engine.data.mixture import load_mixture
from hymoe.engine.data.pipeline import prepare
from hymoe.engine.eval.instruct import read_answers, read_prompts, score
from hymoe.engine.eval.report import write_json
from tests.hf_folder import contents, file_digests, refused
from tests.runs import make_data, save_by_transformers, train, write_jsonl, write_recipe

PROMPT = "Say the words backwards. <b>Caf\u00e9</b>"
SPEC = """
name = "backwards"
system_prompt = "prompt.txt"
license = "apache-2.0"
contact = "a@example.org"
languages = ["en", "de"]
intended_use = "use.txt"
base_model = "org/base"
evaluations = ["instructions.json"]
"""
GENERATION = """
[generation]
repetition_penalty = 1.05
max_new_tokens = 16
max_input_tokens = 64
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 2 steps on packed data, a measurement of answers, and a BUNDLE.toml."""
    root = tmp_path_factory.mktemp("bundle")
    data = make_data(root)
    base = save_by_transformers(root / "base", torch.bfloat16, data["tokenizer"])
    (base / "README.md").write_text("the base's own card")
    (base / "LICENSE").write_text("of the base")
    (root / "prompt.txt").write_text(PROMPT + "\n", encoding="utf-8")
    (root / "use.txt").write_text("Trying things out.")
    (root / "mixture.toml").write_text(
        'seq_len = 256\ntokenizer = "base"\nchat_template = "chatml"\nsystem_prompt = "prompt.txt"\n'
        '[[source]]\nname = "words"\npath = "train.jsonl"\nsystem = "replace"\n'
    )
    prepare(load_mixture(root / "mixture.toml"), base, root / "packed", 1, lambda line: None)
    write_recipe(
        root / "recipe.toml",
        model={"path": base},
        data={"path": root / "packed", "seq_len": 256, "micro_tokens": 256},
        optim={"lr": 1e-3, "warmup_steps": 1},
        train={"steps": 2, "step_tokens": 256},
        run={"dir": root / "run", "save_every": 2, "max_shard_size": "40KB"},
    )
    ran = train(1, root / "recipe.toml")
    assert ran.returncode == 0, ran.stderr
    constraint = {"instruction_id_list": ["words:repeated"], "kwargs": [{"word": "a", "times": 2}]}
    prompts = [{"key": key, "prompt": "Repeat a twice", **constraint} for key in "xyz"]
    answers = [
        {"key": key, "response": said}
        for key, said in zip("xyz", ("a a", "a", "a a a"), strict=True)
    ]
    read = read_prompts(write_jsonl(root / "prompts.jsonl", prompts))
    report = score(read, read_answers(write_jsonl(root / "answers.jsonl", answers), read))
    write_json(root / "instructions.json", {"prompts_file": "prompts.jsonl", **report.as_dict()})
    (root / "bundle.toml").write_text(SPEC + GENERATION)
    return root


def say(line: str) -> None:
    assert line
    assert "\n" not in line


@pytest.fixture(scope="module")
def made(root: Path) -> Path:
    """The bundle of the finished run; its check has loaded it whole and run its snippet."""
    before = file_digests(root / "run")
    make_bundle(root / "bundle.toml", root / "run", root / "made", load="whole", say=say)
    assert file_digests(root / "run") == before
    return root / "made"


@pytest.fixture
def spoiled(made: Path, tmp_path: Path) -> Path:
    """A copy of the bundle, with files of its own."""
    return shutil.copytree(made, tmp_path / "bundle")


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**read(path), **values}))


def seal(folder: Path) -> None:
    """The evidence gets the hashes of what is there now, as a careful forger would do."""
    path = folder / "training_evidence.json"
    evidence = read(path)
    for kind in ("weights", "files"):
        for name in list(evidence[kind]):
            content = (folder / name).read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            evidence[kind][name] = {"bytes": len(content), "sha256": digest}
    path.write_text(json.dumps(evidence))


@pytest.mark.slow
def test_the_bundle_has_all_that_is_served(root: Path, made: Path) -> None:
    weights = {path.name for path in (root / "run" / "final").glob("*.safetensors")}
    notes = {"README.md", "BIAS.md", "EXPLAINABILITY.md", "PRIVACY.md", "SAFETY.md"}
    settings = {"config.json", "generation_config.json", "serving_config.json"}
    words = {"chat_template.jinja", "system_prompt.txt", "tokenizer.json", "tokenizer_config.json"}
    others = {"training_evidence.json", "evaluation", "LICENSE", "model.safetensors.index.json"}
    assert {path.name for path in made.iterdir()} == weights | notes | settings | words | others
    assert contents(made) == contents(root / "run" / "final")
    assert (made / "system_prompt.txt").read_bytes().decode() == PROMPT
    assert (made / "chat_template.jinja").read_text() == CHAT_TEMPLATE
    assert read(made / "tokenizer_config.json")["chat_template"] == CHAT_TEMPLATE
    tokenizer = read(made / "tokenizer.json")
    im_end = next(t["id"] for t in tokenizer["added_tokens"] if t["content"] == "<|im_end|>")
    ends = sorted({im_end, read(root / "base" / "config.json")["eos_token_id"]})
    assert read(made / "config.json")["eos_token_id"] == ends
    generation = read(made / "generation_config.json")
    assert generation["eos_token_id"] == ends
    assert generation["repetition_penalty"] == 1.05
    assert generation["max_new_tokens"] == 16
    assert generation["do_sample"] is False
    serving = read(made / "serving_config.json")
    assert serving["stop_token_ids"] == ends
    assert serving["max_input_tokens"] == 64
    assert not [path for path in root.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_the_evidence_is_the_runs_own_and_has_every_hash(root: Path, made: Path) -> None:
    evidence = read(made / "training_evidence.json")
    assert evidence["run"] == read(root / "run" / "evidence.json")
    manifest = read(root / "packed" / "manifest.json")
    assert evidence["run"]["dataset_sha256"] == manifest["dataset_sha256"]
    assert evidence["run"]["data"]["sources"] == manifest["sources"]
    digests = file_digests(made)
    hashed = evidence["weights"] | evidence["files"]
    assert {name: values["sha256"] for name, values in hashed.items()} == {
        name: digest
        for name, digest in digests.items()
        if name not in {*evidence["notes"], "training_evidence.json"}
    }
    measured = evidence["evaluations"][0]
    assert measured["sha256"] == digests["evaluation/instructions.json"]
    strict = measured["figures"][0]
    assert strict["measure"] == "instruction prompts kept, strict"
    assert strict["value"] == pytest.approx(1 / 3)
    assert strict["count"] == 3
    assert evidence["gaps"] == ["base: its revision is not known"]


@pytest.mark.slow
def test_the_card_says_what_was_measured_and_what_was_not(root: Path, made: Path) -> None:
    card = (made / "README.md").read_text(encoding="utf-8")
    front = yaml.safe_load(card.split("---\n")[1])
    assert front == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
        "language": ["en", "de"],
        "base_model": "org/base",
    }
    run = read(root / "run" / "evidence.json")
    assert f"{run['supervised_tokens']:,} of them supervised" in card
    assert "0.3333" in card
    assert "Trying things out." in card
    assert "words: asked for all" in card
    assert run["dataset_sha256"] in card
    assert "base: its revision is not known" in card
    for note in ("BIAS.md", "EXPLAINABILITY.md", "PRIVACY.md", "SAFETY.md"):
        text = (made / note).read_text(encoding="utf-8")
        assert "not measured" in text, note
        assert "{{" not in text, note


FAULTS: dict[str, tuple[Callable[[Path], Any], bool, tuple[str, ...]]] = {}
Fault = Callable[[Path], Any]


def fault(*words: str, sealed: bool = True) -> Callable[[Fault], Fault]:
    """Registers a way to spoil a bundle, and what the one line about it must name."""

    def register(spoil: Fault) -> Fault:
        FAULTS[spoil.__name__] = (spoil, sealed, words)
        return spoil

    return register


def first_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


@fault("serving_config.json", "stop ids [2]", "expected the same")
def serving_stops_elsewhere(folder: Path) -> None:
    change(folder / "serving_config.json", stop_token_ids=[2])


@fault("config.json", "stop ids", "expected the same")
def config_stops_elsewhere(folder: Path) -> None:
    change(folder / "config.json", eos_token_id=2)


@fault("lack <|im_end|>")
def nobody_stops_at_the_end_of_a_turn(folder: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        change(folder / name, eos_token_id=[2])
    change(folder / "serving_config.json", stop_token_ids=[2])
    change(folder / "training_evidence.json", stop_token_ids=[2])


@fault("stop id 100000", "vocabulary")
def stop_id_outside_the_vocabulary(folder: Path) -> None:
    ends = [*read(folder / "config.json")["eos_token_id"], 100_000]
    for name in ("config.json", "generation_config.json"):
        change(folder / name, eos_token_id=ends)
    change(folder / "serving_config.json", stop_token_ids=ends)
    change(folder / "training_evidence.json", stop_token_ids=ends)


@fault("tokenizer_config.json", "eos_token is '<|im_start|>'")
def tokenizer_ends_elsewhere(folder: Path) -> None:
    change(folder / "tokenizer_config.json", eos_token="<|im_start|>")


def set_template(folder: Path, source: str) -> None:
    (folder / "chat_template.jinja").write_text(source)
    change(folder / "tokenizer_config.json", chat_template=source)


@fault("chat_template.jinja", "system", "no system turns")
def template_fails(folder: Path) -> None:
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
    set_template(folder, refusal + CHAT_TEMPLATE)


@fault("chat_template.jinja", "no Jinja")
def template_is_none(folder: Path) -> None:
    set_template(folder, "{% for %}")


@fault("tokenizer_config.json", "differs from chat_template.jinja")
def two_templates(folder: Path) -> None:
    change(folder / "tokenizer_config.json", chat_template=CHAT_TEMPLATE + " ")


@fault("system_prompt.txt", "empty")
def no_system_prompt(folder: Path) -> None:
    (folder / "system_prompt.txt").write_text(" \n")


@fault("serving_config.json", "repetition_penalty = 1.2", "1.05")
def served_with_another_penalty(folder: Path) -> None:
    change(folder / "serving_config.json", repetition_penalty=1.2)


@fault("total_size")
def index_with_another_size(folder: Path) -> None:
    change(folder / "model.safetensors.index.json", metadata={"total_size": 1})


@fault("missing from the folder", "tensors should be in it", sealed=False)
def missing_shard(folder: Path) -> None:
    first_shard(folder).unlink()


@fault("../outside.safetensors", "not a plain file name", sealed=False)
def index_names_a_file_outside(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    weight_map = read(index)["weight_map"]
    weight_map[next(iter(weight_map))] = "../outside.safetensors"
    change(index, weight_map=weight_map)


@fault("model-00001", "not the file of the evidence", sealed=False)
def flipped_bit(folder: Path) -> None:
    shard = first_shard(folder)
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


@fault("generation_config.json", "not the file of the evidence", sealed=False)
def settings_changed_by_hand(folder: Path) -> None:
    change(folder / "generation_config.json", max_new_tokens=17)


@fault("optimizer.pt", "stray", sealed=False)
def stray_file(folder: Path) -> None:
    (folder / "optimizer.pt").write_bytes(b"x")


@fault("evaluation/instructions.json", "missing", sealed=False)
def evaluation_gone(folder: Path) -> None:
    (folder / "evaluation" / "instructions.json").unlink()


@fault("figures of evaluation/instructions.json")
def better_figures(folder: Path) -> None:
    path = folder / "training_evidence.json"
    measured = read(path)["evaluations"]
    measured[0]["figures"][0]["value"] = 0.99
    change(path, evaluations=measured)


@fault("SAFETY.md", "missing", sealed=False)
def note_gone(folder: Path) -> None:
    (folder / "SAFETY.md").unlink()


@fault("training_evidence.json", "missing", sealed=False)
def no_evidence(folder: Path) -> None:
    (folder / "training_evidence.json").unlink()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_bundle_with_anything_wrong_is_refused(
    spoiled: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT-Model-Connect#640 (stop ids) and its kin; none of these needs transformers to be found."""
    monkeypatch.setattr(bundle_check, "_in_transformers", lambda *_, **__: pytest.fail("not seen"))
    spoil, sealed, words = FAULTS[name]
    spoil(spoiled)
    if sealed:
        seal(spoiled)
    refused(lambda: check_bundle(spoiled), str(spoiled), *words)


@pytest.mark.slow
def test_what_only_transformers_can_tell_is_refused(spoiled: Path, made: Path) -> None:
    """A template that asks for the date renders otherwise there; so does a tokenizer with other rules."""
    dated = CHAT_TEMPLATE.replace("{% for", "{{ strftime_now('%Y-%m-%d %H') }}{% for", 1)
    set_template(spoiled, dated)
    seal(spoiled)
    refused(lambda: check_bundle(spoiled), "chat_template.jinja", "text of a conversation", "ours")


@pytest.mark.slow
def test_a_snippet_that_fails_is_refused(spoiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle_check, "_in_transformers", lambda *_, **__: {})
    monkeypatch.setattr(bundle_check, "_compare", lambda *_: [])
    card = spoiled / "README.md"
    text = card.read_text(encoding="utf-8")
    card.write_text(text.replace("```python\n", "```python\nprint(no_such_name)\n", 1))
    refused(lambda: check_bundle(spoiled), "README.md", "snippet fails", "no_such_name")
    card.write_text(text.replace("```python", "```"))
    refused(lambda: check_bundle(spoiled), "README.md", "no Python block")


def without_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "check_bundle", lambda *_, **__: [])


@pytest.mark.slow
@pytest.mark.parametrize("source", ["run", "run/final", "run/checkpoints/step_00000002"])
def test_any_source_comes_in_the_asked_number_of_shards(
    root: Path, tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_check(monkeypatch)
    make_bundle(root / "bundle.toml", root / source, tmp_path / "out", shards=3, say=say)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3
    assert contents(tmp_path / "out") == contents(root / "run" / "final")
    evidence = read(tmp_path / "out" / "training_evidence.json")
    assert evidence["run"] == read(root / "run" / "evidence.json")
    monkeypatch.setattr(bundle_check, "_in_transformers", lambda *_, **__: {})
    monkeypatch.setattr(bundle_check, "_compare", lambda *_: [])
    monkeypatch.setattr(bundle_check, "_run_snippet", lambda *_: "")
    assert check_bundle(tmp_path / "out")


def write_spec(root: Path, folder: Path, **changes: Any) -> Path:
    """The fixture's BUNDLE.toml with keys changed, in a folder of its own with its texts."""
    for name in ("prompt.txt", "use.txt", "instructions.json"):
        shutil.copyfile(root / name, folder / name)
    lines = {
        key: value
        for line in SPEC.strip().splitlines()
        for key, _, value in [line.partition(" = ")]
    }
    lines |= {key: json.dumps(value) for key, value in changes.items()}
    text = "\n".join(f"{key} = {value}" for key, value in lines.items())
    (folder / "bundle.toml").write_text(text + "\n" + GENERATION)
    return folder / "bundle.toml"


def bad_weights(folder: Path, run: Path) -> None:
    shard = first_shard(run / "final")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


REFUSALS: dict[str, tuple[dict[str, Any], Callable[[Path, Path], Any], tuple[str, ...]]] = {
    "evaluation-missing": (
        {},
        lambda folder, run: (folder / "instructions.json").unlink(),
        ("instructions.json", "no such file"),
    ),
    "evaluation-of-something-else": (
        {},
        lambda folder, run: (folder / "instructions.json").write_text("{}"),
        ("instructions.json", "evaluate.py"),
    ),
    "prompt-empty": (
        {},
        lambda folder, run: (folder / "prompt.txt").write_text("\n"),
        ("prompt.txt", "empty", "system_prompt"),
    ),
    "prompt-missing": ({"system_prompt": "no.txt"}, lambda folder, run: None, ("no.txt",)),
    "unknown-key": ({"licence": "x"}, lambda folder, run: None, ("licence", "license")),
    "template-missing": ({"template": "no.jinja"}, lambda folder, run: None, ("no.jinja",)),
    "no-template-in-base": ({"template": "base"}, lambda folder, run: None, ("chat_template",)),
    "template-fails": (
        {"template": "t.jinja"},
        lambda folder, run: (folder / "t.jinja").write_text("{{ messages[99].content.x }}"),
        ("chat_template.jinja", "does not render"),
    ),
    "weights-of-another-run": ({}, bad_weights, ("final", "model-00001", "the run's evidence")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSALS)
def test_bad_input_is_one_line_and_leaves_nothing(root: Path, tmp_path: Path, name: str) -> None:
    changes, spoil, words = REFUSALS[name]
    inputs, out = tmp_path / "inputs", tmp_path / "out"
    inputs.mkdir()
    run = shutil.copytree(root / "run", tmp_path / "run")
    spec = write_spec(root, inputs, **changes)
    spoil(inputs, run)
    refused(lambda: make_bundle(spec, run, out, say=say), *words)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inputs", "run"]


@pytest.mark.slow
def test_a_folder_in_use_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("x")
    make = lambda: make_bundle(root / "bundle.toml", root / "run", tmp_path / "out", say=say)  # noqa: E731
    refused(make, "out", "empty")
    assert (tmp_path / "out" / "mine.txt").read_text() == "x"


@pytest.mark.slow
def test_weights_without_a_run_make_a_bundle_that_says_so(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_check(monkeypatch)
    lines: list[str] = []
    make_bundle(root / "bundle.toml", root / "base", tmp_path / "out", say=lines.append)
    assert read(tmp_path / "out" / "training_evidence.json")["run"] is None
    assert any(line.startswith("gap") and "no evidence" in line for line in lines)
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "No evidence of its training" in card
    assert "left out README.md" in "".join(lines) or "the base's own card" not in card


@pytest.mark.slow
def test_where_memory_is_short_names_and_a_stand_in_are_checked(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With sampled defaults and stop strings, which the snippet must then hand over."""
    monkeypatch.setattr(bundle_check, "available_bytes", lambda: 100)
    lines: list[str] = []
    spec = write_spec(root, tmp_path)
    text = spec.read_text().partition("[generation]")[0]
    how = '[generation]\ntemperature = 0.7\ntop_p = 0.9\nmax_new_tokens = 8\nstop_strings = ["\\n\\n"]\n'
    spec.write_text(text + how)
    out = tmp_path / "out"
    make_bundle(spec, root / "run", out, say=lines.append)
    assert any("meta device" in line and "no values" in line for line in lines)
    assert any("small random weights" in line for line in lines)
    code = snippet_of((out / "README.md").read_text(encoding="utf-8"))
    assert "stop_strings=['\\n\\n'], tokenizer=tokenizer" in code
    assert read(out / "generation_config.json")["temperature"] == 0.7
    assert read(out / "serving_config.json")["stop"] == ["\n\n"]
