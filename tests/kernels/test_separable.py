"""Separable convolutions by the C kernels: against a sum in float64, on every instruction set of this machine."""

import pytest
import torch
import torch.nn.functional as F
from transcribe.models.blocks.separable import Pointwise, SeparableConv

from transcribe.kernels.separable import NARROW, TILES, WIDE

# inputs, outputs, kernel, stride, dilation: channels that do not fill a vector, kernels wider than a tile, strides
FORMS = [
    (256, 256, 39, 1, 1), (80, 96, 5, 1, 1), (96, 80, 11, 2, 1), (24, 24, 7, 1, 2), (24, 40, 41, 1, 3),
    (40, 25, 3, 3, 1), (17, 33, 9, 2, 1), (48, 48, 1, 1, 1),
]  # fmt: skip
ROWS = (1, 3, NARROW, NARROW + 1, TILES * WIDE, TILES * WIDE + 7)


@pytest.fixture(params=FORMS, ids=str)
def conv(request):
    inputs, outputs, kernel, *_ = request.param
    random = torch.Generator().manual_seed(3)
    tensors = {
        "depthwise.weight": torch.randn(inputs, 1, kernel, generator=random) / kernel**0.5,
        "pointwise.weight": torch.randn(outputs, inputs, 1, generator=random) / inputs**0.5,
        **{f"norm.{name}": torch.rand(outputs, generator=random) + 0.5 for name in
           ("weight", "bias", "running_mean", "running_var")},
    }  # fmt: skip
    made = SeparableConv(*request.param, eps=1e-3, relu=True)
    made.fill(tensors, torch.float32)
    return made, tensors


def rows(count: int, inputs: int) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(count))


def exact(conv, tensors, x):
    inputs, _, kernel, stride, dilation, _ = conv.form
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    y = F.conv1d(x.double().t(), wide["depthwise.weight"], None, stride, dilation * (kernel - 1) // 2, dilation, inputs)
    y = F.conv1d(y, wide["pointwise.weight"]).t() - wide["norm.running_mean"]
    y = y / (wide["norm.running_var"] + 1e-3).sqrt() * wide["norm.weight"] + wide["norm.bias"]
    return y.relu()


def test_agrees_with_exact_sums(conv, compiled):
    module, tensors = conv
    for count in ROWS:
        x = rows(count, module.form.inputs)
        assert (module.run(x) - exact(module, tensors, x)).abs().max() < 1e-5


def test_the_torch_path_agrees_with_exact_sums(conv, use):
    use("torch")
    test_agrees_with_exact_sums(conv, "torch")


def test_threads_and_places_change_no_bit(conv, compiled):
    module, _ = conv
    threads = torch.get_num_threads()
    try:
        for count in ROWS:
            x = rows(count, module.form.inputs)
            torch.set_num_threads(1)
            alone = module.run(x)
            for several in (2, 5):
                torch.set_num_threads(several)
                assert torch.equal(module.run(x), alone)
                if module.shrinks:
                    taken = x.clone()
                    place = taken.view(-1)[: alone.numel()].view_as(alone)
                    assert torch.equal(module.run(taken, place), alone)
    finally:
        torch.set_num_threads(threads)


def test_what_is_no_number_stays_so(conv, compiled):
    module, _ = conv
    x = rows(2 * NARROW, module.form.inputs)
    x[NARROW, 0] = torch.nan
    assert module.run(x).isnan().any()


@pytest.mark.parametrize("stride", [1, 2])
def test_pointwise_products_of_every_stride(stride, compiled):
    module = Pointwise(40, 25, stride)
    random = torch.Generator().manual_seed(4)
    weight, bias = torch.randn(25, 40, 1, generator=random) / 40**0.5, torch.randn(25, generator=random)
    module.fill({"weight": weight, "bias": bias}, torch.float32)
    for count in ROWS:
        x = rows(count, 40)
        expected = F.linear(x[::stride].double(), weight[:, :, 0].double(), bias.double())
        assert (module.run(x) - expected).abs().max() < 1e-5
