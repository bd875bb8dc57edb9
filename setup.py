"""Builds the C kernels, a plain shared library that knows nothing of Python. Everything else is in pyproject.toml.

Optional: without a compiler, or with one that does not know GCC's vector types, the installation succeeds and PyTorch
computes in their place.
"""

from glob import glob

from setuptools import Extension, setup

KERNELS = "transcribe/kernels/csrc"

setup(
    ext_modules=[
        Extension(
            "transcribe.kernels._kernels",
            sources=[f"{KERNELS}/kernels.c"],
            depends=sorted(glob(f"{KERNELS}/*.h")),
            # Products and sums are rounded apart, as dequantize.py does it.
            extra_compile_args=["-std=gnu11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-g0", "-Wno-psabi"],
            optional=True,
        )
    ]
)
