"""README.md and the notes of a bundle, filled from its evidence; what nobody measured is said to be not measured.

The snippet in the card is run by `check.py`, from inside the folder, as it stands there.
"""

import json
import re
from pathlib import Path
from typing import Any

import jinja2

from hymoe.engine.bundle.spec import BundleSpec

NOTES = ("README.md", "BIAS.md", "EXPLAINABILITY.md", "PRIVACY.md", "SAFETY.md")
NOT_STATED = "not stated"
NOT_MEASURED = "not measured"

SNIPPET = """\
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # of this file
device = "cuda" if torch.cuda.is_available() else "cpu"
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").to(device)
system_prompt = Path(folder, "system_prompt.txt").read_bytes().decode()
messages = [
    {"role": "system", "content": system_prompt},
    {"role": "user", "content": "Name three rivers."},
]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
).to(device)
output = model.generate(**inputs, max_new_tokens=64{{ stop }})
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
"""

CARD = """\
---
{% for key, value in front.items() %}
{{ key }}: {{ value | tojson }}
{% endfor %}
---

# {{ spec.name }}

{% if run %}
A chat model: every parameter of the base was trained on conversations, with a loss on the assistant's turns only.
{% else %}
A chat model. No evidence of its training was found, so this card says nothing about it.
{% endif %}
Figures below come from `training_evidence.json`, which the training run, the evaluations and the packaging wrote.

## Intended use

{{ spec.intended_use_text or not_stated }}

## How to use

```python
{{ snippet }}```

Generation defaults: {{ serving }}. Stop ids: {{ evidence.stop_token_ids | join(", ") }}. The settings are in
`generation_config.json` and, for servers, in `serving_config.json`; the system prompt is in `system_prompt.txt`.

## Training

{% if run %}
| | |
|---|---|
{% for name, value in training %}
| {{ name }} | {{ value }} |
{% endfor %}

### Data

{% for line in data %}
- {{ line }}
{% endfor %}

### What did not go as planned

{% for line in trouble %}
- {{ line }}
{% endfor %}
{% else %}
{{ not_stated | capitalize }}.
{% endif %}

## Evaluation

{% if evidence.evaluations %}
| measure | of | value | 95 % interval | number | file |
|---|---|---|---|---|---|
{% for e in evidence.evaluations %}
{% for f in e.figures %}
| {{ f.measure }} | {{ f.subject }} | {{ f.value | figure }} | {{ f.interval | interval }} | {{ f.count }} | \
[{{ e.kind }}]({{ e.file }}) |
{% endfor %}
{% endfor %}

The files do not say which weights gave the answers: whoever packaged them vouches for that.
{% else %}
{{ not_measured | capitalize }}.
{% endif %}

## Known gaps

{% for gap in evidence.gaps %}
- {{ gap }}
{% else %}
- none found by the packaging
{% endfor %}
- See BIAS.md, EXPLAINABILITY.md, PRIVACY.md and SAFETY.md for what was not measured.

## Licence and contact

- Licence: {{ spec.license_name or spec.license or not_stated }}
- Contact: {{ spec.contact or not_stated }}
"""

BIAS = """\
# Bias

- Bias benchmarks (demographic, political, dialect): {{ not_measured }}.
- Languages: {{ spec.languages | join(", ") or not_stated }}. Quality by language: {{ not_measured }}.
- The model has the leanings of its base and of its training data. The data by source:
{% for line in data %}
  - {{ line }}
{% else %}
  - {{ not_stated }}
{% endfor %}
- Measures taken against bias in training: {{ not_stated }}.
{% if "win-rate" in kinds or "sweep" in kinds %}
- Win rates are a proxy: a reward model prefers longer answers. The rate at equal lengths stands where it was measured.
{% endif %}
"""

EXPLAINABILITY = """\
# Explainability

- What it does: continues a conversation, token by token, from weights that hold no list of sources. It cannot say
  reliably why it gave an answer.
- Architecture: {{ architecture }}.
- How a token is chosen: {{ serving }}.
- What it was trained to imitate: the assistant's turns of the data named in README.md; other turns carried no loss.
- How much of what training changed reached these files: {{ kept }}
- What is verifiable: `training_evidence.json` has the recipe, the data's hash, the base's and the weights' hashes, the
  loss curve and each evaluation's hash.
- Known failures of answers (hallucination, arithmetic, refusals): {{ not_measured }}.
{% for e in evidence.evaluations %}
- Measured ({{ e.kind }}): see `{{ e.file }}`.
{% endfor %}
"""

PRIVACY = """\
# Privacy

- Personal data in the training data: {{ not_measured }}. Preparing the data filters none; whether the sources were
  filtered: {{ not_stated }}.
- Data by source, with the rows that were taken:
{% for line in data %}
  - {{ line }}
{% else %}
  - {{ not_stated }}
{% endfor %}
- Consent and licences of the sources: {{ not_stated }}.
- Memorisation (whether it repeats training text): {{ not_measured }}.
- The base's training data is described by its own publisher, not here.
- The folder collects nothing; what a server logs is up to who runs it.
- Contact for removal: {{ spec.contact or not_stated }}.
"""

SAFETY = """\
# Safety

- Intended use: {{ spec.intended_use_text or not_stated }}
- Red teaming, jailbreaks, harmful requests, refusals: {{ not_measured }}.
- Measures against misuse in training: {{ not_stated }}.
- At serving: the system prompt (`system_prompt.txt`), at most {{ spec.generation.max_new_tokens }} new tokens, stop ids
  {{ evidence.stop_token_ids | join(", ") }}. A system prompt is no safeguard: users can talk around it.
- A server must encode control tokens that a message spells as text: the chat template alone does not.
- Not for decisions about people, and not where a wrong answer does harm, unless somebody measures that first.
- Contact: {{ spec.contact or not_stated }}.
"""


def write_notes(folder: Path, spec: BundleSpec, evidence: dict[str, Any]) -> list[str]:
    """Writes the card and the notes.

    Args:
        folder: the bundle, with its config.json.
        spec: BUNDLE.toml.
        evidence: what becomes training_evidence.json.

    Returns:
        The names of the files.
    """
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined, autoescape=False
    )
    environment.filters |= {"figure": _figure, "interval": _interval, "tojson": _yaml}
    run = evidence["run"]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    facts = {
        "spec": spec,
        "run": run,
        "evidence": evidence,
        "front": _front(spec, run),
        "snippet": environment.from_string(SNIPPET).render(stop=_stop(spec)) + "\n",
        "serving": _serving(spec),
        "training": _training(spec, run) if run else [],
        "data": _sources(run) if run else [],
        "trouble": _trouble(run["failures"]) if run and "failures" in run else [NOT_STATED],
        "architecture": _architecture(config),
        "kept": _kept(run),
        "kinds": {e["kind"] for e in evidence["evaluations"]},
        "not_stated": NOT_STATED,
        "not_measured": NOT_MEASURED,
    }
    for name, source in zip(NOTES, (CARD, BIAS, EXPLAINABILITY, PRIVACY, SAFETY), strict=True):
        text = environment.from_string(source).render(facts)
        (folder / name).write_text(text.rstrip("\n") + "\n", encoding="utf-8")
    return list(NOTES)


def snippet_of(card: str) -> str | None:
    """The first Python block of a model card."""
    found = re.search(r"^```python\n(.*?)^```$", card, re.DOTALL | re.MULTILINE)
    return None if found is None else found[1]


def _front(spec: BundleSpec, run: dict[str, Any] | None) -> dict[str, Any]:
    """The YAML head that the hub reads."""
    front: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    base = spec.base_model or ((run or {}).get("base_revision") or {}).get("repository")
    named = {
        "license": spec.license,
        "license_name": spec.license_name,
        "language": list(spec.languages) or None,
        "base_model": base,
    }
    return front | {key: value for key, value in named.items() if value is not None}


def _yaml(value: Any) -> str:
    """JSON is YAML."""
    return json.dumps(value, ensure_ascii=False)


def _figure(value: Any) -> str:
    return "none" if value is None else f"{value:.4g}"


def _interval(value: Any) -> str:
    return "none" if value is None else f"{value[0]:.4g} to {value[1]:.4g}"


def _stop(spec: BundleSpec) -> str:
    strings = list(spec.generation.stop_strings)
    return f", stop_strings={strings!r}, tokenizer=tokenizer" if strings else ""


def _serving(spec: BundleSpec) -> str:
    how = spec.generation
    chosen = (
        f"sampled at temperature {how.temperature:g}, top_p {how.top_p:g}"
        if how.temperature > 0
        else "greedy"
    )
    limit = "" if how.max_input_tokens is None else f"at most {how.max_input_tokens} tokens in, "
    return (
        f"{chosen}, repetition penalty {how.repetition_penalty:g}, {limit}"
        f"at most {how.max_new_tokens} new tokens"
    )


def _training(spec: BundleSpec, run: dict[str, Any]) -> list[tuple[str, str]]:
    revision = run.get("base_revision") or {}
    base = spec.base_model or revision.get("repository") or Path(run["base"]).name
    machine = run.get("machine", {})
    curve = run.get("loss_curve") or []
    rows = [
        ("base", base),
        ("base revision", revision.get("revision", "not known")),
        ("recipe sha256", run["recipe_sha256"]),
        ("steps", f"{run['steps']:,} ({run['applied_steps']:,} applied)"),
        ("tokens", f"{run['tokens']:,}, {run['supervised_tokens']:,} of them supervised"),
        ("time", f"{run['training_seconds']:,.0f} s of training"),
        ("started, ended", f"{run.get('started')}, {run.get('ended')}"),
        ("device", f"{run['world_size']} x {machine.get('device')}, torch {machine.get('torch')}"),
        ("update kept in the export", _kept(run)),
    ]
    if curve:
        rows.append(
            ("training loss", f"{_figure(curve[0]['loss'])} to {_figure(curve[-1]['loss'])}")
        )
    if run.get("eval_loss_after") is not None:
        before, after = _figure(run["eval_loss_before"]), _figure(run["eval_loss_after"])
        rows.append(("held-out loss", f"{before} to {after}"))
    return [(name, str(value).replace("|", "/")) for name, value in rows]


def _sources(run: dict[str, Any]) -> list[str]:
    """The data set and each of its sources, one line each."""
    data = run.get("data") or {}
    if data.get("sources"):
        lines = [f"data set sha256 {data['dataset_sha256']}, {data['documents']:,} documents"]
        for s in data["sources"]:
            dropped = ", ".join(f"{n:,} {why}" for why, n in s["dropped"].items()) or "none"
            lines.append(
                f"{s['name']}: asked for {s['asked']}; {s['rows_taken']:,} rows taken, {s['conversations']:,} "
                f"conversations in the set, {s['tokens']:,} tokens; dropped: {dropped}"
            )
        return lines
    if "file_sha256" in data:
        return [
            f"{Path(data['path']).name}: {data['rows_kept']:,} of {data['rows_read']:,} conversations, "
            f"{data['tokens']:,} tokens; sha256 {data['file_sha256']}"
        ]
    return []


def _trouble(failures: dict[str, Any]) -> list[str]:
    skipped = failures["skipped_steps"]
    lines = [f"Skipped steps: {', '.join(map(str, skipped)) or 'none'}."]
    for session in failures["sessions"]:
        how = session["ended"]
        said = f"signal {how['signal']} at step {how['step']}" if "signal" in how else how["how"]
        after = session["resumed_after_step"]
        began = "from the base" if after is None else f"resumed after step {after}"
        lines.append(f"Started {session['started']} {began}: {said}.")
    return lines


def _architecture(config: dict[str, Any]) -> str:
    layers = config.get("layers_block_type") or config.get("hybrid_override_pattern") or ()
    return (
        f"{config.get('model_type')}, {len(layers)} layers of Mamba-2, attention and mixture-of-experts or MLP "
        f"blocks, width {config.get('hidden_size')}"
    )


def _kept(run: dict[str, Any] | None) -> str:
    kept = (run or {}).get("update_kept_in_export")
    return NOT_MEASURED if kept is None else f"{kept:.2%}"
