"""Decisions about memory.

Which values are stored, recomputed or offloaded. Any function of `jax.checkpoint_policies` is a
policy.
"""
