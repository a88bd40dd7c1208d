"""Decisions about memory: which values are stored, recomputed or offloaded. Any function of `jax.checkpoint_policies` is a policy."""
