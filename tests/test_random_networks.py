"""Property: for any network, size, grid and policy, the tiled function is the plain one."""

import hypothesis
import jax
import pytest
from hypothesis import HealthCheck, Phase, settings

import jaxtile

from .random_networks import EXAMPLES, Network, RandomPolicy, in_strips, networks
from .random_rules import nudged, within
from .support import assert_close, assert_same, results

# Every example compiles two programs: shrinking would take hours, and a network is short enough to
# read.
_SETTINGS = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "derandomize": True,
    "database": None,
    "phases": (Phase.explicit, Phase.generate),
}


def check(network: Network) -> None:
    """To 1e-12. A network may be so ill-conditioned that arguments one rounding away change plain
    JAX's own gradients by more: then to four times that, and to 1e-9, since where a maximum's place
    hangs on the last bit, such a change says nothing. Nor can anything be said where plain JAX has
    other gradients, or none, under `jit`: those behind the norm of what is constant but for
    rounding.
    """
    hypothesis.note(repr(network))
    options = {"in_axes": (None, (1, 2)), "tiles": network.tiles, "policy": network.policy}
    try:
        assert_same(network, *network.args, **options)
    except AssertionError:
        got = results(jaxtile.checkpoint(network, **options), network.args)
        want = results(network, network.args, jit=False)
        if not _close(results(network, network.args), want):
            hypothesis.event("plain JAX differs from itself")
            return
        assert_close(got, want, 1e-9)
        rounded = [results(network, nudged(network.args, seed), jit=False) for seed in range(3)]
        if not all(map(within, *map(jax.tree.leaves, (got, want, *rounded)))):
            raise
        hypothesis.event("ill-conditioned")
    jax.clear_caches()


def _close(got, want) -> bool:
    try:
        assert_close(got, want, 1e-9)
    except AssertionError:
        return False
    return True


@settings(max_examples=2, **_SETTINGS)
@hypothesis.given(networks())
def test_random_network(network):
    check(network)


@pytest.mark.slow
def test_a_maximum_of_what_is_computed_twice():
    """A compiler may round it in two ways, and then no element equals the maximum."""
    layers = (
        ("layers", ("conv", 5, 1, 1, "SAME", 2, 0.5), ("dense",)),
        ("instance_norm",),
        ("crop_at_run_time", 2),
        ("crop",),
        ("update", 4, 0),
        ("transposed", 4, 3),
        ("row_norm",),
        ("conv", 2, 2, 3, ((1, 1), (0, 2)), 1, -0.051628950485096636),
    )
    network = Network(layers, (2, 5, 20, 2), "whole", RandomPolicy(464), 80)
    options = {"in_axes": (None, (1, 2)), "tiles": network.tiles, "policy": network.policy}
    assert_same(network, *network.args, **options)


@pytest.mark.slow
@settings(max_examples=EXAMPLES, **(_SETTINGS | {"derandomize": False}))
@hypothesis.given(networks())
def test_many_random_networks(network):
    check(network)


@settings(max_examples=1, **_SETTINGS)
@hypothesis.given(networks())
def test_random_network_in_strips(network):
    check(in_strips(network))


@pytest.mark.slow
@settings(max_examples=EXAMPLES // 3, **(_SETTINGS | {"derandomize": False}))
@hypothesis.given(networks())
def test_many_random_networks_in_strips(network):
    check(in_strips(network))
