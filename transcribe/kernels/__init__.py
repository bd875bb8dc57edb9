"""Computing on packed weights. `path()` says what computes, `use()` and TRANSCRIBE_KERNELS decide it.

    linear.py       y = x Wᵀ + b where W stays packed
    dequantize.py   the formats' values by torch operations: the definition
    native.py       both by the C kernels
    steps.py        a few rows' operations, products included, as lists that one call runs
    library.py      the C kernels as a shared library; knows nothing of torch, and neither does this module
    csrc/           the C kernels
"""

from .library import PATHS, chosen, use

__all__ = ["path", "use"]


def path() -> str:
    """What computes on packed weights: one of the names in `PATHS`, such as "AVX2" or "torch".

    Raises `UsageError` if TRANSCRIBE_KERNELS asks for what is not there.
    """
    return PATHS[chosen().path]
