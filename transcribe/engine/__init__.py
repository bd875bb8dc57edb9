"""The engine: activations on a plan, caches, and decoding. It knows no family.

    operations.py   what the scheduler can compute: how big a result is, how to compute it into a given place
    functional.py   the operations families use beyond torch's own: attention, rotary embedding, strided convolution
    modules.py      the modules that own weights: Linear, FusedLinear, Embedding, norms, convolutions
    capture.py      a block as a torch.fx graph, once a kind of block
    plan.py         lifetimes of storages, places in one arena, the peak, for concrete shapes
    arena.py        the one buffer that intermediates share
    binding.py      a plan bound to a block and to addresses; what the C kernels do in one call
    scheduler.py    runs blocks on plans; the switches; the peak before the run
    heap.py         what the C library is asked so that freed memory does not pile up
    kv_cache.py     keys and values, in rows of their own
    decoding.py     a sequence's answer: greedy decoding and sampling, the token budget, the loop guard
    ctc.py          from log-probabilities of frames to tokens with times: greedy, prefix search
"""

from .decoding import Answer
from .kv_cache import KeyValue, KVCache, Lanes
from .scheduler import Scheduler

__all__ = ["Answer", "KVCache", "KeyValue", "Lanes", "Scheduler"]
