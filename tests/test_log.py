"""What long work says while it lasts."""

from pathlib import Path

import pytest

from hymoe.engine import log


def test_progress_speaks_on_rank_0_alone_and_only_of_long_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 1.0, 6.0, 7.0] * 2)
    monkeypatch.setattr(log.time, "perf_counter", lambda: next(clock))
    for rank in (0, 1):
        report = log.RunLog(tmp_path, 1, 1, rank).progress("loading")
        for done in (1, 3, 4):
            report(done * 10**9, 4 * 10**9)
    assert capsys.readouterr().out.splitlines() == ["loading  rank 0: 3.0 of 4.0 GB, 0.50 GB/s"]
