"""What computes, and how it is chosen."""

import subprocess
import sys

import pytest
import torch
from gguf import GGMLQuantizationType
from packed_blocks import plausible_blocks

from transcribe import kernels
from transcribe.errors import UsageError
from transcribe.kernels import library, native
from transcribe.kernels.linear import packed_linear, scratch_bytes
from transcribe.weights.packed import PackedTensor


@pytest.fixture
def not_built(use, monkeypatch):
    monkeypatch.setattr(library, "_open", lambda: None)
    use("")


def test_without_the_library_torch_computes(not_built):
    assert kernels.path() == "torch"
    assert native.library() is None
    kind = GGMLQuantizationType.Q6_K
    weight = PackedTensor(kind, (64, 512), plausible_blocks(kind, 64, 2))
    x = torch.ones(2, 512)
    scratch = torch.empty(scratch_bytes(weight, x.dtype, 2), dtype=torch.uint8)
    out = packed_linear(x, weight, None, torch.empty(2, 64), scratch)
    torch.testing.assert_close(out[0], weight.dequantize().sum(1), atol=1e-3, rtol=1e-5)


def test_asking_for_kernels_that_were_not_built_says_what_to_do(not_built):
    with pytest.raises(UsageError, match=r"TRANSCRIBE_KERNELS=portable: .* reinstall with a C compiler"):
        kernels.use("portable")


def test_a_path_that_does_not_exist_is_refused(use):
    with pytest.raises(UsageError, match="sse9 is not a path; use one of amx, avx512bf16, avx512, avx2, neon, "):
        use("sse9")


def test_the_switch_decides_and_asking_imports_no_torch(monkeypatch):
    monkeypatch.setenv("TRANSCRIBE_KERNELS", "torch")
    program = "import sys; from transcribe import kernels; print(kernels.path(), 'torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["torch", "False"]
