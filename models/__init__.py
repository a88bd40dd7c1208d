"""Flax NNX models that name their activations and know no policy."""
