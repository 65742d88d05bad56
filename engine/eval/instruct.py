"""Scores answers by the constraints of their prompts: a verdict for each, and totals by kind.

**Prompts** have IFEval's public layout: `key`, `prompt`, `instruction_id_list`, `kwargs` (one
object a constraint). **Answers** have `key` and `response`; what `scripts/generate.py` writes, with
`id` for `key`, is accepted too.

**Strict** judges the answer as it is. **Loose** passes if any of eight versions does: without its
first line, its last line or both, each also without asterisks, as in IFEval.

**Intervals** of the totals are Wilson's, for independent trials. Prompts are independent of each other;
constraints of one prompt share an answer, so the interval over all constraints is somewhat too narrow.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hymoe.engine.data.sources import read_jsonl
from hymoe.engine.errors import UserError
from hymoe.engine.eval.checks import Verdict, check, resolve
from hymoe.engine.eval.intervals import wilson

# What each of the eight versions of `loose_versions` lacks, for a reason.
VERSIONS = (
    "",
    "without the first line: ",
    "without the last line: ",
    "without the first and the last line: ",
    "without asterisks: ",
    "without the first line and asterisks: ",
    "without the last line and asterisks: ",
    "without the first and the last line and asterisks: ",
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt and its constraints."""

    key: str
    prompt: str
    instruction_ids: tuple[str, ...]
    arguments: tuple[Mapping[str, Any], ...]


@dataclass(slots=True)
class Tally:
    """Passed and judged, strict and loose."""

    total: int = 0
    strict: int = 0
    loose: int = 0

    def add(self, strict: bool, loose: bool) -> None:
        """Counts one more."""
        self.total += 1
        self.strict += strict
        self.loose += loose

    def shown(self) -> str:
        """The strict rate in percent with its interval, and the loose one where it differs."""
        if not self.total:
            return "-"
        low, high = wilson(self.strict, self.total)
        loose = f" (loose {self.loose / self.total:.1%})" if self.loose != self.strict else ""
        return f"{self.strict / self.total:.1%} [{low:.1%}, {high:.1%}]{loose}"

    def as_dict(self) -> dict[str, Any]:
        """Counts, rates and their 95 % Wilson intervals; the rate of nothing is None."""
        made: dict[str, Any] = {"total": self.total, "strict": self.strict, "loose": self.loose}
        for name, count in (("strict", self.strict), ("loose", self.loose)):
            made[f"{name}_rate"] = count / self.total if self.total else None
            made[f"{name}_interval"] = list(wilson(count, self.total)) if self.total else None
        return made


@dataclass(slots=True)
class Report:
    """Verdicts of one set of answers."""

    strict: dict[str, list[bool]] = field(default_factory=dict)  # by key, in the order of its list
    loose: dict[str, list[bool]] = field(default_factory=dict)
    reasons: dict[str, list[str]] = field(default_factory=dict)  # of the strict verdicts
    loose_reasons: dict[str, list[str]] = field(default_factory=dict)
    by_kind: dict[str, Tally] = field(default_factory=dict)
    constraints: Tally = field(default_factory=Tally)
    prompts: Tally = field(default_factory=Tally)  # a prompt passes when all its constraints do
    prompts_without_constraints: int = 0  # judged by nothing and left out of every total

    def as_dict(self) -> dict[str, Any]:
        """The report for a JSON file."""
        return {
            "verdicts": {
                key: {
                    "strict": self.strict[key],
                    "loose": self.loose[key],
                    "reasons": self.reasons[key],
                    "loose_reasons": self.loose_reasons[key],
                }
                for key in self.strict
            },
            "by_kind": {kind: tally.as_dict() for kind, tally in sorted(self.by_kind.items())},
            "constraints": self.constraints.as_dict(),
            "prompts": self.prompts.as_dict(),
            "prompts_without_constraints": self.prompts_without_constraints,
        }


def read_prompts(path: Path | str) -> list[Prompt]:
    """Reads a file of prompts with constraints.

    Raises:
        UserError: a row that lacks a field or has an unknown constraint, with file and line.
    """
    prompts: dict[str, Prompt] = {}
    for number, row in read_jsonl(path):
        where = f"{path}:{number}"
        prompt = _parse_prompt(row, where)
        if prompt.key in prompts:
            raise UserError(f"{where}: found key {prompt.key} again, expected each once")
        prompts[prompt.key] = prompt
    return list(prompts.values())


def read_answers(path: Path | str, prompts: Iterable[Prompt]) -> dict[str, str]:
    """Reads the answers to `prompts`, by key.

    Raises:
        UserError: as `read_responses`.
    """
    return read_responses(path, [prompt.key for prompt in prompts], "prompts")


def read_responses(
    path: Path | str, keys: Iterable[str], what: str, optional: Iterable[str] = ()
) -> dict[str, str]:
    """Reads a file of answers, by key.

    Args:
        path: rows with `key` or `id`, and `response`.
        keys: each has one answer.
        what: the keys are of, for messages.
        optional: keys that may have an answer, which is not returned.

    Raises:
        UserError: a row without key or response, a key twice or of nothing asked, one without an answer.
    """
    expected, others = set(keys), set(optional)
    answers: dict[str, str] = {}
    for number, row in read_jsonl(path):
        where = f"{path}:{number}"
        key = row.get("key", row.get("id"))
        if key is None:
            raise UserError(
                f'{where}: found neither "key" nor "id", expected the key of one of the {what}'
            )
        if not isinstance(row.get("response"), str):
            raise UserError(f'{where}: "response" is {row.get("response")!r}, expected text')
        key = str(key)
        if key in others:
            continue
        if key not in expected:
            raise UserError(f"{where}: found key {key}, expected a key of the {what}")
        if key in answers:
            raise UserError(f"{where}: found key {key} again, expected each once")
        answers[key] = row["response"]
    missing = [key for key in sorted(expected) if key not in answers]
    if missing:
        raise UserError(
            f"{path}: found no answer to {len(missing)} of {len(expected)} {what}, the first is "
            f"{missing[0]}, expected an answer to each"
        )
    return answers


def score(prompts: Iterable[Prompt], answers: Mapping[str, str]) -> Report:
    """Judges the answer to each prompt.

    Args:
        prompts: with their constraints.
        answers: by key, one for each prompt.
    """
    report = Report()
    for prompt in prompts:
        answer = answers[prompt.key]
        pairs = list(zip(prompt.instruction_ids, prompt.arguments, strict=True))
        verdicts = [check(kind, answer, arguments) for kind, arguments in pairs]
        strict = [verdict.passed for verdict in verdicts]
        found = [
            judge_loosely(answer, kind, arguments, verdict)
            for (kind, arguments), verdict in zip(pairs, verdicts, strict=True)
        ]
        loose = [verdict.passed for verdict in found]
        report.strict[prompt.key], report.loose[prompt.key] = strict, loose
        report.reasons[prompt.key] = [verdict.reason for verdict in verdicts]
        report.loose_reasons[prompt.key] = [verdict.reason for verdict in found]
        if not pairs:
            report.prompts_without_constraints += 1
            continue
        for (kind, _), s, l in zip(pairs, strict, loose, strict=True):
            report.by_kind.setdefault(kind, Tally()).add(s, l)
            report.constraints.add(s, l)
        report.prompts.add(all(strict), all(loose))
    return report


def judge_loosely(answer: str, kind: str, arguments: Mapping[str, Any], strict: Verdict) -> Verdict:
    """The first version that passes, said in the reason, or else the strict verdict."""
    seen = {answer}
    for without, version in zip(VERSIONS, loose_versions(answer), strict=True):
        if strict.passed:
            break
        if version in seen:
            continue
        seen.add(version)
        verdict = check(kind, version, arguments)
        if verdict.passed:
            return Verdict(True, without + verdict.reason)
    return strict


def loose_versions(answer: str) -> list[str]:
    """The eight versions of an answer that a loose verdict looks at."""
    lines = answer.split("\n")
    cut = [
        answer,
        "\n".join(lines[1:]).strip(),
        "\n".join(lines[:-1]).strip(),
        "\n".join(lines[1:-1]).strip(),
    ]
    return [*cut, *(version.replace("*", "") for version in cut)]


def _parse_prompt(row: Mapping[str, Any], where: str) -> Prompt:
    for name, kind in (("prompt", str), ("instruction_id_list", list), ("kwargs", list)):
        if not isinstance(row.get(name), kind):
            raise UserError(f'{where}: "{name}" is {row.get(name)!r}, expected a {kind.__name__}')
    if not isinstance(row.get("key"), str | int):
        raise UserError(f'{where}: "key" is {row.get("key")!r}, expected text or a number')
    ids, arguments = row["instruction_id_list"], row["kwargs"]
    if len(ids) != len(arguments):
        raise UserError(
            f"{where}: found {len(arguments)} kwargs for {len(ids)} constraints, expected one each"
        )
    for instruction_id, values in zip(ids, arguments, strict=True):
        if not isinstance(values, dict):
            raise UserError(f"{where}: kwargs has {values!r}, expected an object")
        try:
            resolve(instruction_id, values)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
    return Prompt(str(row["key"]), row["prompt"], tuple(ids), tuple(arguments))
