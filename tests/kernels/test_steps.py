"""The operations between a decoder's products, on every instruction set of this machine."""

import operator

import pytest
import torch
import torch.nn.functional as F

from transcribe.engine import KeyValue, KVCache, Lanes, Scheduler
from transcribe.engine import functional as ours
from transcribe.engine.modules import LayerNorm, RMSNorm
from transcribe.engine.operations import TORCH
from transcribe.kernels import steps
from transcribe.kernels.linear import FEW_ROWS

WIDTHS = (1, 15, 16, 40, 288)
DTYPES = {torch.float32: 2e-6, torch.bfloat16: 2**-8}  # and the rounding of one result


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def strided(rows, width, dtype, seed=0):
    """Rows that are a part of wider ones, as those of a fused projection are."""
    return random(rows, 2 * width + 3, dtype=dtype, seed=seed)[:, 2 : 2 + width]


def close(found, expected, dtype):
    largest = expected.abs().max().item()
    return torch.allclose(found.double(), expected.double(), rtol=DTYPES[dtype], atol=DTYPES[dtype] * largest)


def norms(width, dtype):
    layer, root = LayerNorm(width), RMSNorm(width)
    layer.weight, layer.bias, root.weight = (random(width, dtype=dtype, seed=i) for i in range(3))
    return {"layer": layer, "root": root}


def elementwise(dtype, width):
    """Each operation by name: of rows, and in float64."""
    gate, normed = torch.nn.functional.silu, norms(width, dtype)
    other = strided(FEW_ROWS, width, dtype, 7)
    rms = lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * normed["root"].weight.double()  # noqa: E731
    layer = normed["layer"]
    return {
        "add": (lambda x, at: TORCH[operator.add].run(x, other[at]),
                lambda x: x + other.double()),
        "times": (lambda x, at: TORCH[operator.mul].run(x, other[at]), lambda x: x * other.double()),
        "silu": (lambda x, at: TORCH[F.silu].run(x), gate),
        "rms_norm": (lambda x, at: normed["root"].run(x), rms),
        "layer_norm": (lambda x, at: layer.run(x),
                       lambda x: F.layer_norm(x, (width,), layer.weight.double(), layer.bias.double(), layer.eps)),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["add", "times", "silu", "rms_norm", "layer_norm"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_as_in_float64_and_have_the_same_bits_alone(name, dtype, compiled):
    for width in WIDTHS:
        run, exact = elementwise(dtype, width)[name]
        x = 4 * strided(FEW_ROWS, width, dtype)
        together = run(x, slice(None))
        assert close(together, exact(x.double()), dtype)
        alone = [run(x[i : i + 1], slice(i, i + 1)) for i in range(FEW_ROWS)]
        assert torch.equal(torch.cat(alone), together)


def test_silu_holds_at_the_ends(compiled):
    x = torch.tensor([[-1e30, -200.0, -88.0, -1e-30, 0.0, 1e-30, 50.0, 1e30, float("inf"), float("nan")]])
    found = TORCH[F.silu].run(x)
    assert torch.equal(found.isnan(), x.isnan())
    assert torch.allclose(found[:, :-1], F.silu(x)[:, :-1], rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_turned_as_torch_turns_them(dtype, compiled, use):
    for width in (8, 24, 64):
        x = random(5, 6, width, dtype=dtype)[:, 1:4]
        angles = random(5, width // 2, seed=1)
        halves = torch.stack([angles.cos(), angles.sin()], 1).to(dtype)
        pairs = torch.polar(torch.ones(5, width // 4), random(5, width // 4, seed=2))
        for operation, rotation in ((ours.rotary_halves, halves), (ours.rotary_interleaved, pairs)):
            use(compiled)
            found = operation.run(x, rotation)
            alone = [operation.run(x[i : i + 1], rotation[i : i + 1]) for i in range(5)]
            assert torch.equal(torch.cat(alone), found)
            use("torch")
            wide = rotation if rotation.is_complex() else rotation.float()
            assert close(found, operation.run(x.float(), wide), dtype)


LENGTHS = (1, 5, 64, 65, 300)


def lanes(dtype, heads, width):
    """Caches of several lengths."""
    made = [KVCache(Scheduler(), 1, 400, heads, width, dtype)[0] for _ in LENGTHS]
    for i, (lane, length) in enumerate(zip(made, LENGTHS, strict=True)):
        lane.append(*(random(length, heads, width, dtype=dtype, seed=seed) for seed in (i, i + 9)))
    return made


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "groups", "width"), [(4, 4, 36), (6, 3, 16), (14, 2, 128)])
def test_each_query_attends_to_its_own_lane(heads, groups, width, dtype, compiled, use):
    q = random(len(LENGTHS), heads, width, dtype=dtype)
    qkv = random(len(LENGTHS), 2 * groups, width, dtype=dtype, seed=3)
    k, v = qkv[:, :groups], qkv[:, groups:]
    together, alone = lanes(dtype, groups, width), lanes(dtype, groups, width)
    found = ours.cached_attention.run(q, k, v, Lanes(together))
    for i, lane in enumerate(alone):
        own = (t[i : i + 1] for t in (q, k, v))
        assert torch.equal(ours.cached_attention.run(*own, Lanes([lane])), found[i : i + 1])
    crossed = ours.cross_attention.run(q, Lanes([KeyValue(*read(lane)) for lane in together]))
    assert torch.equal(crossed, found)
    use("torch")
    for i, lane in enumerate(together):
        keys, values = (t.double() for t in read(lane))
        assert lane.length == LENGTHS[i] + 1
        assert torch.equal(keys[-1], k[i].double())
        assert close(found[i : i + 1], ours.attention.run(q[i : i + 1].double(), keys, values), dtype)


def read(lane):
    return lane.keys[:, : lane.length].transpose(0, 1), lane.values[:, : lane.length].transpose(0, 1)


def test_what_is_no_number_stays_none(compiled):
    lane = lanes(torch.float32, 2, 16)[4]
    lane.keys[0, 7] = torch.nan
    q, kv = random(1, 2, 16), random(1, 2, 16)
    found = ours.cached_attention.run(q, kv, kv, Lanes([lane]))[0]
    assert found[:16].isnan().all()
    assert found[16:].isfinite().all()


def test_steps_in_one_program_give_the_bits_of_steps_alone(compiled):
    x, y = random(3, 64), random(3, 64, seed=1)
    apart, whole = [torch.empty(3, 64) for _ in range(3)], [torch.empty(3, 64) for _ in range(3)]
    chain = [
        lambda out: steps.add(x, y, out[0]), lambda out: steps.silu(out[0], out[1]),
        lambda out: steps.times(out[1], x, out[2]),
    ]  # fmt: skip
    for step in chain:
        assert steps.run(step(apart))
    assert steps.run([s for step in chain for s in step(whole)])
    assert torch.equal(whole[2], apart[2])


def test_many_rows_other_dtypes_and_broadcasts_are_left_to_torch(compiled):
    x = random(FEW_ROWS + 1, 8)
    assert steps.add(x, x, torch.empty_like(x)) is None
    assert steps.add(x[:2].double(), x[:2].double(), torch.empty(2, 8).double()) is None
    assert steps.add(x[:2], x[:1], torch.empty(2, 8)) is None
