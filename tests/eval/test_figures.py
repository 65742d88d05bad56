"""Headline figures of what evaluate.py wrote."""

from pathlib import Path

from hymoe.engine.eval.figures import read_figures
from hymoe.engine.eval.report import write_json
from tests.hf_folder import refused

WIN_RATE = {
    "battles_file": "b.jsonl",
    "scorer": "length",
    "candidates": [
        {
            "answers": "a.jsonl",
            "battles": 4,
            "rate": 0.75,
            "rate_interval": [0.5, 1.0],
            "mean_margin": 2.0,
            "margin_interval": [1.0, 3.0],
            "length_controlled_rate": None,
            "length_controlled_interval": None,
        }
    ],
}
SWEEP = {
    "rule": "the best",
    "chosen": "a/b/1.05",
    "splits": {
        "choose": {
            "measure": "win rate",
            "items": 65,
            "settings": [
                {"setting": "a/b/1", "value": 0.6, "interval": [0.5, 0.7]},
                {"setting": "a/b/1.05", "value": 0.7, "interval": [0.6, 0.8]},
            ],
        }
    },
}


def test_figures_of_win_rates_and_sweeps(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, WIN_RATE)
    kind, figures = read_figures(path)
    assert kind == "win-rate"
    assert [f["value"] for f in figures] == [0.75, 2.0, None]
    assert {f["count"] for f in figures} == {4}
    write_json(path, SWEEP)
    kind, figures = read_figures(path)
    assert kind == "sweep"
    assert [(f["value"], f["count"]) for f in figures] == [(0.7, 65)]
    write_json(path, {"battles_file": "b", "candidates": [{}]})
    refused(lambda: read_figures(path), str(path), "win-rate")
