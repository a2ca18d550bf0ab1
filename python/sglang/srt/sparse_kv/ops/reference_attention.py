"""The torch reference of attention: decode over selected pages, prefill over a chunk and its prefix."""

from __future__ import annotations

import torch
from sglang.srt.sparse_kv.ops.reference import LayerView


def attend_inputs(q, view: LayerView, last_tokens, width: int, scale: float) -> None:
    """What an engine's attention reads beside the cache, filled on the way by `score` or `write_token` (queries) and
    `resolve` (pages), which take it, and passed to `attend` in the end. The page table in it is that of all layers
    which have their width and scale in common. This engine needs nothing.
    """
    return None


def attend(
    q, k_row1, v_row1, view: LayerView, slots, num_pages, last_tokens, scale: float, inputs=None, own=None
) -> torch.Tensor:
    """Attention of both rows over the selected pages; row 1 also sees its own token, which is stored nowhere.

    own: int32 [N, H, C] from `own_slots`: row 1 attends to these pages instead of row 0's.

    q [N, R, H, G, D]; k_row1, v_row1 [N, H, D] or None when R == 1; slots int32 [N, H, C] ascending logical order;
    num_pages int [N]; last_tokens int [N] tokens in the last page, row 0's included. Returns [N, R, H, G, D].
    One request at a time, so that neighbours change no bit.
    """
    n, rows, heads, group, dim = q.shape
    page_size, capacity = view.kv.shape[3], view.kv.shape[1]
    halves = view.kv.view(heads * capacity * 2, page_size * dim)
    base = torch.arange(heads, device=q.device)[:, None] * capacity
    out = torch.empty_like(q)
    for i, (pages, last) in enumerate(zip(num_pages.tolist(), last_tokens.tolist())):
        if pages == 0:
            out[i] = 0
            continue
        index = (base + slots[i, :, :pages]).reshape(-1) * 2
        length = (pages - 1) * page_size + last
        keys = halves.index_select(0, index).view(heads, pages * page_size, dim)[:, :length]
        values = halves.index_select(0, index + 1).view(heads, pages * page_size, dim)[:, :length]
        queries = q[i].permute(1, 0, 2, 3).reshape(heads, rows * group, dim)
        logits = torch.bmm(queries, keys.transpose(1, 2)).float() * scale  # [H, R*G, length]
        if rows == 2:
            itself = torch.einsum("hgd,hd->hg", q[i, 1], k_row1[i]).float() * scale
            extra = torch.cat([torch.full_like(itself, float("-inf")), itself], 1)  # row 0 does not see row 1's token
            logits = torch.cat([logits, extra[..., None]], 2)
        weights = torch.softmax(logits, -1).to(q.dtype)
        mixed = torch.bmm(weights[..., :length], values)
        if rows == 2:
            mixed[:, group:] += weights[:, group:, -1:] * v_row1[i][:, None, :]
        out[i] = mixed.view(heads, rows, group, dim).permute(1, 0, 2, 3)
        if own is not None:
            out[i, 1] = _attend_own(q[i, 1], k_row1[i], v_row1[i], view, own[i], last, scale)
    return out


def _attend_own(q, k, v, view: LayerView, slots, last: int, scale: float) -> torch.Tensor:
    """Row 1 of one request over pages of its own. q [H, G, D]; k, v [H, D]; slots int32 [H, C] -> [H, G, D]."""
    out = torch.empty_like(q)
    for head, row in enumerate(slots):
        cached = row[row >= 0].long()  # heads differ in how many of their pages are cached
        length = (len(cached) - 1) * view.kv.shape[3] + last
        keys = torch.cat([view.kv[head, cached, 0].flatten(0, 1)[:length], k[head][None]])
        values = torch.cat([view.kv[head, cached, 1].flatten(0, 1)[:length], v[head][None]])
        weights = torch.softmax((q[head] @ keys.T).float() * scale, -1).to(q.dtype)
        out[head] = weights @ values
    return out


def attend_block(q, k, v, scale: float, causal: bool, alone: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Prefill attention of one request's chunk over one block of keys, with what merging needs.

    q [T, H*G, D]; k, v [H, B, D]; causal where the block ends with the chunk's own tokens; alone where there is nothing
    to merge. Returns (out [T, H*G, D], lse float32 [T, H*G], natural logarithm, or None if alone).
    """
    tokens, q_heads, _ = q.shape
    group, keys = q_heads // k.shape[0], k.shape[1]
    mask = None
    if causal and keys > tokens:  # the operator's own mask is for equal lengths
        mask = q.new_zeros((tokens, keys)).masked_fill_(
            torch.ones((tokens, keys), dtype=torch.bool).triu_(keys - tokens + 1), float("-inf")
        )[None, None]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q.transpose(0, 1)[None],
        k.repeat_interleave(group, 0)[None],
        v.repeat_interleave(group, 0)[None],
        0.0,
        causal and mask is None,
        attn_mask=mask,
        scale=scale,
    )
    return out[0].transpose(0, 1), None if alone else lse.reshape(q_heads, tokens).transpose(0, 1)


def merge(out_a, lse_a, out_b, lse_b) -> tuple[torch.Tensor, torch.Tensor]:
    """Joins two partial attentions over disjoint keys. out [T, heads, D], lse float32 [T, heads]."""
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a = torch.exp(lse_a - lse)[..., None].to(out_a.dtype)
    weight_b = torch.exp(lse_b - lse)[..., None].to(out_a.dtype)
    return out_a * weight_a + out_b * weight_b, lse
