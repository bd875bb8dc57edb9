"""The operations families use beyond torch's own. Each runs when called and is recorded when traced.

Activations are rows of one sequence: queries, keys and values are [time, heads, head_dim].
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import steps
from ..kernels.steps import Step
from .kv_cache import KeyValue, Lanes, LayerCache
from .operations import Operation, Spec


def _rotary_interleaved(x: Tensor, rotation: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Rotary embedding (Su et al. 2021) of interleaved pairs, the first dimensions only: x [time, ..., head_dim].

    `rotation`: complex64 [time, pairs], exp(i * angle). Pairs (2j, 2j + 1) are complex numbers times it; dimensions
    from 2 * pairs on pass unchanged.
    """
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    turned = 2 * rotation.shape[-1]
    factor = rotation.view(rotation.shape[0], *[1] * (x.dim() - 2), -1)
    source, target = x[..., :turned], out[..., :turned]
    if x.dtype == torch.float32:
        pairs = torch.view_as_complex(target.unflatten(-1, (-1, 2)))
        torch.mul(torch.view_as_complex(source.unflatten(-1, (-1, 2))), factor, out=pairs)
    else:
        pairs = torch.view_as_complex(source.float().unflatten(-1, (-1, 2))) * factor
        target.copy_(torch.view_as_real(pairs).flatten(-2))
    out[..., turned:] = x[..., turned:]
    return out


def _rotary_halves(x: Tensor, rotation: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Rotary embedding (Su et al. 2021) of the two halves of each head against each other: x [time, heads, head_dim].

    `rotation` [time, 2, head_dim / 2] holds cosines and sines in x's dtype. Dimensions j and j + head_dim / 2 turn
    together.
    """
    if out is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    cosines, sines = rotation.unsqueeze(1).unbind(2)
    (a, b), (turned_a, turned_b) = x.chunk(2, -1), out.chunk(2, -1)
    torch.mul(a, cosines, out=turned_a).addcmul_(b, sines, value=-1)
    torch.mul(b, cosines, out=turned_b).addcmul_(a, sines)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention of q [time, heads, head_dim] to k, v [keys, groups, head_dim]; heads of a group share keys and values.

    Keys and values are never repeated: the heads of a group are a batch that reads the same ones (its stride is 0),
    or, for one query, rows of one product.
    """
    rows, heads, width = q.shape
    groups = k.shape[1]
    keys, values = (t.transpose(0, 1).unsqueeze(0) for t in (k, v))  # [1, groups, keys, head_dim]
    if rows == 1:
        return F.scaled_dot_product_attention(q.view(1, groups, heads // groups, width), keys, values).view(1, -1)
    queries = q.unflatten(1, (groups, -1)).permute(2, 1, 0, 3)  # [heads of a group, groups, time, head_dim]
    shape = (heads // groups, *keys.shape[1:])
    mask = None
    if causal:  # the last query sees every key
        mask = torch.ones(rows, k.shape[0], dtype=torch.bool, device=q.device).tril(k.shape[0] - rows)
    out = F.scaled_dot_product_attention(queries, keys.expand(shape), values.expand(shape), attn_mask=mask)
    return out.permute(2, 1, 0, 3).reshape(rows, -1)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every query attends to every key: [time, heads, head_dim] -> [time, heads * head_dim]."""
    return _attend(q, k, v, causal=False)


def _cross_attention(q: Tensor, memory: KeyValue | Lanes) -> Tensor:
    """Queries attend to keys and values computed once: q [time, heads, head_dim] -> [time, heads * head_dim].

    With `Lanes`, each row attends to another sequence's.
    """
    if isinstance(memory, Lanes):
        return torch.cat([_cross_attention(q[i : i + 1], lane) for i, lane in enumerate(memory.lanes)])
    return _attend(q, memory.keys, memory.values, causal=False)


def _cached_attention(q: Tensor, k: Tensor, v: Tensor, cache: LayerCache | Lanes) -> Tensor:
    """Copy k and v into the cache, then attend causally to all of it: -> [time, heads * head_dim].

    k and v are usually views of a fused projection in the arena; the cache keeps rows of its own, never the views.
    With `Lanes`, each row is another sequence's next.
    """
    if isinstance(cache, Lanes):
        each = enumerate(cache.lanes)
        return torch.cat([_cached_attention(q[i : i + 1], k[i : i + 1], v[i : i + 1], lane) for i, lane in each])
    keys, values = cache.append(k, v)
    return _attend(q, keys, values, causal=True)


def _cached_steps(q: Tensor, k: Tensor, v: Tensor, cache: LayerCache | Lanes, *, out: Tensor) -> list[Step] | None:
    return steps.attend(q, k, v, cache, k.shape[1], out) if isinstance(cache, Lanes) else None


def _cross_steps(q: Tensor, memory: KeyValue | Lanes, *, out: Tensor) -> list[Step] | None:
    if not isinstance(memory, Lanes):
        return None
    return steps.attend(q, None, None, memory, memory.lanes[0].keys.shape[1], out)


def _flat_heads(q: Tensor, *rest: object) -> Spec:
    return (q.shape[0], q.shape[1] * q.shape[2]), q.dtype


def _attention_workspace(q: Tensor, k: Tensor | KeyValue | Lanes, *rest: object) -> int:
    """What torch's flash attention on the CPU allocates: the log-sum-exp, and a block of scores for each thread."""
    if isinstance(k, Lanes):  # one query at a time, by the kernels as a rule, which allocate nothing
        return 0
    queries, heads, width = q.shape
    keys = k.length if isinstance(k, KeyValue) else k.shape[0]
    block = min(queries, 256 if queries >= 768 else 64 if queries >= 192 else 32)
    scores = block * min(keys, 512) + 2 * block + block * width
    return 4 * (heads * queries + torch.get_num_threads() * scores)


def _cached_workspace(q: Tensor, k: Tensor, v: Tensor, cache: LayerCache | Lanes) -> int:
    """That of attention, and of several queries the mask, as truth values and as numbers."""
    if isinstance(cache, Lanes):
        return _attention_workspace(q, cache)
    rows = q.shape[0]
    masked = rows * (cache.length + rows) if rows > 1 else 0
    return _attention_workspace(q, k) + masked * (1 + q.dtype.itemsize)


def _like_first(x: Tensor, *rest: object) -> Spec:
    return tuple(x.shape), x.dtype


rotary_halves = Operation(_like_first, _rotary_halves, native=partial(steps.rotary, pairs=False))
rotary_interleaved = Operation(_like_first, _rotary_interleaved, native=partial(steps.rotary, pairs=True))
attention = Operation(_flat_heads, _attention, places=False, workspace=_attention_workspace)
cross_attention = Operation(
    _flat_heads, _cross_attention, places=False, workspace=_attention_workspace, native=_cross_steps
)
cached_attention = Operation(
    _flat_heads, _cached_attention, places=False, workspace=_cached_workspace, native=_cached_steps
)


def _windowed_attention(q: Tensor, k: Tensor, v: Tensor, window: int, *, out: Tensor | None = None) -> Tensor:
    """Rows attend to each other within stretches of `window` rows: [time, heads, head_dim] -> [time, heads * head_dim].

    The last stretch may be shorter. Each gives the bits it gives alone.
    """
    if out is None:
        out = q.new_empty(_flat_heads(q)[0])
    whole = len(q) - len(q) % window
    for start, stop, length in ((0, whole, window), (whole, len(q), len(q) - whole)):
        if start < stop:
            heads = (t[start:stop].unflatten(0, (-1, length)).transpose(1, 2) for t in (q, k, v))
            made = F.scaled_dot_product_attention(*heads)  # [stretches, heads, length, head_dim]
            out[start:stop] = made.transpose(1, 2).reshape(stop - start, -1)
    return out


def _windowed_workspace(q: Tensor, k: Tensor, v: Tensor, window: int) -> int:
    """That of attention to one stretch, the log-sum-exp of all, and the result before it goes to its place."""
    first = q[:window]
    return _attention_workspace(first, first) + 4 * q.shape[1] * (len(q) - len(first)) + q.numel() * q.itemsize


windowed_attention = Operation(
    lambda q, k, v, window: _flat_heads(q), _windowed_attention, workspace=_windowed_workspace
)
