"""Win rates of candidates' answers to battles: reads, scores, compares.

A candidate is a file of answers (`id` and `response`, one for each battle), or the battles' own recorded
`answer`. Each meets the same recorded answers; two candidates are compared by a paired t-test on their scores
battle by battle.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hymoe.engine.errors import UserError
from hymoe.engine.eval.battles import Battle, Side, read_battles
from hymoe.engine.eval.instruct import read_responses
from hymoe.engine.eval.intervals import wilson
from hymoe.engine.eval.paired import ASSUMPTIONS, PairedTest, holm, paired_t, scipy_stats
from hymoe.engine.eval.scores import Progress, ScoreCache, Scorer, score_all
from hymoe.engine.eval.winrate import BUCKETS, RESAMPLES, WinRate, win_rate

RECORDED = "the battles' own answers"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """How candidates are measured."""

    against: Side = "opponent"
    """The recorded answer that has to be beaten; winner: the one that the voter chose."""
    buckets: tuple[int, ...] = BUCKETS
    """Rising bounds, in characters of the candidate's answer, between which battles are also counted apart."""
    resamples: int = RESAMPLES
    """Of the bootstrap that gives the intervals."""
    seed: int = 0
    """Of the bootstrap."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One set of answers with its scores."""

    name: str
    scores: list[float]  # in the order of Judgement.ids
    result: WinRate


@dataclass(frozen=True, slots=True)
class Judgement:
    """What was measured."""

    scorer: str
    rules: Rules
    ids: list[str]  # of the battles that count
    recorded_scores: list[float]
    candidates: list[Candidate]
    tests: list[PairedTest]  # the first candidate against each other one, in order
    adjusted: list[float]  # Holm's p values of the tests
    left_out: dict[str, int]  # battles by reason
    agreement: tuple[int, int] | None  # the scorer and the voter agree, of decisive battles

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        made: dict[str, Any] = {
            "scorer": self.scorer,
            "against": self.rules.against,
            "ties": "half a win in every rate, counted apart",
            "left_out": self.left_out,
            "candidates": [
                {"answers": candidate.name, **candidate.result.as_dict()}
                for candidate in self.candidates
            ],
            "battles": [
                {
                    "id": id_,
                    "recorded": recorded,
                    "scores": [candidate.scores[place] for candidate in self.candidates],
                }
                for place, (id_, recorded) in enumerate(
                    zip(self.ids, self.recorded_scores, strict=True)
                )
            ],
        }
        if self.tests:
            made["paired_tests"] = [
                {
                    "first": self.candidates[0].name,
                    "second": other.name,
                    **test.as_dict(),
                    "p_holm": p,
                }
                for other, test, p in zip(
                    self.candidates[1:], self.tests, self.adjusted, strict=True
                )
            ]
            made["assumptions"] = ASSUMPTIONS
        if self.agreement is not None:
            agreed, decisive = self.agreement
            made["agreement_with_voters"] = {
                "agreed": agreed,
                "decisive": decisive,
                "rate": agreed / decisive,
                "interval": list(wilson(agreed, decisive)),
            }
        return made


def judge(
    battles_file: Path,
    answers: Sequence[Path],
    scorer: Scorer,
    cache: ScoreCache,
    rules: Rules,
    progress: Progress | None = None,
) -> Judgement:
    """Measures each file of answers, or the battles' own answers where there is none.

    Raises:
        UserError: a bad file, a battle without an answer, a conversation that the scorer cannot take.
    """
    if len(answers) > 1:
        scipy_stats()  # a missing package is said now, not after the last score
    battles, not_text = read_battles(battles_file)
    wanted = [battle.recorded(rules.against) for battle in battles]
    kept = [pair for pair in zip(battles, wanted, strict=True) if pair[1] is not None]
    left_out = {"answer_is_no_text": len(not_text), "no_winner": len(battles) - len(kept)}
    if not kept:
        raise UserError(f"{battles_file}: no battle has a winner to measure against")
    if not answers and rules.against != "opponent":
        raise UserError(
            "--against: the battles' own answers can only be measured against opponents"
        )
    texts = {RECORDED: [battle.answer for battle, _ in kept]}
    if answers:
        everything = [battle.id for battle in battles]
        found = {
            str(path): read_responses(path, everything, "battles", not_text) for path in answers
        }
        texts = {name: [given[b.id] for b, _ in kept] for name, given in found.items()}
    recorded = [text or "" for _, text in kept]
    sides = [recorded, *texts.values()]
    turns = [
        battle.turns(text) for side in sides for (battle, _), text in zip(kept, side, strict=True)
    ]
    scores = score_all(scorer, turns, cache, progress)
    rows = [scores[start : start + len(kept)] for start in range(0, len(scores), len(kept))]
    candidates = [
        Candidate(name, row, _result(row, rows[0], side, recorded, rules))
        for (name, side), row in zip(texts.items(), rows[1:], strict=True)
    ]
    tests = [paired_t(candidates[0].scores, other.scores) for other in candidates[1:]]
    return Judgement(
        scorer=scorer.name,
        rules=rules,
        ids=[battle.id for battle, _ in kept],
        recorded_scores=rows[0],
        candidates=candidates,
        tests=tests,
        adjusted=holm([test.p_value for test in tests]),
        left_out={reason: count for reason, count in left_out.items() if count},
        agreement=None if answers else _agreement([b for b, _ in kept], rows[1], rows[0]),
    )


def _result(
    scores: list[float], beaten: list[float], side: list[str], recorded: list[str], rules: Rules
) -> WinRate:
    return win_rate(
        scores,
        beaten,
        [len(text) for text in side],
        [len(text) for text in recorded],
        buckets=rules.buckets,
        resamples=rules.resamples,
        seed=rules.seed,
    )


def _agreement(
    battles: list[Battle], mine: list[float], theirs: list[float]
) -> tuple[int, int] | None:
    """Of the battles with a winner, those in which the scorer puts the same side above the other."""
    decisive = [
        (battle.winner == "mine", a - b)
        for battle, a, b in zip(battles, mine, theirs, strict=True)
        if battle.winner in ("mine", "theirs")
    ]
    agreed = sum(margin > 0 if is_mine else margin < 0 for is_mine, margin in decisive)
    return (agreed, len(decisive)) if decisive else None
