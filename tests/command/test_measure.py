"""The command line as a user meets it: the right numbers, readable output, one sentence for a mistake."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import quotientsharp as qs
from quotientsharp import show
from quotientsharp.cli import main
from quotientsharp.data import Reading, make_batches, read_table
from quotientsharp.loading import load_model
from quotientsharp.measure import _notes


def run(*words: object) -> int:
    return main(["measure", *map(str, words)])


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def test_text_classification(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "out.png"
    data = root / "texts.jsonl"
    assert (
        run(root / "bert", "--data", data, "--rhos", "0.05,0.01", "--batch-size", 3, "--json", out, "--plot", plot) == 0
    )
    report = json.loads(out.read_text())
    model = load_model(str(root / "bert"))
    reading = Reading(batch_size=3, tokenizer=str(root / "bert"))
    batches = make_batches(read_table(str(data)), model, "text-classification", reading).batches
    expected = qs.sharpness(model, batches, rhos=[0.01, 0.05])
    assert [result["rho"] for result in report["results"]] == [0.01, 0.05]
    assert [result["value"] for result in report["results"]] == expected.values
    assert report["task"] == "text-classification"
    assert report["arguments"]["batch_size"] == 3
    assert plot.stat().st_size > 10_000
    text = capsys.readouterr().out
    assert f"{expected[1].value:.4g}" in text
    assert "bert.encoder.layer.0.attention.vo" in text
    assert max(map(len, text.splitlines())) <= max(80, len(str(out)) + 10, len(str(data)) + 120)


def test_language_model(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(root / "gpt2", "--data", root / "texts.jsonl", "--geometry", "adaptive", "--dtype", "float64") == 0
    model = load_model(str(root / "gpt2"), dtype=torch.float64)
    batches = make_batches(
        read_table(str(root / "texts.jsonl")), model, "causal-lm", Reading(tokenizer=str(root / "gpt2"))
    ).batches
    value = qs.sharpness(model, batches, geometry="adaptive").value
    text = capsys.readouterr().out
    assert f"{value:.4g}" in text
    assert "adaptive sharpness:" in text


def test_images(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    data = tmp_path / "images.npz"
    np.savez(data, pixel_values=rng.normal(size=(8, 3, 8, 8)).astype(np.float32), labels=rng.integers(0, 3, 8))
    assert run(root / "vit", "--data", data, "--metric", "0.5", "--retraction", "first_order") == 0
    assert "metric 0.5, retraction first_order" in capsys.readouterr().out
    assert run(root / "vit", "--data", data, "--loss", "logit-normalized", "--geometry", "euclidean") == 0
    text = capsys.readouterr().out
    model = load_model(str(root / "vit"))
    batches = make_batches(read_table(str(data)), model, "image-classification", Reading()).batches
    value = qs.sharpness(model, batches, geometry="euclidean", loss="logit_normalized").value
    assert f"{value:.4g}" in text


FACTORY = """
import torch
from torch import nn
def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
def half():
    return make().bfloat16()
def forget():
    return nn.ReLU()
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model of one's own and its data, to work in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_model", raising=False)
    (tmp_path / "own_model.py").write_text(FACTORY)
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", x=rng.normal(size=(40, 3)), y=rng.integers(0, 2, 40))
    np.savez(tmp_path / "wide.npz", x=rng.normal(size=(40, 5)), y=rng.integers(0, 2, 40))
    np.savez(tmp_path / "classes.npz", x=rng.normal(size=(40, 3)), y=rng.integers(0, 9, 40))
    return tmp_path


def test_a_model_of_ones_own(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("own_model:make", "--data", "d.npz", "--plot", "p.svg", "--batch-size", 20) == 0
    assert (here / "p.svg").read_text().startswith("<?xml")
    text, err = capsys.readouterr()
    assert not err, "no progress where stderr is no terminal"
    assert "own_model:make on 40 examples of d.npz, loss " in text
    assert "rescaling" in text
    assert run("own_model:half", "--data", "d.npz") == 0
    assert "note: The weights are bfloat16 and were converted to float32." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere", "--data", "d.npz"], "MODEL must be a local Hugging Face folder"),
        (["own_model:make", "--data", "none.npz"], "--data 'none.npz' does not exist"),
        (["own_model:make", "--data", "wide.npz"], "MODEL does not take what --data gives (inputs (32, 5))"),
        (["own_model:make", "--data", "classes.npz"], "MODEL does not take what --data gives"),
        (["own_model:forget", "--data", "d.npz"], "has no weights to move"),
        (["own_model:make", "--data", "d.npz", "--json", "no/where.json"], "--json 'no/where.json' cannot be written"),
        (["own_model:make", "--data", "d.npz", "--plot", "p.gif"], "--plot must end with .png, .svg, .pdf"),
        (["own_model:make", "--data", "d.npz", "--device", "potato"], "--device 'potato' is not there"),
        (["own_model:make", "--data", "d.npz", "--device", "cuda:77"], "--device 'cuda:77' is not there"),
        (["{root}/headless", "--data", "d.npz"], "has no weights for"),
        (["{root}/bert", "--data", "d.npz"], "has no column 'text'"),
        (["{root}/bare", "--data", "{root}/texts.jsonl"], "is a BertModel, which has no loss of its own; --task"),
        (["{root}/bert", "--data", "{root}/texts.jsonl", "--task", "causal-lm"], "choose another --task"),
    ],
)
def test_mistakes(
    root: Path, here: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:  # fmt: skip
    from .test_loading import _without_head

    load_model(str(_without_head(root))).bert.save_pretrained(root / "bare")
    assert run(*(word.format(root=root) for word in words)) == 2
    out, err = capsys.readouterr()
    assert not out
    assert message in err
    assert err.count("\n") == 1
    assert err.startswith("quotientsharp: ")
    assert err.endswith(".\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["m"], "--data"),
        (["m", "--data", "d", "--rho", "-1"], "argument --rho: must be a positive number such as 0.05, not '-1'"),
        (["m", "--data", "d", "--rho", "x"], "must be a positive number"),
        (["m", "--data", "d", "--rhos", ","], "argument --rhos: must be numbers such as 0.01,0.05"),
        (["m", "--data", "d", "--rho", "1", "--rhos", "1"], "not allowed with"),
        (["m", "--data", "d", "--steps", "0"], "argument --steps: must be a whole number of at least 1, not '0'"),
        (["m", "--data", "d", "--metric", "2"], "argument --metric: must be inv, mix or a number from 0 (inv) to 1"),
        (["m", "--data", "d", "--geometry", "flat"], "argument --geometry: invalid choice: 'flat'"),
        (["m", "--data", "d", "--tolerance", "-0.1"], "argument --tolerance"),
        (["m", "--data", "d", "--loss", "mse"], "argument --loss: invalid choice"),
    ],
)
def test_arguments_that_cannot_be(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stop:
        run(*words)
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_an_error_inside_is_not_hidden(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("quotientsharp.measure.make_batches", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        run("own_model:make", "--data", "d.npz")


def test_interrupt(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("quotientsharp.measure.make_batches", stop)
    assert run("own_model:make", "--data", "d.npz") == 130
    assert capsys.readouterr() == ("", "quotientsharp: interrupted.\n")


def event(batch: int, step: int, *, steps: int = 20, done: bool = False) -> Any:
    return SimpleNamespace(batch=batch, rho=0.1, restart=0, step=step, steps=steps, value=0.0, done=done)


def test_time_left_is_a_bound_and_then_a_mean() -> None:
    now = [0.0]
    left = show.TimeLeft(3, clock=lambda: now[0])
    assert left.seconds() is None
    for step in range(1, 5):
        now[0] += 1.0
        left.update(event(0, step))
    assert left.bound
    assert left.seconds() == pytest.approx(3 * 20 - 4)  # a second a step, all steps of all batches
    left.update(event(0, 20, done=True))
    now[0] += 1.0
    left.update(event(1, 1))
    assert not left.bound
    assert left.seconds() == pytest.approx(4 + 3)  # four steps a batch: three of this one, four of the last
    for step in range(2, 8):
        now[0] += 1.0
        left.update(event(1, step))
    assert left.seconds() == pytest.approx(4), "a batch that takes longer than the mean is about to end"


def test_notes_say_at_which_radius_they_hold() -> None:
    one, two = (SimpleNamespace(rho=rho, notes=notes) for rho, notes in ((0.1, ["a", "b"]), (0.2, ["a"])))
    results: Any = [one, two]
    assert _notes(results) == ["a", "at rho = 0.1: b"]


def test_clock_text() -> None:
    assert [show.clock_text(seconds) for seconds in (0, 0.2, 59.5, 61, 7200)] == [
        "0:00",
        "0:01",
        "1:00",
        "1:01",
        "2:00:00",
    ]


def test_only_the_largest_blocks_are_shown() -> None:
    result: Any = SimpleNamespace(value=10.0, by_block={f"b{i}": i / 10 for i in range(14)})
    table = show.block_table(result)
    assert table.row_count == show.BLOCKS + 1
    cells = [list(column.cells) for column in table.columns]
    assert str(cells[0][0]) == "b13"
    assert cells[0][-1] == "4 others"
    assert cells[2][-1] == "0.6"


def test_a_factory_with_a_task_and_a_tokenizer(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "renamed_model.py").write_text(
        "import transformers as tf\n"
        "class Mine(tf.BertForSequenceClassification):\n    pass\n"
        f"def make():\n    return Mine.from_pretrained({str(root / 'bert')!r})\n"
    )
    words = ["renamed_model:make", "--data", root / "texts.jsonl", "--geometry", "adaptive"]
    assert run(*words) == 2
    assert "--task loads it with a head" in capsys.readouterr().err
    assert run(*words, "--task", "text-classification", "--tokenizer", root / "bert") == 0
    first = capsys.readouterr().out.splitlines()[2:]
    assert run(root / "bert", *words[1:]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == first
