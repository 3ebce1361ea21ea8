"""Files become batches: columns, labels, lengths, and nothing is unpickled."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from quotientsharp.data import Batches, Reading, Table, class_numbers, make_batches, read_table
from quotientsharp.loading import UserError, load_model, task_of

from .conftest import classifier
from .test_loading import Bomb


def batches(root: Path, name: str, table: Table, **options: object) -> Batches:
    model = load_model(str(root / name))
    reading = Reading(**{"tokenizer": str(root / name), "batch_size": 2, **options})  # type: ignore[arg-type]
    return make_batches(table, model, task_of(model), reading)


def test_jsonl_csv_and_tsv_say_the_same(root: Path, tmp_path: Path) -> None:
    table = read_table(str(root / "texts.jsonl"))
    rows = list(zip(table.columns["text"], table.columns["label"], strict=True))
    for suffix, comma in ((".csv", ","), (".tsv", "\t")):
        path = tmp_path / f"texts{suffix}"
        path.write_text("\n".join([f"text{comma}label", *(f'"{text}"{comma}{label}' for text, label in rows)]))
        assert read_table(str(path)).columns == table.columns
    (tmp_path / "list.json").write_text(json.dumps([{"text": text, "label": label} for text, label in rows]))
    assert read_table(str(tmp_path / "list.json")).columns == table.columns


def test_texts_are_padded_and_labels_named_by_the_model(root: Path) -> None:
    table = read_table(str(root / "texts.jsonl"))
    made = batches(root, "bert", table, batch_size=6)
    (batch,) = made.batches
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0)).tolist()
    assert batch["labels"].tolist() == [int(table.columns["label"][i] == "positive") for i in order]
    lengths = [len(table.columns["text"][i].split()) + 2 for i in order]
    assert batch["attention_mask"].sum(1).tolist() == lengths
    assert batch["input_ids"].shape == (6, max(lengths))
    assert (made.used, made.total, made.notes) == (6, 6, [])


def test_long_texts_are_cut_and_counted(root: Path) -> None:
    made = batches(root, "bert", read_table(str(root / "texts.jsonl")), max_length=5)
    assert max(batch["input_ids"].shape[1] for batch in made.batches) == 5
    assert made.notes == ["3 texts were cut at 5 tokens (--max-length)."]


def test_the_draw_is_a_sample_that_the_seed_fixes(root: Path) -> None:
    table = Table("t", {"text": ["good"] * 90, "label": [0] * 45 + [1] * 45}, 90)
    one, two, other = (batches(root, "bert", table, examples=40, batch_size=8, seed=seed) for seed in (0, 0, 1))
    labels = [torch.cat([batch["labels"] for batch in made.batches]).tolist() for made in (one, two, other)]
    assert labels[0] == labels[1] != labels[2]
    assert 10 < sum(labels[0]) < 30, "a file sorted by label still gives mixed batches"


def test_a_rest_is_left_out_and_told(root: Path) -> None:
    table = Table("t", {"text": ["good"] * 7, "label": [0] * 7}, 7)
    made = batches(root, "bert", table, batch_size=3)
    assert [len(batch["labels"]) for batch in made.batches] == [3, 3]
    assert made.notes == ["1 examples do not fill a batch of 3 and were left out."]
    assert len(batches(root, "bert", table, batch_size=30).batches[0]["labels"]) == 7


def test_pairs_of_texts(root: Path) -> None:
    table = Table("t", {"premise": ["the film"] * 2, "hypothesis": ["it is good"] * 2, "label": [0, 1]}, 2)
    (batch,) = batches(root, "bert", table).batches
    assert batch["input_ids"].shape == (2, 8)
    assert batch["token_type_ids"].sum(1).tolist() == [4, 4]
    table = Table("t", {"one": ["the film"] * 2, "two": ["it is good"] * 2, "kind": [0, 1]}, 2)
    (again,) = batches(root, "bert", table, input_column="one", pair_column="two", label_column="kind").batches
    assert torch.equal(batch["input_ids"], again["input_ids"])


def test_a_language_model_predicts_no_padding(root: Path) -> None:
    table = read_table(str(root / "texts.jsonl"))
    (batch,) = batches(root, "gpt2", table, batch_size=6).batches
    assert torch.equal(batch["labels"] == -100, batch["attention_mask"] == 0)
    assert torch.equal(batch["labels"][batch["attention_mask"] == 1], batch["input_ids"][batch["attention_mask"] == 1])


def test_regression_takes_numbers(root: Path) -> None:
    model = classifier(num_labels=1, id2label={0: "score"}, label2id={"score": 0})
    table = Table("t", {"text": ["good", "bad"], "label": ["0.5", "-1"]}, 2)
    reading = Reading(tokenizer=str(root / "bert"))
    (batch,) = make_batches(table, model, "text-classification", reading).batches
    assert sorted(batch["labels"].tolist()) == [-1.0, 0.5]
    with pytest.raises(UserError, match="MODEL is a regression, so 'label' must hold numbers"):
        make_batches(Table("t", {"text": ["a"], "label": ["x"]}, 1), model, "text-classification", reading)


def test_images_as_floats_bytes_and_gray(root: Path) -> None:
    rng = np.random.default_rng(0)
    bytes_ = rng.integers(0, 256, (4, 8, 8, 3), dtype=np.uint8)
    scaled = (bytes_.astype(np.float32) / 255 - 0.5) / 0.5
    labels = np.array([0, 1, 2, 0])
    forms = (bytes_, bytes_.transpose(0, 3, 1, 2), scaled, scaled.transpose(0, 3, 1, 2).astype(">f8"))
    made = [batches(root, "vit", Table("t", {"images": x, "labels": labels}, 4), batch_size=4) for x in forms]
    for other in made[1:]:
        torch.testing.assert_close(made[0].batches[0]["pixel_values"], other.batches[0]["pixel_values"])
    gray = batches(root, "vit", Table("t", {"x": bytes_[..., 0], "y": labels}, 4), batch_size=4).batches[0]
    assert torch.equal(gray["pixel_values"][:, 0], gray["pixel_values"][:, 2])
    assert torch.equal(gray["pixel_values"][:, 0], made[0].batches[0]["pixel_values"][:, 0])


def test_arrays_for_a_model_of_ones_own() -> None:
    x, y = np.random.default_rng(0).normal(size=(6, 3)), np.arange(6) % 2
    model = nn.Linear(3, 2)
    made = make_batches(Table("t", {"x": x, "y": y}, 6), model, None, Reading(batch_size=6)).batches[0]
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(made[0], torch.from_numpy(x).float()[order])
    assert made[1].tolist() == y[order.numpy()].tolist()


def test_arrays_under_the_names_of_the_arguments(root: Path) -> None:
    ids = np.array([[2, 5, 3, 0], [2, 6, 7, 3]])
    table = Table("t", {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int32), "junk": ids}, 2)
    (batch,) = batches(root, "gpt2", table).batches
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert (batch["labels"] == -100).sum() == 1
    with pytest.raises(UserError, match="gives token 103, and MODEL has 20 tokens"):
        batches(root, "gpt2", Table("t", {"input_ids": ids + 96}, 2))


@pytest.mark.parametrize(
    ("values", "classes", "known", "expected"),
    [
        ([1, 0, 2], 3, {}, [1, 0, 2]),
        (["1", "0", "2.0"], 3, {}, [1, 0, 2]),
        ([True, False], 2, {}, [1, 0]),
        (["pos", "neg"], 2, {"neg": 0, "pos": 1}, [1, 0]),
        (["pos", "neg"], 2, {"pos": 0, "neg": 1}, [0, 1]),
        (["1", "2"], 2, {"1": 0, "2": 1}, [0, 1]),
        (["pos", "neg"], 2, {"LABEL_0": 0, "LABEL_1": 1}, [1, 0]),
        (np.array(["b", "a"]), None, {}, [1, 0]),
    ],
)  # fmt: skip
def test_labels(values: list[object], classes: int | None, known: dict[str, int], expected: list[int]) -> None:
    table = Table("t", {"label": values}, len(values))
    numbers, notes = class_numbers(table, "label", classes, known)
    assert numbers.tolist() == expected
    guessed = isinstance(values[0], str) and not set(values) & set(known) and not str(values[0])[0].isdigit()
    assert bool(notes) == guessed


@pytest.mark.parametrize(
    ("values", "classes", "known", "words"),
    [
        ([0, 5], 3, {}, "holds 5 in 'label', and the classes of MODEL are 0 to 2"),
        ([0, -1], 3, {}, "holds -1"),
        (["pos", "none"], 2, {"neg": 0, "pos": 1}, "holds 'none' in 'label', and the classes .* are 'neg', 'pos'"),
        (["a", "b", "c"], 2, {"LABEL_0": 0, "LABEL_1": 1}, "the classes of MODEL are 2 in number"),
        (["a", None], 2, {}, "no label in 'label' of example 2"),
        ([0.5, 1], 2, {"neg": 0, "pos": 1}, "holds '0.5'"),
    ],
)  # fmt: skip
def test_labels_that_do_not_fit(values: list[object], classes: int, known: dict[str, int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        class_numbers(Table("t", {"label": values}, len(values)), "label", classes, known)


def test_npz_never_unpickles(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    bomb = np.array([Bomb(mark)], dtype=object)
    np.savez(tmp_path / "bomb.npz", x=bomb, y=np.arange(1))
    with pytest.raises(UserError, match="pickled Python objects, which are never loaded"):
        read_table(str(tmp_path / "bomb.npz"))
    (tmp_path / "plain.npz").write_bytes(bomb.dumps())
    with pytest.raises(UserError, match="pickled Python objects, which are never loaded"):
        read_table(str(tmp_path / "plain.npz"))
    assert not mark.exists()
    np.load(tmp_path / "bomb.npz", allow_pickle=True)["x"]
    assert mark.exists(), "the bomb works where pickles are trusted"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '{"text": "x"}\nno', "line 2 is not JSON"),
        ("a.jsonl", "[1]", "entry 1 is not an object"),
        ("a.jsonl", "", "holds no examples"),
        ("a.csv", "text,label\n", "holds no examples"),
        ("a.csv", "text,label\na,b,c\n", "row 1 has more fields"),
        ("a.txt", "", r"must be a \.jsonl"),
        ("a.npz", "not a zip", "cannot be read"),
        ("b.csv", None, "does not exist"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: str | None, words: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=words):
        read_table(str(tmp_path / name))


@pytest.mark.parametrize(
    ("columns", "options", "words"),
    [
        (
            {"words": ["a"], "label": [0]},
            {},
            r"has no column 'text' or .*; it has 'words', 'label', and --input-column",
        ),
        ({"text": ["a"]}, {}, "--label-column says which"),
        ({"text": ["a"], "label": [0]}, {"pair_column": "b"}, "has no column 'b'.*--pair-column"),
        ({"text": [" "], "label": [0]}, {}, "has no text in 'text' of example 1"),
        ({"text": ["a"], "label": [0]}, {"tokenizer": None}, "--tokenizer FOLDER says"),
        ({"text": ["a"], "label": [0]}, {"tokenizer": "."}, r"tokenizer of '\.' cannot be loaded"),
    ],
)
def test_columns_that_do_not_fit(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    columns: dict[str, list[object]], options: dict[str, object], words: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=words):
        batches(root, "bert", Table("t", columns, 1), **options)


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"x": np.zeros((2, 3), np.uint8), "y": np.zeros(2, int)}, "'x' holds bytes"),
        ({"x": np.zeros((2, 3)), "y": np.zeros(3, int)}, "entries in"),
        ({"x": np.array(["a", "b"]), "y": np.zeros(2, int)}, "where numbers are needed"),
        ({"x": [1, 2], "y": [0, 0]}, r"must be an \.npz file"),
    ],
)
def test_arrays_that_do_not_fit(columns: dict[str, object], words: str) -> None:
    length = max(len(column) for column in columns.values())  # type: ignore[arg-type]
    with pytest.raises(UserError, match=words):
        make_batches(Table("t", columns, length), nn.Linear(3, 2), None, Reading())


def test_images_that_do_not_fit(root: Path, tmp_path: Path) -> None:
    table = Table("t", {"images": np.zeros((2, 8, 8), np.float32), "labels": np.zeros(2, int)}, 2)
    with pytest.raises(UserError, match=r"must be \(examples, 3, height, width\), not \(2, 8, 8\)"):
        batches(root, "vit", table)
    table = Table("t", {"images": np.zeros((2, 8, 8), np.uint8), "labels": np.zeros(2, int)}, 2)
    with pytest.raises(UserError, match=r"no preprocessor_config\.json to say how to scale them"):
        batches(root, "vit", table, tokenizer=str(tmp_path))
