"""A user's mistake is one clear sentence; large models stay on the meta device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from quotientsharp.cli import main
from quotientsharp.symmetry import find_symmetries

from . import breakers, zoo


def test_not_deterministic() -> None:
    with pytest.raises(ValueError, match="Noisy is not deterministic in eval mode"):
        find_symmetries(breakers.Noisy(), torch.randn(2, 16))


def test_inputs_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"^example_inputs do not fit Attention: .*[.]$"):
        find_symmetries(breakers.Attention(), torch.randn(2, 24, 17))


def test_inputs_are_asked_for() -> None:
    with pytest.raises(ValueError, match=r"needs example_inputs for Attention"):
        find_symmetries(breakers.Attention())
    with pytest.raises(ValueError, match="must be a tensor, a tuple or a dict, not int"):
        find_symmetries(breakers.Attention(), 3)
    with pytest.raises(ValueError, match=r"must be a torch\.nn\.Module, not int"):
        find_symmetries(3)  # type: ignore[arg-type]


def test_a_model_that_cannot_be_exported_is_read_by_its_names(capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    found = find_symmetries(breakers.Unexportable(), torch.randn(2, 24, 16))
    assert [(b.kind, str(b.group), b.copies, b.verified) for b in found] == [
        ("qk", "GL(8)", 2, True), ("vo", "GL(8)", 2, True),
    ]  # fmt: skip
    assert found.note.startswith("Unexportable cannot be exported")
    assert "names" in found.table()
    assert capfd.readouterr() == ("", "")


def test_a_clip_that_rests_is_seen_without_a_graph() -> None:
    torch.manual_seed(0)
    found = find_symmetries(breakers.UnexportableClip(), torch.randn(2, 24, 16))
    assert [b.kind for b in found] == ["vo"]
    assert found.refused[0][0] == "qk"


class Stubborn(nn.Module):
    """Neither exports nor has usual names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if float(x.detach().sum()) < 1e9 else x


def test_nothing_to_go_by() -> None:
    found = find_symmetries(Stubborn(), torch.randn(3, 4))
    assert not list(found)
    assert "cannot be exported" in found.refused[0][1]


def test_unexportable_rotary_model_gets_the_rotary_group() -> None:
    """Names alone suggest GL; the numeric check leaves what the rotation allows."""

    class Rotary(breakers.Unexportable):
        def query(self, x: Tensor) -> Tensor:
            return breakers.rotate(x)

        key = query

    torch.manual_seed(0)
    found = find_symmetries(Rotary(), torch.randn(2, 24, 16))
    assert [(str(b.group), b.group.style) for b in found] == [("R(8)", "half"), ("GL(8)", "")]


def test_meta_device() -> None:
    with torch.device("meta"):
        model = tf.LlamaForCausalLM(
            tf.LlamaConfig(
                vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=2,
                num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
            )
        )  # fmt: skip
    found = find_symmetries(model)
    assert [(str(b.group), b.copies, b.verified) for b in found[::2]] == [
        ("R(128)", 8, False), ("GL(128)", 8, False), ("Rescaling", 14336, False),
    ]  # fmt: skip
    assert "check skipped" in found.table()
    assert all(p.is_meta for p in model.parameters())


def test_meta_device_refuses_what_only_a_check_could_tell() -> None:
    with torch.device("meta"):
        model = tf.Qwen3Model(tf.Qwen3Config(**zoo.GROUPED, head_dim=8))
    found = find_symmetries(model)
    assert {b.kind for b in found} == {"vo", "rescaling"}
    assert all("cannot be checked on the meta device" in reason for _, reason in found.refused)
    assert found.refused


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    zoo.build("bert").save_pretrained(tmp_path)  # type: ignore[operator]
    assert main(["symmetries", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "encoder.layer.1.attention.self.qk" in text
    assert "GL(8)" in text
    assert "parameters are redundant" in text


@pytest.mark.parametrize(
    ("name", "words"),
    [("nowhere", "neither"), ("no_such_module:make", "No module named"), (".", "config.json"), ("math:pi", "float")],
)
def test_command_line_mistakes(
    name: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["symmetries", name]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert words in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_command_line_factory(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\ndef make():\n    return nn.TransformerEncoderLayer(16, 4, 32)\n"
    )
    run = subprocess.run(
        [sys.executable, "-m", "quotientsharp", "symmetries", "mine:make"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "self_attn.qk" in run.stdout
    assert "Rescaling c > 0" in run.stdout
