"""Property: for any network, size, grid and policy, the tiled function is the plain one."""

import hypothesis
import jax
import pytest
from hypothesis import HealthCheck, Phase, settings

from .random_networks import Network, networks
from .support import assert_same

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
    hypothesis.note(repr(network))
    assert_same(
        network, *network.args, in_axes=(None, (1, 2)), tiles=network.tiles, policy=network.policy
    )
    jax.clear_caches()


@settings(max_examples=2, **_SETTINGS)
@hypothesis.given(networks())
def test_random_network(network):
    check(network)


@pytest.mark.slow
@settings(max_examples=600, **(_SETTINGS | {"derandomize": False}))
@hypothesis.given(networks())
def test_many_random_networks(network):
    check(network)
