import pytest
import torch

from transcribe.engine import KVCache, Scheduler
from transcribe.engine.kv_cache import GROWTH


def new_cache(limit=200):
    return KVCache(Scheduler(), 2, limit, heads=2, head_dim=4, dtype=torch.float32)


def test_appended_rows_are_copies_in_order():
    cache, rows = new_cache()[0], torch.randn(150, 2, 4)
    for i in range(0, 150, 30):
        piece = rows[i : i + 30].clone()
        keys, values = cache.append(piece, -piece)
        piece.fill_(torch.nan)
    assert torch.equal(keys, rows)
    assert torch.equal(values, -rows)


def test_a_cache_grows_in_steps_and_never_beyond_its_limit():
    cache = new_cache(limit=100)[0]
    cache.append(*torch.zeros(2, 3, 2, 4))
    assert cache._keys.shape[0] == GROWTH
    cache.append(*torch.zeros(2, 70, 2, 4))
    assert cache._keys.shape[0] == 100
    with pytest.raises(ValueError, match="100 rows cannot hold 113"):
        cache.append(*torch.zeros(2, 40, 2, 4))


def test_layers_have_caches_of_their_own():
    cache = new_cache()
    cache[0].append(*torch.zeros(2, 3, 2, 4))
    assert (cache[0].length, cache[1].length) == (3, 0)
