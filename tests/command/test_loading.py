"""Models by name, and what must never happen on the way."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
import transformers as tf

from quotientsharp.loading import UserError, load_model, task_of

from .conftest import classifier


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.mark),)


def bin_folder(folder: Path, extra: dict[str, object]) -> Path:
    """A folder whose only weights are a pickle."""
    model = classifier()
    model.config.architectures = ["BertForSequenceClassification"]
    model.config.save_pretrained(folder)
    torch.save({**model.state_dict(), **extra}, folder / "pytorch_model.bin")
    return folder


def test_a_pickle_of_tensors_is_read(tmp_path: Path) -> None:
    model = load_model(str(bin_folder(tmp_path, {})), complete=True)
    for name, value in classifier().state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    assert not model.training


def test_a_pickle_with_code_is_never_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    bomb = Bomb(mark)
    with pytest.raises(UserError, match="never run; save them as safetensors"):
        load_model(str(bin_folder(tmp_path, {"x": bomb})))
    assert not mark.exists()
    pickle.loads(pickle.dumps(bomb))
    assert mark.exists(), "the bomb works where pickles are trusted"


@pytest.mark.parametrize("kind", ["unknown", "bert"])
def test_code_beside_the_weights_is_never_run(tmp_path: Path, kind: str) -> None:
    """An unknown model cannot be loaded without its code; a known one is loaded without it."""
    bin_folder(tmp_path, {})
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_type"] = kind
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForSequenceClassification": "own.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    mark = tmp_path / "mark"
    (tmp_path / "own.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n")
    if kind == "bert":
        assert type(load_model(str(tmp_path))) is tf.BertForSequenceClassification
    else:
        with pytest.raises(UserError, match="runs only with --trust-remote-code"):
            load_model(str(tmp_path))
    assert not mark.exists()


def test_a_kernel_from_the_hub_is_code(tmp_path: Path) -> None:
    bin_folder(tmp_path, {})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "attn_implementation": "someone/kernel"}))
    with pytest.raises(UserError, match="attention kernel from the hub"):
        load_model(str(tmp_path))


def test_missing_weights_are_refused_where_they_matter(root: Path) -> None:
    with pytest.raises(
        UserError, match=r"has no weights for classifier\.bias, so the result would be that of a random"
    ):
        load_model(str(_without_head(root)), complete=True)
    assert task_of(load_model(str(_without_head(root)))) == "text-classification"


def _without_head(root: Path) -> Path:
    folder = root / "headless"
    model = classifier()
    model.bert.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["BertForSequenceClassification"]}))
    return folder


def test_tasks(root: Path) -> None:
    kinds = {"bert": "text-classification", "gpt2": "causal-lm", "vit": "image-classification"}
    assert {name: task_of(load_model(str(root / name))) for name in kinds} == kinds
    assert task_of(torch.nn.Linear(2, 2)) is None


def test_a_hub_name_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(name: str, **options: object) -> None:
        assert options == {"local_files_only": False, "trust_remote_code": False}
        raise OSError(f"no {name} there\nsecond line")

    monkeypatch.setattr(tf.AutoConfig, "from_pretrained", refuse)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=r"from the Hugging Face hub, and there is no such folder here: no some/model there\.$"
    ):
        load_model("some/model")
