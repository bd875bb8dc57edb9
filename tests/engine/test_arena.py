import torch
from hypothesis import given
from hypothesis import strategies as st

from transcribe.engine.arena import ALIGNMENT, Arena, aligned, place

storages = st.lists(
    st.tuples(st.integers(1, 5000), st.integers(0, 30), st.integers(0, 30)).map(lambda s: (s[0], *sorted(s[1:]))),
    max_size=25,
)


@given(storages)
def test_storages_alive_at_the_same_time_never_overlap(given_storages):
    offsets, total = place(given_storages)
    for i, (size, born, dies) in enumerate(given_storages):
        assert offsets[i] % ALIGNMENT == 0
        assert offsets[i] + size <= total
        for j in range(i):
            other, other_born, other_dies = given_storages[j]
            if born <= other_dies and other_born <= dies:
                assert offsets[i] + size <= offsets[j] or offsets[j] + other <= offsets[i]


@given(storages)
def test_arena_is_at_least_the_most_that_lives_at_once_and_at_most_everything(given_storages):
    _, total = place(given_storages)
    at_once = [sum(aligned(s) for s, born, dies in given_storages if born <= t <= dies) for t in range(31)]
    assert max(at_once) <= total <= sum(aligned(s) for s, _, _ in given_storages)


def test_storages_that_never_meet_share_one_place():
    offsets, total = place([(1000, 0, 1), (1000, 2, 3), (500, 4, 5)])
    assert offsets == [0, 0, 0]
    assert total == aligned(1000)


def test_poison_is_nan_in_floats_and_minus_one_in_integers():
    arena = Arena(torch.device("cpu"))
    arena.reserve(256)
    arena.poison(64, 64)
    assert arena.tensor(64, (16,), torch.float32).isnan().all()
    assert arena.tensor(64, (32,), torch.bfloat16).isnan().all()
    assert (arena.tensor(64, (8,), torch.int64) == -1).all()
