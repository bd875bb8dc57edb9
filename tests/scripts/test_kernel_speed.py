"""The measurements of the kernels, on weights too small to mean anything."""

import kernel_speed
import pytest
import torch

from transcribe.kernels import linear

SMALL = (64, 512)


@pytest.mark.parametrize("kind", kernel_speed.HALVES, ids=lambda kind: kind.name)
def test_errors_are_those_of_rounding(kind):
    raw = kernel_speed.random_weight(kind, *SMALL)
    weight = kernel_speed.as_weight(raw, kind)
    assert tuple(weight.shape) == SMALL
    for by_kernels in (True, False):
        assert 0 < kernel_speed.error(weight, torch.float32, by_kernels) < 1e-6
        assert 1e-4 < kernel_speed.error(weight, torch.bfloat16, by_kernels) < 1e-2


def test_memory_is_filled_with_whole_copies():
    raw = kernel_speed.random_weight(kernel_speed.T.Q8_0, *SMALL)
    parts = kernel_speed.copies(raw[:3], torch.zeros(3 * 1664 + 100, dtype=torch.uint8))  # 3 rows of 544 bytes
    assert len(parts) == 3
    assert all(torch.equal(part, raw[:3]) for part in parts)
    assert [part.data_ptr() - parts[0].data_ptr() for part in parts] == [0, 1664, 3328]


def test_a_product_goes_through_all_copies():
    given = iter([torch.randn(SMALL) for _ in range(8)])
    with pytest.raises(StopIteration):
        kernel_speed.product_time(given, 2, torch.float32, by_kernels=False)


def test_the_choice_of_path_is_put_back():
    before = linear.FEW_ROWS
    with kernel_speed.kernels_up_to(before + 1):
        assert before + 1 == linear.FEW_ROWS
    assert before == linear.FEW_ROWS


@pytest.mark.parametrize(
    ("first", "second", "rows"),
    [
        ({8: 1.0, 16: 2.0, 32: 4.0}, {8: 3.0, 16: 3.0, 32: 3.0}, 16),
        ({8: 1.0, 12: 3.1, 16: 2.0, 32: 4.0}, {8: 3.0, 12: 3.0, 16: 3.0, 32: 3.0}, 16),
        ({1: 1.0, 8: 1.0, 16: 2.0}, {8: 0.5, 16: 0.5, 64: 1.0}, 0),
        ({8: 1.0, 16: 1.0}, {8: 2.0, 16: 2.0}, 16),
    ],
)
def test_where_the_paths_cross(first, second, rows):
    assert kernel_speed.crossover(first, second) == rows


def test_the_report(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(kernel_speed, "OUTSIDE_CACHES", 1 << 20)
    monkeypatch.setattr(kernel_speed, "seconds", lambda *calls: [0.001 * (call() is not None) for call in calls])
    monkeypatch.setattr("sys.argv", ["kernel_speed.py", "--threads", "1", "--shape", "64", "512", "--formats", "Q4_K"])
    threads = torch.get_num_threads()
    try:
        kernel_speed.main()
    finally:
        torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    assert "| memory, GB/s, threads: 1 | 1.0 |" in lines
    rate = f"{64 * 512 // 256 * 144 / 1e6:.1f}"
    assert "| Q4_K | float32 | 100 % |" + 6 * f" {rate} |" in lines
    assert sum(line.startswith("| Q4_K | bfloat16 |") for line in lines) == 3
