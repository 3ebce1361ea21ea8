"""The demo in small, and moves along the orbit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as tf
from torch import nn

from quotientsharp import find_symmetries
from quotientsharp.cli import main
from quotientsharp.demo import GEOMETRIES, along_orbit
from quotientsharp.zoo import DigitsViT, digits, trained_digits_vit


def test_the_demo_shows_what_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["demo", "--quick", "--out", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "demo.png").stat().st_size > 20_000
    rows = {line[:14].strip(): line.split() for line in capsys.readouterr().out.splitlines()}
    for name in ("euclidean", "adaptive"):
        assert float(rows[name][-1]) > 2
    for name in ("geodesic inv", "geodesic mix"):
        assert rows[name][-1].startswith("1+")
        assert float(rows[name][-1][2:]) < 1e-9


@pytest.mark.parametrize("package", ["sklearn.datasets", "matplotlib.figure"])
def test_what_is_missing_is_named(
    package: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    assert main(["demo", "--out", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "pip install " in err
    assert err.count("\n") == 1


def test_the_small_transformer_learns_and_leaves_the_random_state() -> None:
    images, labels = digits()
    before = torch.get_rng_state()
    model = trained_digits_vit(images[:1500], labels[:1500], steps=150, width=16, depth=1)
    assert torch.equal(before, torch.get_rng_state())
    share = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean()
    assert share > 0.6
    again = trained_digits_vit(images[:1500], labels[:1500], steps=150, width=16, depth=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_along_orbit_leaves_the_model() -> None:
    torch.manual_seed(0)
    model = DigitsViT(width=8, heads=2, depth=1).double().eval()
    images, labels = torch.randn(16, 1, 8, 8).double(), torch.randint(10, (16,))
    found = find_symmetries(model, images)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kinds = {name: GEOMETRIES[name] for name in ("adaptive", "geodesic mix")}
    orbit = along_orbit(model, [(images, labels)], found, kinds, sizes=(0.01, 100.0))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert orbit.drift < 1e-10
    assert orbit.change("geodesic mix") < 1e-9
    assert orbit.change("adaptive") > 0.1


@pytest.mark.parametrize("size", [0.01, 1.0, -100.0])
@pytest.mark.parametrize("kind", ["attention", "relu", "rotary"])
def test_gaussian_moves_keep_the_function(kind: str, size: float) -> None:
    torch.manual_seed(0)
    if kind == "attention":
        model: nn.Module = DigitsViT(width=8, heads=2, depth=1)
        inputs = torch.randn(4, 1, 8, 8)
    elif kind == "relu":
        model, inputs = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3)), torch.randn(192, 6)
    else:
        config = tf.LlamaConfig(
            vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2,
        )  # fmt: skip
        model, inputs = tf.LlamaModel(config), torch.randint(50, (1, 96))
    model = model.double().eval()
    inputs = inputs if inputs.dtype == torch.int64 else inputs.double()
    found = find_symmetries(model, inputs)
    assert len(found)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def outputs() -> torch.Tensor:
        with torch.no_grad():
            made = model(inputs)
        return made if isinstance(made, torch.Tensor) else made[0]

    first = outputs()
    found.move_gaussian_(model, size, seed=1)
    torch.testing.assert_close(outputs(), first, rtol=1e-6, atol=1e-7 if kind == "rotary" else 1e-9)
    for block in found:
        ratio = block.read(model)[:, block.n :].norm() / block.read(before)[:, block.n :].norm()
        full = block.group.dim == block.h**2
        assert not full or abs(size) / 30 < ratio < abs(size) * 30, "H moves with the size of A"


def test_a_move_of_no_size_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))
    with pytest.raises(ValueError, match="size must be a finite number other than zero, not 0"):
        find_symmetries(model).move_gaussian_(model, 0)
