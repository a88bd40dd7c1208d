"""The peak of an allocator that never goes down; a GPU has one, so here its figures are given."""

import pytest

from experiments.devices import memory


@pytest.mark.parametrize(
    ("before", "after", "observed"),
    [
        ({"peak_bytes_in_use": 100}, {"peak_bytes_in_use": 300}, 300),
        ({"peak_bytes_in_use": 300}, {"peak_bytes_in_use": 300}, None),
        ({}, {}, None),
    ],
    ids=["steps took more", "compiling took more", "no figures"],
)
def test_only_what_steps_took_is_their_peak(before, after, observed, monkeypatch):
    figures = iter([before, after])
    monkeypatch.setattr(memory, "memory_of_device", lambda: next(figures))
    assert memory.Peak().observed() == observed
