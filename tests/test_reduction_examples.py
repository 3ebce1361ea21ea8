"""The examples on breaking and reducing run, on little data; their full runs are in docs/."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    monkeypatch.setattr("sys.argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.filterwarnings("ignore")
def test_symmetry_breaking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat , and the dog did not . " * 400)
    options = ("--text", str(text), "--out", str(tmp_path), "--seeds", "1", "--steps", "3", "--optimizers", "ECD")
    run(monkeypatch, "symmetry_breaking.py", *options)
    rows = (tmp_path / "symmetry_breaking.csv").read_text()
    assert rows.count("\n") == 1 + 2 * (4 + 1)
    assert "redundant parameters: 4096 symmetric, 3840 broken" in capsys.readouterr().out
    run(monkeypatch, "symmetry_breaking.py", *options)  # nothing is run twice
    assert (tmp_path / "symmetry_breaking.csv").read_text() == rows
    for picture in ("symmetry_breaking.png", "amplified_tokens.png"):
        assert (tmp_path / picture).stat().st_size > 10_000


@pytest.mark.filterwarnings("ignore")
def test_align_and_interpolate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    run(monkeypatch, "align_and_interpolate.py", "--out", str(tmp_path), "--pairs", "1", "--steps", "10")
    assert "all of them" in capsys.readouterr().out
    assert (tmp_path / "align_and_interpolate.csv").read_text().count("\n") == 5
    assert (tmp_path / "align_and_interpolate.png").stat().st_size > 10_000


def test_reduce_a_model(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "reduce_a_model.py")
    assert "256 fewer" in capsys.readouterr().out
