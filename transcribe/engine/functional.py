"""The operations families use beyond torch's own. Each runs when called and is recorded when traced.

Activations are rows of one sequence: queries, keys and values are [time, heads, head_dim].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .kv_cache import KeyValue, LayerCache
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


def _attend(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    queries, keys, values = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))  # [1, heads, time, head_dim]
    mask = None
    if causal and q.shape[0] > 1:  # the last query sees every key
        mask = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device).tril(k.shape[0] - q.shape[0])
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
    return out.squeeze(0).transpose(0, 1).reshape(q.shape[0], -1)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every query attends to every key: [time, heads, head_dim] -> [time, heads * head_dim]."""
    return _attend(q, k, v, causal=False)


def _cross_attention(q: Tensor, memory: KeyValue) -> Tensor:
    """Queries attend to keys and values computed once: q [time, heads, head_dim] -> [time, heads * head_dim]."""
    return _attend(q, memory.keys, memory.values, causal=False)


def _cached_attention(q: Tensor, k: Tensor, v: Tensor, cache: LayerCache) -> Tensor:
    """Copy k and v into the cache, then attend causally to all of it: -> [time, heads * head_dim].

    k and v are usually views of a fused projection in the arena; the cache keeps rows of its own, never the views.
    """
    keys, values = cache.append(k, v)
    return _attend(q, keys, values, causal=True)


def _flat_heads(q: Tensor, *rest: object) -> Spec:
    return (q.shape[0], q.shape[1] * q.shape[2]), q.dtype


def _attention_workspace(q: Tensor, k: Tensor | KeyValue, *rest: object) -> int:
    """What torch's flash attention on the CPU allocates: the log-sum-exp, and a block of scores for each thread."""
    queries, heads, width = q.shape
    keys = k.length if isinstance(k, KeyValue) else k.shape[0]
    block = min(queries, 256 if queries >= 768 else 64 if queries >= 192 else 32)
    scores = block * min(keys, 512) + 2 * block + block * width
    return 4 * (heads * queries + torch.get_num_threads() * scores)


rotary_interleaved = Operation(lambda x, rotation: (tuple(x.shape), x.dtype), _rotary_interleaved)
attention = Operation(_flat_heads, _attention, places=False, workspace=_attention_workspace)
cross_attention = Operation(_flat_heads, _cross_attention, places=False, workspace=_attention_workspace)
cached_attention = Operation(_flat_heads, _cached_attention, places=False, workspace=_attention_workspace)
