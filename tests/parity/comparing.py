"""What every family's parity test needs: the model on its definition's dtype, the switches, the measure."""

import pytest
import torch
from transcribe.models import load

from transcribe.options import LoadOptions
from transcribe.weights import open_checkpoint

SWITCHES = [
    pytest.param({"alias": False}, id="no-alias"),
    pytest.param({"mmap": False}, id="no-mmap"),
    pytest.param({"recycle": False}, id="no-recycle"),
    pytest.param("poison", id="poison"),
]


def open_model(path, **options):
    options = {"device": "cpu", "dtype": "float32", **options}
    return load(open_checkpoint(path, mmap=options.get("mmap", True)), LoadOptions(**options))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())
