"""Attention that sees its tokens only through their inner products."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RelationalAttention(nn.Module):
    r"""Attention whose weights and updates are functions of the Gram matrix ``X X^T``.

    The score of head ``a`` for tokens ``i, j`` is a small network of ``x_i . x_j / d``, of both squared lengths over
    ``d``, and of the cosine; the update is a combination of tokens,

        ``y_i = sum_a w_a sum_j softmax_j(s^a_ij) c_a(|x_j|^2 / d) x_j = (A X)_i``.

    ``A`` is O(d)-invariant, so ``y`` turns with ``x``, and the Gram matrix of the output, ``A (X X^T) A^T``, is a
    function of that of the input alone: `forward_gram` computes it without ever seeing coordinates. No parameter knows
    a direction of the residual stream; there are ``heads`` and ``hidden`` numbers in place of ``4 d^2``.

    Memory per sequence of T tokens: ``T^2`` for the Gram matrix, ``4 T^2`` for the features, ``hidden T^2`` inside the
    score network and ``heads T^2`` for the weights, kept for the backward pass, against ``heads T^2`` (or ``T`` with a
    fused kernel) of plain attention.

    After "Toward Manifest Relationality in Transformers via Symmetry Reduction", arXiv 2602.18948.

    Args:
        embed_dim: ``d``.
        num_heads: Heads; they share no channels, so any number will do.
        hidden: Width of the score network.
        dropout: Dropout on the attention weights.
        batch_first: Whether inputs are ``(batch, tokens, d)``, as opposed to ``(tokens, batch, d)``.

    Raises:
        ValueError: If a size is not positive.
    """

    def __init__(
        self, embed_dim: int, num_heads: int, *, hidden: int = 16, dropout: float = 0.0, batch_first: bool = True
    ) -> None:
        super().__init__()
        for name, value in (("embed_dim", embed_dim), ("num_heads", num_heads), ("hidden", hidden)):
            if value < 1:
                raise ValueError(f"{name} must be positive, not {value}.")
        self.embed_dim, self.num_heads, self.dropout, self.batch_first = embed_dim, num_heads, dropout, batch_first
        self.score = nn.Sequential(nn.Linear(4, hidden), nn.GELU(), nn.Linear(hidden, num_heads))
        self.gate = nn.Linear(1, num_heads)
        self.mix = nn.Parameter(torch.full((num_heads,), 1.0 / num_heads))
        nn.init.ones_(self.gate.bias)

    def weights(self, gram: Tensor, left: Tensor, right: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Attention weights and update matrix from invariants.

        Args:
            gram: Inner products ``(batch, L, S)`` of queries and keys.
            left: Squared lengths ``(batch, L)`` of the queries.
            right: Squared lengths ``(batch, S)`` of the keys.
            mask: Added to the scores, broadcast against ``(batch, heads, L, S)``.

        Returns:
            Weights ``(batch, heads, L, S)`` and the matrix ``A``, ``(batch, L, S)``. A query that may see no key gets
            zeros.
        """
        d = self.embed_dim
        first, second = (left / d).unsqueeze(-1).expand_as(gram), (right / d).unsqueeze(-2).expand_as(gram)
        cosine = gram / d * torch.rsqrt(first * second + 1e-12)
        scores = self.score(torch.stack([gram / d, first, second, cosine], -1)).movedim(-1, 1)
        if mask is not None:
            scores = scores + mask
            blind = (scores == -torch.inf).all(-1, keepdim=True)
            scores = torch.where(blind, torch.zeros_like(scores), scores)
        weights = torch.softmax(scores, -1)
        if mask is not None:
            weights = torch.where(blind, torch.zeros_like(weights), weights)
        dropped = F.dropout(weights, self.dropout, self.training)
        gates = self.gate((right / d).unsqueeze(-1)).mT * self.mix[:, None]  # (batch, heads, S)
        return weights, (dropped * gates.unsqueeze(-2)).sum(1)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `torch.nn.MultiheadAttention`.

        Args:
            query: ``(batch, L, d)``, or ``(L, d)`` for one sequence.
            key: ``(batch, S, d)``; the queries if None.
            value: ``(batch, S, d)``; the keys if None. Queries, keys and values must be turned together.
            key_padding_mask: ``(batch, S)``: True (or a number to add) for keys that no query may see.
            need_weights: Whether to return the weights.
            attn_mask: ``(L, S)`` or ``(batch * heads, L, S)``: True for pairs that are not allowed, or numbers to add.
            average_attn_weights: Whether to average them over heads.
            is_causal: Whether queries see earlier keys only; needs no ``attn_mask``.

        Returns:
            The update ``(batch, L, d)``, and weights ``(batch, L, S)``, ``(batch, heads, L, S)`` or None.

        Raises:
            ValueError: If an input does not have ``embed_dim`` channels.
        """
        key = query if key is None else key
        value = key if value is None else value
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.ndim not in (2, 3) or x.shape[-1] != self.embed_dim:
                raise ValueError(f"{name} must end in embed_dim = {self.embed_dim} channels, not {tuple(x.shape)}.")
        single = query.ndim == 2
        if single:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        mask = self._mask(query, key, key_padding_mask, attn_mask, is_causal=is_causal)
        lengths = query.square().sum(-1), key.square().sum(-1)
        weights, update = self.weights(query @ key.mT, *lengths, mask)
        result = update @ value
        shown = weights.mean(1) if average_attn_weights else weights
        if single:
            result, shown = result.squeeze(0), shown.squeeze(0)
        elif not self.batch_first:
            result = result.transpose(0, 1)
        return result, shown if need_weights else None

    def forward_gram(self, gram: Tensor, mask: Tensor | None = None) -> Tensor:
        """Self-attention on Gram matrices.

        Args:
            gram: ``X X^T``, ``(batch, T, T)``.
            mask: Added to the scores.

        Returns:
            The Gram matrix of the output, ``A (X X^T) A^T``.
        """
        lengths = gram.diagonal(dim1=-2, dim2=-1)
        _, update = self.weights(gram, lengths, lengths, mask)
        return update @ gram @ update.mT

    def _mask(
        self, query: Tensor, key: Tensor, padding: Tensor | None, attention: Tensor | None, *, is_causal: bool
    ) -> Tensor | None:
        """All masks as numbers to add, broadcast to ``(batch, heads, L, S)``."""
        total: Tensor | None = None
        if is_causal and attention is None:
            attention = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=query.device).triu(1)
        if attention is not None:
            attention = _numbers(attention, query)
            shape = (query.shape[0], self.num_heads, query.shape[1], key.shape[1])
            total = attention.reshape(shape) if attention.ndim == 3 else attention
        if padding is not None:
            hidden = _numbers(padding, query)[:, None, None, :]
            total = hidden if total is None else total + hidden
        return total


def _numbers(mask: Tensor, like: Tensor) -> Tensor:
    """Minus infinity where a boolean mask is True."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(mask, -torch.inf)
    return mask.to(like)
