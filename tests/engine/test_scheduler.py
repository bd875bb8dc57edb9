import pytest
import torch
import torch.nn.functional as F
from blocks import CachedLayer, Layer, Projections, fill, rotation
from torch import nn
from torch.profiler import ProfilerActivity, profile

from transcribe.engine import KVCache, Scheduler
from transcribe.engine.binding import Call, Group
from transcribe.engine.modules import Linear, StridedConv
from transcribe.engine.plan import make_plan

SWITCHES = [
    pytest.param({}, id="recycled"),
    pytest.param({"recycle": False}, id="kept"),
    pytest.param({"poison": True}, id="poisoned"),
]


@pytest.mark.parametrize("switches", SWITCHES)
def test_a_stack_of_layers_gives_the_bits_of_the_plain_modules(switches):
    layers = [fill(Layer(), seed) for seed in range(3)]
    engine = Scheduler(**switches)
    for length in (17, 40, 17):
        expected = x = torch.randn(length, 32, generator=torch.Generator().manual_seed(length))
        for layer in layers:
            expected = layer(expected, rotation(length))
            x = engine(layer, x, rotation(length))
        assert torch.equal(x, expected)


@pytest.mark.parametrize("switches", SWITCHES)
def test_keys_and_values_outlive_the_projection_they_are_views_of(switches):
    block, engine = fill(Projections()), Scheduler(**switches)
    x, other = torch.randn(2, 19, 32)
    keys, values = engine(block, x)
    engine(block, other)
    expected = block(x)
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


def test_a_second_run_reads_its_own_positions():
    layer, engine = fill(Layer()), Scheduler()
    x = torch.randn(20, 32)
    engine(layer, x, rotation(20))
    shifted = rotation(40)[20:]
    assert torch.equal(engine(layer, x, shifted), layer(x, shifted))


def test_poison_shows_a_place_that_was_released_too_early():
    layer, engine = fill(Layer()), Scheduler(poison=True)
    x = torch.randn(6, 32)
    plan = engine.plan(layer, x, rotation(6))
    assert engine(layer, x, rotation(6)).isfinite().all()
    born = next(step for step in plan.steps if step.releases or (step.storage and step.storage.arena))
    born.releases = (born.storage,)
    engine._programs.clear()
    assert engine(layer, x, rotation(6)).isnan().any()


def test_layers_share_one_plan_and_a_known_length_is_not_planned_again():
    layers, engine = [fill(Layer(), seed) for seed in range(3)], Scheduler()
    plans = {id(engine.plan(layer, torch.zeros(n, 32), rotation(n))) for layer in layers for n in (5, 8, 5)}
    assert len(plans) == 2


def test_layers_that_differ_in_a_plain_attribute_do_not_share_a_graph():
    engine = Scheduler()
    x = torch.randn(20, 32)
    for heads in (4, 2):
        layer = fill(Layer(heads=heads))
        assert torch.equal(engine(layer, x, rotation(20)), layer(x, rotation(20)))


def test_decoding_steps_replay_one_plan_whose_addresses_do_not_move():
    layer, engine = fill(CachedLayer()), Scheduler()
    cache = KVCache(engine, 1, limit=100, heads=4, head_dim=8, dtype=torch.float32)
    x = torch.randn(80, 32)
    whole = layer(x, rotation(80), KVCache(engine, 1, 100, 4, 8, torch.float32)[0])
    addresses, rows = set(), []
    for i in range(80):
        rows.append(engine(layer, x[i : i + 1], rotation(80)[i : i + 1], cache[0]))
        ((program,),) = (programs.values() for programs in engine._programs.values())
        calls = [instruction for instruction in program.instructions if isinstance(instruction, Call)]
        groups = [instruction for instruction in program.instructions if isinstance(instruction, Group)]
        held = [a for call in calls for a in call.args] + [a for group in groups for a in group.program.kept]
        addresses.add(tuple(a.data_ptr() for a in held if isinstance(a, torch.Tensor)))
    assert len(engine._plans) == len(addresses) == 1
    assert addresses != {()}
    assert torch.allclose(torch.cat(rows), whole, atol=1e-5)


def test_an_operand_that_is_read_again_keeps_its_storage():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = Linear(8, 8)

        def forward(self, x):
            h = self.proj(x)
            return F.gelu(h) + h

    block, engine = fill(Twice()), Scheduler(poison=True)
    x = torch.randn(4, 8)
    assert torch.equal(engine(block, x), block(x))


def test_inputs_are_never_written():
    class OnlyAdds(nn.Module):
        def forward(self, x):
            return torch.tanh(x) + 1.0

    x = torch.randn(5, 4)
    before = x.clone()
    Scheduler(poison=True)(OnlyAdds(), x)
    assert torch.equal(x, before)


def test_a_strided_convolution_is_torchs():
    conv = StridedConv(6, 10, kernel=7, stride=3)
    weight, bias = torch.randn(10, 6, 7), torch.randn(10)
    conv.weight, conv.bias = weight, bias
    conv.prepare()
    for length in (7, 8, 9, 10, 40):
        x = torch.randn(length, 6)
        expected = F.conv1d(x.t()[None], weight, bias, stride=3)[0].t()
        assert torch.allclose(Scheduler()(conv, x), expected, atol=1e-5)


def test_an_operation_without_a_rule_is_named():
    class Sorts(nn.Module):
        def forward(self, x):
            return torch.cumsum(x, 0)

    with pytest.raises(NotImplementedError, match="Sorts: no rule for cumsum"):
        Scheduler()(Sorts(), torch.zeros(3))


def test_a_tensor_held_by_the_block_is_refused():
    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.positions = torch.arange(3)

        def forward(self, x):
            return x + self.positions

    with pytest.raises(TypeError, match="make it an input"):
        Scheduler()(Holds(), torch.zeros(3))


def test_recycling_needs_less_than_keeping():
    layer, inputs = fill(Layer()), (torch.zeros(200, 32), rotation(200))
    graph_of = Scheduler()
    graph_of.plan(layer, *inputs)
    (graph,) = graph_of._graphs.values()
    recycled, kept = make_plan(graph, layer, inputs), make_plan(graph, layer, inputs, recycle=False)
    assert recycled.peak_bytes < 0.6 * kept.kept_bytes


@pytest.mark.parametrize("length", [100, 700, 1500])
def test_the_peak_is_known_before_the_run(length):
    layer, engine = fill(Layer(width=64)), Scheduler()
    x = torch.randn(length, 64)
    predicted = engine.plan(layer, x, rotation(length)).peak_bytes
    assert predicted == pytest.approx(measured_peak(lambda: engine(layer, x, rotation(length))), rel=0.05)


def test_a_dry_run_gives_forms_and_counts_what_is_held():
    layers, engine = [fill(Layer(), seed) for seed in range(3)], Scheduler()
    with engine.dry() as account:
        x = engine.empty((50, 32), torch.float32)
        for layer in layers:
            x = engine(layer, x, rotation(50))
        assert x.shape == (50, 32)
        assert account.live == x.nbytes
    assert engine.arena.buffer.numel() == 0
    plan = engine.plan(layers[0], x, rotation(50))
    assert account.peak_bytes == x.nbytes + plan.peak_bytes


def test_what_is_kept_without_recycling_goes_when_the_next_piece_of_work_begins():
    engine = Scheduler(recycle=False)
    engine(fill(Layer()), torch.randn(5, 32), rotation(5))
    assert engine._kept
    engine.begin()
    assert not engine._kept


def measured_peak(run) -> int:
    """The most bytes that torch's CPU allocator had given out at any time during `run`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    del result
    return peak
