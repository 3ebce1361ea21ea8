"""Batches from a JSONL, CSV or npz file, as a model takes them. No file is ever unpickled."""

from __future__ import annotations

import csv
import json
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .loading import UserError, one_line, quiet_transformers
from .objective import to_device
from .symmetry.inputs import arguments_of

TEXTS = ("text", "sentence", "text_a", "sentence1", "premise", "question")
PAIRS = {"text": "text_b", "text_a": "text_b", "sentence1": "sentence2", "premise": "hypothesis"}
ARRAYS = ("x", "images", "pixel_values", "inputs")
LABELS = ("label", "labels", "y", "target", "targets")


@dataclass(frozen=True)
class Table:
    """A file as columns of equal length.

    Attributes:
        name: What the user typed.
        columns: Lists or arrays by name.
        length: Number of rows.
    """

    name: str
    columns: dict[str, Any]
    length: int

    def column(self, asked: str | None, usual: Sequence[str], flag: str) -> str:
        """Name of a column: the one asked for, or the first usual one that is there.

        Args:
            asked: The name that the user gave, if any.
            usual: Names to look for otherwise.
            flag: The argument that gives the name, for the message.

        Returns:
            The name.

        Raises:
            UserError: If there is no such column.
        """
        for name in [asked] if asked is not None else usual:
            if name in self.columns:
                return name
        has = ", ".join(map(repr, list(self.columns)[:8]))
        wanted = repr(asked) if asked is not None else " or ".join(map(repr, usual))
        raise UserError(f"--data {self.name!r} has no column {wanted}; it has {has}, and {flag} says which to take.")


@dataclass(frozen=True)
class Reading:
    """How a file is to be read.

    Attributes:
        batch_size: Examples in a batch.
        examples: At most so many are drawn.
        max_length: Texts are cut at so many tokens.
        seed: Seed of the draw.
        input_column: Column of the texts or arrays; a usual name if None.
        pair_column: Column of the second texts; a usual name if None.
        label_column: Column of the labels; a usual name if None.
        tokenizer: Folder or hub name of the tokenizer or image processor; None if there is none.
        trust_remote_code: Whether a tokenizer may bring code of its own.
    """

    batch_size: int = 32
    examples: int = 1024
    max_length: int = 128
    seed: int = 0
    input_column: str | None = None
    pair_column: str | None = None
    label_column: str | None = None
    tokenizer: str | None = None
    trust_remote_code: bool = False


@dataclass
class Batches:
    """What a file gave.

    Attributes:
        batches: Dicts as Hugging Face models take them, or pairs (inputs, targets).
        used: Examples in the batches.
        total: Examples in the file.
        notes: What the user should know about the reading.
    """

    batches: list[Any]
    used: int
    total: int
    notes: list[str] = field(default_factory=list)


def read_table(name: str) -> Table:
    """Read a file by its suffix.

    Args:
        name: A .jsonl, .json, .csv, .tsv or .npz file.

    Returns:
        Its columns.

    Raises:
        UserError: If it cannot be read, or is empty.
    """
    readers: dict[str, Callable[[Path], dict[str, Any]]] = {
        ".jsonl": _read_json, ".json": _read_json, ".csv": _read_csv, ".tsv": _read_csv, ".npz": _read_npz
    }  # fmt: skip
    path = Path(name)
    if path.suffix.lower() not in readers:
        raise UserError(f"--data must be a .jsonl, .json, .csv, .tsv or .npz file, and {name!r} is none.")
    try:
        columns = readers[path.suffix.lower()](path)
    except FileNotFoundError as error:
        raise UserError(f"--data {name!r} does not exist.") from error
    except (OSError, UnicodeError, ValueError, csv.Error, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise UserError(f"--data {name!r} cannot be read: {one_line(error)}") from error
    lengths = {key: len(values) for key, values in columns.items()}
    if not lengths or not max(lengths.values()):
        raise UserError(f"--data {name!r} holds no examples.")
    return Table(name, columns, max(lengths.values()))


def _read_json(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        rows = list(enumerate(json.loads(text), 1))
    else:
        rows = []
        for number, line in enumerate(text.split("\n"), 1):  # splitlines would also break at U+2028 inside a string
            if line.strip():
                try:
                    rows.append((number, json.loads(line)))
                except ValueError as error:
                    raise ValueError(f"line {number} is not JSON: {error}") from error
    for number, row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"entry {number} is not an object such as {{'text': ..., 'label': ...}}")
    names = dict.fromkeys(key for _, row in rows for key in row)
    return {name: [row.get(name) for _, row in rows] for name in names}


def _read_csv(path: Path) -> dict[str, Any]:
    csv.field_size_limit(2**31 - 1)
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        rows = list(reader)
    for number, row in enumerate(rows, 1):
        if None in row:
            raise ValueError(f"row {number} has more fields than the header")
    return {name: [row[name] for row in rows] for name in reader.fieldnames or ()}


def _read_npz(path: Path) -> dict[str, Any]:
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("it is a single array and no .npz archive")
            return {name: file[name] for name in file.files if file[name].ndim}
    except (ValueError, pickle.UnpicklingError) as error:
        if "allow_pickle" in str(error) or "pickle" in str(error).lower():
            raise ValueError("it holds pickled Python objects, which are never loaded; save plain arrays") from error
        raise


def make_batches(table: Table, model: nn.Module, task: str | None, reading: Reading) -> Batches:
    """Batches of a table for a model.

    Examples are drawn without replacement and in random order, since files are often sorted by label; a last batch
    that is not full is left out where there are others, because sharpness depends on the size of a batch.

    Args:
        table: The file.
        model: The model; its configuration gives the number of classes and their names.
        task: One of `quotientsharp.loading.TASKS`, or None for a model that takes ``inputs`` and gives logits.
        reading: How to read it.

    Returns:
        Batches on the model's device.

    Raises:
        UserError: If the file does not fit the model.
    """
    result = Batches([], 0, table.length)
    parameter = next(model.parameters(), torch.empty(0))
    select: Callable[[list[int]], Any]
    if isinstance(table.columns.get("input_ids"), np.ndarray) and "input_ids" in arguments_of(model):
        select = _select_named(table, model, task, reading, parameter.dtype)
    elif task in {"text-classification", "causal-lm"}:
        select = _select_texts(table, model, str(task), reading, parameter.dtype, result.notes)
    elif task == "image-classification":
        select = _select_images(table, model, reading, parameter.dtype, result.notes)
    else:
        select = _select_pairs(table, reading, parameter.dtype, result.notes)
    for rows in _draw(table.length, reading, result):
        result.batches.append(to_device(select(rows), parameter.device))
    return result


def _draw(length: int, reading: Reading, result: Batches) -> Iterator[list[int]]:
    """Rows of every batch."""
    order = torch.randperm(length, generator=torch.Generator().manual_seed(reading.seed))[: reading.examples].tolist()
    size = reading.batch_size
    rest = len(order) % size if len(order) > size else 0
    if rest:
        result.notes.append(f"{rest} examples do not fill a batch of {size} and were left out.")
        order = order[:-rest]
    result.used = len(order)
    for start in range(0, len(order), size):
        yield order[start : start + size]


def _array(table: Table, name: str, dtype: torch.dtype) -> Tensor:
    """A numeric column: integers as int64, anything else in the type of the model."""
    values = np.asarray(table.columns[name])
    if len(values) != table.length:
        raise UserError(f"--data {table.name!r} has {len(values)} entries in {name!r} and {table.length} in others.")
    if values.dtype.kind not in "biuf":
        raise UserError(f"--data {table.name!r} holds {values.dtype} in {name!r}, where numbers are needed.")
    tensor = torch.from_numpy(np.ascontiguousarray(values.astype(values.dtype.newbyteorder("="))))
    return tensor.to(dtype) if tensor.is_floating_point() else tensor.long()


def _select_named(
    table: Table, model: nn.Module, task: str | None, reading: Reading, dtype: torch.dtype
) -> Callable[[list[int]], dict[str, Tensor]]:
    """Arrays under the names of the model's own arguments."""
    takes = arguments_of(model)
    tensors = {name: _array(table, name, dtype) for name in table.columns if name in takes and name != "labels"}
    if task == "causal-lm" and "labels" not in table.columns:
        shown = tensors.get("attention_mask", torch.ones_like(tensors["input_ids"]))
        tensors["labels"] = tensors["input_ids"].masked_fill(shown == 0, -100)
    else:
        tensors["labels"] = _array(table, table.column(reading.label_column, LABELS, "--label-column"), dtype)
    _check_tokens(table, model, tensors["input_ids"])
    return lambda rows: {name: tensor[rows] for name, tensor in tensors.items()}


def _check_tokens(table: Table, model: nn.Module, ids: Tensor) -> None:
    lookup = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None  # type: ignore[operator]
    size = getattr(lookup, "num_embeddings", None)
    if size is not None and int(ids.max()) >= size:
        raise UserError(
            f"--data {table.name!r} gives token {int(ids.max())}, and MODEL has {size} tokens: the tokenizer is not its"
            " own."
        )


def _select_texts(
    table: Table, model: nn.Module, task: str, reading: Reading, dtype: torch.dtype, notes: list[str]
) -> Callable[[list[int]], dict[str, Tensor]]:
    """Texts through the tokenizer, padded to the longest of a batch."""
    tokenizer = _tokenizer(model, reading)
    column = table.column(reading.input_column, TEXTS, "--input-column")
    texts, pairs = _texts(table, column), None
    second = PAIRS.get(column)
    if reading.pair_column is not None or (second in table.columns and task == "text-classification"):
        pairs = _texts(table, table.column(reading.pair_column, (str(second),), "--pair-column"))
    labels = _labels(table, model, reading, dtype, notes) if task == "text-classification" else None
    places = getattr(getattr(model, "config", None), "max_position_embeddings", None) or reading.max_length
    longest = min(reading.max_length, int(min(tokenizer.model_max_length, 2**31)), int(places))
    cut = [0]

    def select(rows: list[int]) -> dict[str, Tensor]:
        parts = [[column[i] for i in rows] for column in (texts, pairs) if column is not None]
        lengths = [len(ids) for ids in tokenizer(*parts, truncation=False)["input_ids"]]
        if task == "causal-lm" and max(lengths) < 2:
            raise UserError(f"--data {table.name!r} gives a batch of texts of one token, where nothing is predicted.")
        over = sum(length > longest for length in lengths)
        if over:
            cut[0] += over
            notes[:] = [note for note in notes if "were cut at" not in note]
            notes.append(f"{cut[0]} texts were cut at {longest} tokens (--max-length).")
        made = tokenizer(*parts, truncation=True, max_length=longest, padding=True, return_tensors="pt")
        batch = {name: value for name, value in made.items() if name in arguments_of(model)}
        _check_tokens(table, model, batch["input_ids"])
        batch["labels"] = (
            labels[rows] if labels is not None else batch["input_ids"].masked_fill(made["attention_mask"] == 0, -100)
        )
        return batch

    return select


def _texts(table: Table, name: str) -> list[str]:
    texts = [value if isinstance(value, str) else None for value in table.columns[name]]
    for number, text in enumerate(texts, 1):
        if not text or not text.strip():
            raise UserError(f"--data {table.name!r} has no text in {name!r} of example {number}.")
    return [str(text) for text in texts]


def _tokenizer(model: nn.Module, reading: Reading) -> Any:
    if reading.tokenizer is None:
        raise UserError("--data holds texts and MODEL has no tokenizer: --tokenizer FOLDER says where one is.")
    transformers = quiet_transformers()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            reading.tokenizer,
            local_files_only=Path(reading.tokenizer).is_dir(),
            trust_remote_code=reading.trust_remote_code,
        )
        if len(tokenizer) < 2:
            raise ValueError("there are no tokenizer files in it")
    except Exception as error:
        raise UserError(f"The tokenizer of {reading.tokenizer!r} cannot be loaded: {one_line(error)}") from error
    config = getattr(model, "config", None)
    if tokenizer.pad_token is None:  # padding is masked, so any token serves
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    tokenizer.padding_side = "right"
    if config is not None and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = tokenizer.pad_token_id  # classifiers on the last token look for it
    return tokenizer


def _select_images(
    table: Table, model: nn.Module, reading: Reading, dtype: torch.dtype, notes: list[str]
) -> Callable[[list[int]], dict[str, Tensor]]:
    """Images: floats as they are, bytes through the model's own image processor."""
    name = table.column(reading.input_column, ARRAYS, "--input-column")
    images = np.asarray(table.columns[name])
    channels = int(getattr(getattr(model, "config", None), "num_channels", 3))
    labels = _labels(table, model, reading, dtype, notes)
    if images.dtype.kind == "f":
        pixels = _array(table, name, dtype)
        if pixels.ndim == 4 and pixels.shape[1] != channels and pixels.shape[3] == channels:
            pixels = pixels.permute(0, 3, 1, 2)
        if pixels.ndim != 4 or pixels.shape[1] != channels:
            raise UserError(f"{name!r} must be (examples, {channels}, height, width), not {tuple(images.shape)}.")
        return lambda rows: {"pixel_values": pixels[rows].contiguous(), "labels": labels[rows]}
    if images.dtype != np.uint8 or images.ndim not in {3, 4}:
        raise UserError(f"{name!r} must hold floats (examples, channels, height, width) or bytes, not {images.dtype}.")
    processor = _processor(reading)
    if images.ndim == 3:
        images = np.repeat(images[..., None], channels, axis=-1)
    elif images.shape[-1] != channels and images.shape[1] == channels:
        images = images.transpose(0, 2, 3, 1)

    def select(rows: list[int]) -> dict[str, Tensor]:
        made = processor(images=[images[i] for i in rows], return_tensors="pt", input_data_format="channels_last")
        return {"pixel_values": made["pixel_values"].to(dtype), "labels": labels[rows]}

    return select


def _processor(reading: Reading) -> Any:
    transformers = quiet_transformers()
    source = str(reading.tokenizer)
    if reading.tokenizer is None or (
        Path(source).is_dir() and not (Path(source) / "preprocessor_config.json").is_file()
    ):
        raise UserError(
            "--data holds bytes and MODEL has no preprocessor_config.json to say how to scale them; store the"
            " pixel_values as floats."
        )
    try:
        return transformers.AutoImageProcessor.from_pretrained(
            source, local_files_only=Path(source).is_dir(), trust_remote_code=reading.trust_remote_code
        )
    except Exception as error:
        raise UserError(f"The image processor of {source!r} cannot be loaded: {one_line(error)}") from error


def _select_pairs(
    table: Table, reading: Reading, dtype: torch.dtype, notes: list[str]
) -> Callable[[list[int]], tuple[Tensor, Tensor]]:
    """Inputs and class numbers, for a model that takes one tensor."""
    name = table.column(reading.input_column, ARRAYS, "--input-column")
    if not isinstance(table.columns[name], np.ndarray):
        raise UserError("MODEL takes one tensor, so --data must be an .npz file with arrays 'x' and 'y'.")
    if table.columns[name].dtype == np.uint8:
        raise UserError(f"{name!r} holds bytes; scale them to floats as MODEL takes them.")
    inputs = _array(table, name, dtype)
    targets, note = class_numbers(table, table.column(reading.label_column, LABELS, "--label-column"), None, {})
    notes.extend(note)
    return lambda rows: (inputs[rows], targets[rows])


def _labels(table: Table, model: nn.Module, reading: Reading, dtype: torch.dtype, notes: list[str]) -> Tensor:
    """Labels of a Hugging Face classifier: class numbers, or numbers for a regression."""
    config: Any = getattr(model, "config", None)
    name = table.column(reading.label_column, LABELS, "--label-column")
    kind = getattr(config, "problem_type", None)
    if kind == "multi_label_classification":
        raise UserError("MODEL gives several labels to one example, which measure does not take; use qs.sharpness.")
    if kind == "regression" or config.num_labels == 1:
        try:
            return torch.tensor([float(value) for value in table.columns[name]], dtype=dtype)
        except (TypeError, ValueError) as error:
            raise UserError(f"MODEL is a regression, so {name!r} must hold numbers: {one_line(error)}") from error
    numbers, note = class_numbers(table, name, int(config.num_labels), dict(config.label2id or {}))
    notes.extend(note)
    return numbers


def class_numbers(table: Table, name: str, classes: int | None, known: dict[str, int]) -> tuple[Tensor, list[str]]:
    """Class numbers from a column of labels.

    Names that the model knows are translated by it; numbers stay; other names are numbered in alphabetical order if
    there are as many as classes.

    Args:
        table: The file.
        name: The column.
        classes: Number of classes of the model, if known.
        known: Class numbers by name, as the model's configuration gives them.

    Returns:
        The numbers, and a note if an order had to be assumed.

    Raises:
        UserError: If a label is missing or unknown.
    """
    values = list(table.columns[name])
    if len(values) != table.length:
        raise UserError(f"--data {table.name!r} has {len(values)} entries in {name!r} and {table.length} in others.")
    for number, value in enumerate(values, 1):
        if value is None or (isinstance(value, str) and not value.strip()):
            raise UserError(f"--data {table.name!r} has no label in {name!r} of example {number}.")
    words = [str(value).strip() for value in values]
    if all(isinstance(value, str) for value in values) and set(words) <= set(known):
        return torch.tensor([known[word] for word in words]), []
    numbers = [_integer(value) for value in values]
    if all(number is not None for number in numbers):
        found = torch.tensor(numbers)
        top = int(found.max())
        if int(found.min()) < 0 or (classes is not None and top >= classes):
            odd = int(found.min()) if int(found.min()) < 0 else top
            limit = f"0 to {classes - 1}" if classes is not None else "0, 1, 2 and so on"
            raise UserError(f"--data {table.name!r} holds {odd} in {name!r}, and the classes of MODEL are {limit}.")
        return found, []
    order = sorted(set(words))
    named = any(not re.fullmatch(r"LABEL_\d+", word) for word in known)
    if named or (classes is not None and len(order) != classes):
        odd_word = next(word for word in order if word not in known)
        names = ", ".join(map(repr, list(known)[:8])) if named else f"{classes} in number"
        raise UserError(f"--data {table.name!r} holds {odd_word!r} in {name!r}, and the classes of MODEL are {names}.")
    numbering = ", ".join(f"{word} = {i}" for i, word in enumerate(order[:12])) + (", ..." if len(order) > 12 else "")
    note = f"Labels were numbered in alphabetical order, since MODEL does not name its classes: {numbering}."
    return torch.tensor([order.index(word) for word in words]), [note]


def _integer(value: Any) -> int | None:
    """A label as an integer, if it is one."""
    if isinstance(value, str):
        return int(float(value)) if re.fullmatch(r"\s*[+-]?\d+(\.0*)?\s*", value) else None
    try:
        return int(value) if float(value) == int(value) else None
    except (TypeError, ValueError, OverflowError):
        return None
