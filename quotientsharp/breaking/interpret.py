"""Which tokens a head amplifies along the biases that broke its symmetry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .biases import NAME, Shift, SymmetryBreaking, pieces_of

Names = Callable[[int], str]


@dataclass
class Amplification:
    """What the heads make of single tokens.

    Attributes:
        tokens: The token ids that were seen often enough, ascending.
        counts: How often each was seen.
        scores: Per role (``"query"``, ``"value"``) and block name the mean scores ``(heads, tokens)``, from which the
            mean of the head over all tokens seen is subtracted.
        names: Texts of the tokens.
    """

    tokens: list[int]
    counts: list[int]
    scores: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    def rows(self, top: int = 5) -> list[tuple[str, ...]]:
        """The most and the least amplified tokens of every head.

        Args:
            top: How many of each.

        Returns:
            Role, block, head, the tokens most amplified and those least, each with its score.
        """
        result = []
        for role, blocks in self.scores.items():
            for block, table in blocks.items():
                for head, row in enumerate(table):
                    order = row.argsort(descending=True).tolist()
                    high, low = order[:top], order[::-1][:top]
                    texts = (" ".join(f"{self.names[i]!r} {float(row[i]):+.2f}" for i in part) for part in (high, low))
                    result.append((role, block, str(head), *texts))
        return result

    def table(self, top: int = 5) -> str:
        """The rows as text.

        Args:
            top: How many tokens of each kind.

        Returns:
            A text of several lines.
        """
        rows = [("bias", "block", "head", "most amplified", "least amplified"), *self.rows(top)]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)

    def plot(self, path: str | Path, top: int = 24) -> None:
        """A picture: heads against tokens, one panel per role.

        Args:
            path: Where to write it.
            top: How many tokens, those that differ most from head to head or from the mean.
        """
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        roles = {role: torch.cat(list(blocks.values())) for role, blocks in self.scores.items()}
        heights = [len(table) for table in roles.values()]
        figure = Figure(
            figsize=(0.5 + 0.34 * min(top, len(self.tokens)), 1.6 + 0.26 * sum(heights)), layout="constrained"
        )
        FigureCanvasAgg(figure)
        panels = figure.subplots(len(roles), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
        for axes, (role, table) in zip(panels, roles.items(), strict=True):
            pick = table.abs().amax(0).topk(min(top, table.shape[1])).indices
            pick = pick[table[:, pick].mean(0).argsort(descending=True)]
            limit = float(table[:, pick].abs().max())
            image = axes.imshow(table[:, pick].numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto")
            axes.set_xticks(range(len(pick)), [repr(self.names[i])[1:-1] for i in pick.tolist()], rotation=90)
            labels = [f"{index}.{head}" for index, t in enumerate(self.scores[role].values()) for head in range(len(t))]
            axes.set_yticks(range(len(labels)), labels)
            axes.set_ylabel("layer.head")
            what = "$b_Q \\cdot k$" if role == "query" else "$b_V \\cdot v$"
            axes.set_title(f"{what} / $\\sqrt{{h}}$ of a token, less the mean of the head", fontsize=10)
            figure.colorbar(image, ax=axes)
        figure.savefig(path, dpi=150)


class _Recorder:
    """Catches what the projections of keys and values read and adds up the scores per token."""

    def __init__(self, model: nn.Module, shift: Shift, size: int) -> None:
        self.shift = shift
        role = "key" if shift.role == "query" else "value"
        pieces = pieces_of(shift.block, role)
        self.path = pieces[0].name.rpartition(".")[0]
        self.owner = model.get_submodule(self.path)
        first = shift.block.n if role == "key" else 0
        rows = [piece.row.numel() for piece in pieces]
        x = shift.block.read(model).detach()[:, first : first + sum(rows)]
        if sum(rows) not in (rows[0], rows[0] + 1):
            raise ValueError(f"amplification cannot read the keys of {shift.block.name}: several layers make them.")
        weight = shift.value.to(x)
        self.along = x[:, : rows[0]] @ weight / shift.block.h**0.5  # (heads, width)
        bias = x[:, rows[0] :] @ weight / shift.block.h**0.5 if sum(rows) > rows[0] else None
        self.offset = bias[:, 0] if bias is not None else torch.zeros_like(self.along[:, 0])
        self.total = torch.zeros(self.along.shape[0], size, dtype=torch.float64)
        self.ids: Tensor | None = None
        self.index = 2 if shift.role == "value" else 1

    def read(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Forward pre-hook."""
        packed = isinstance(module, nn.MultiheadAttention)
        named = ("query", "key", "value")[self.index]
        x = (
            (args[self.index] if len(args) > self.index else kwargs[named])
            if packed
            else (args[0] if args else kwargs["input"])
        )
        if packed and not module.batch_first:
            x = x.transpose(0, 1)
        assert self.ids is not None
        if x.shape[:2] != self.ids.shape:
            raise ValueError(f"amplification needs one position per token, and {self.path} reads {tuple(x.shape)}.")
        scores = (x.detach().to(self.along) @ self.along.mT + self.offset).double().cpu()
        keep = self.ids >= 0
        self.total.index_add_(1, self.ids[keep], scores[keep].mT)


def amplification(
    model: nn.Module, batches: Iterable[Any], names: Names | None = None, *, least: int = 5
) -> Amplification:
    """Which tokens every head amplifies along ``b_Q`` and ``b_V``.

    A query bias adds ``b_Q . k_s / sqrt(h)`` to the score of token ``s`` whatever the query, so tokens whose keys point
    along ``b_Q`` are attended to more. For values it is ``b_V . v_s / sqrt(h)``: how far the value of a token points
    along the direction that all values share. Scores are averaged over all places where a token stands, at the last
    draw of the biases, which is the one that evaluation uses. A rotary embedding is left out: the keys are taken
    before they are rotated.

    Args:
        model: A model that `break_symmetry` broke; its mode and weights stay as they are.
        batches: Token ids ``(batch, length)``, or mappings as Hugging Face models take them, with ``input_ids``;
            where ``attention_mask`` is zero a token is not counted.
        names: Text of a token id, for example ``tokenizer.decode``; the number itself if None.
        least: How often a token must occur.

    Returns:
        The scores, with ``table()`` and ``plot(path)``.

    Raises:
        ValueError: If the model is not broken, or no token occurs often enough.
    """
    breaking = getattr(model, NAME, None)
    if not isinstance(breaking, SymmetryBreaking):
        raise ValueError(f"{type(model).__name__} is not broken: call break_symmetry(model) first.")
    read = [_batch(batch) for batch in batches]
    size = 1 + max((int(ids.max()) for ids, _ in read), default=-1)
    shifts = [shift for shift in breaking.shifts if isinstance(shift, Shift) and shift.role != "key"]
    recorders = [_Recorder(model, shift, max(size, 1)) for shift in shifts]
    handles = [r.owner.register_forward_pre_hook(r.read, with_kwargs=True) for r in recorders]
    training = {module: module.training for module in model.modules()}
    counts = torch.zeros(max(size, 1), dtype=torch.long)
    try:
        model.eval()
        for ids, batch in read:
            for recorder in recorders:
                recorder.ids = ids
            counts += torch.bincount(ids[ids >= 0], minlength=len(counts))
            with torch.no_grad():
                model(**batch) if isinstance(batch, Mapping) else model(batch)
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in training.items():
            module.training = mode
    seen = (counts >= least).nonzero()[:, 0]
    if not len(seen):
        raise ValueError(f"No token occurs {least} times in batches: give more of them, or a smaller least.")
    result = Amplification(seen.tolist(), counts[seen].tolist())
    result.names = [names(t) if names else str(t) for t in result.tokens]
    for recorder in recorders:
        mean = recorder.total.sum(1) / counts.sum()
        table = recorder.total[:, seen] / counts[seen] - mean[:, None]
        result.scores.setdefault(recorder.shift.role, {})[recorder.shift.block.name] = table
    return result


def _batch(batch: Any) -> tuple[Tensor, Any]:
    """Token ids on the CPU, -1 where masked, and the batch itself."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        raise ValueError("batches must hold token ids of shape (batch, length), or mappings with such input_ids.")
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    kept = ids if mask is None else torch.where(mask.bool(), ids, -1)
    return kept.cpu(), batch
