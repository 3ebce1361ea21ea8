"""The examples run and assert what they show."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def test_compare_retractions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["compare_retractions.py", "--out", str(tmp_path)])
    runpy.run_path(str(ROOT / "examples" / "compare_retractions.py"), run_name="__main__")
    assert (tmp_path / "compare_retractions.png").stat().st_size > 10_000
    assert capsys.readouterr().out.count("pymanopt TrustRegions") == 6


def test_train_on_quotient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr("sys.argv", ["train_on_quotient.py", "--out", str(tmp_path), "--quick"])
    for _ in range(2):  # the second time everything is on disk
        runpy.run_path(str(ROOT / "examples" / "train_on_quotient.py"), run_name="__main__")
    assert len((tmp_path / "train_on_quotient.jsonl").read_text().splitlines()) == 15
    assert capsys.readouterr().out.count("geodesic SAM on Riemannian Adam") == 4


def test_the_readme_code_runs_and_learns() -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    torch.manual_seed(0)
    names: dict[str, object] = {}
    exec(code.group(1), names)
    loss, target = names["loss"], names["target"]
    assert isinstance(loss, torch.Tensor)
    assert isinstance(target, torch.Tensor)
    assert float(loss.detach()) < 0.1 * float(target.square().mean())
