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
    assert cache.capacity == GROWTH
    cache.append(*torch.zeros(2, 70, 2, 4))
    assert cache.capacity == 100
    with pytest.raises(ValueError, match="100 rows cannot hold 113"):
        cache.append(*torch.zeros(2, 40, 2, 4))


def test_layers_have_caches_of_their_own():
    cache = new_cache()
    cache[0].append(*torch.zeros(2, 3, 2, 4))
    assert (cache[0].length, cache[1].length) == (3, 0)


def test_reserving_makes_room_in_every_layer_and_keeps_what_is_there():
    cache, rows = new_cache(), torch.randn(2, 5, 2, 4)
    cache[1].append(*rows)
    cache.reserve(100)
    assert [layer.capacity for layer in cache.layers] == [128, 128]
    assert torch.equal(cache[1].append(*rows)[0], torch.cat([rows[0], rows[0]]))
