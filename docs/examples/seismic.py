"""Onsets in seismic traces: one dimension, a 1-D U-Net, data of one's own. In this folder,

    jaxtile train --config=seismic.py --workdir=runs/seismic

takes less than a minute on a CPU. A trace is drawn: noise, and a wave that comes at some time.
"""

import numpy as np

from experiments.program.config import base


class Traces:
    """Sixteen thousand samples of one sensor each; the label is 1 from the wave's onset on."""

    shape, dtype, class_names = (2**14, 1), np.float32, ["noise", "wave"]

    def __init__(self, split):
        self.seed = ["train", "eval"].index(split)

    def __len__(self):
        return (64, 4)[self.seed]

    def read(self, index, window):
        rng = np.random.default_rng([self.seed, index])
        onset, time = rng.integers(2**12, 3 * 2**12), np.arange(2**14)
        wave = np.sin(time / 5) * np.exp(-np.maximum(time - onset, 0) / 2**12) * (time >= onset)
        trace = rng.normal(0, 0.5, 2**14) + 2 * wave
        return trace[window].astype(np.float32)[:, None], (time >= onset)[window]


def get_config():
    config = base("unet", channels=8, depth=2, padding="SAME")
    config.data.kind, config.data.dimensions = "seismic:Traces", 1
    config.data.dtype, config.data.mean, config.data.std = "float32", (), ()
    config.data.size = 2**12  # a window of a trace; 0: whole traces
    config.policy = "tiled:4"
    config.train.steps, config.train.learning_rate = 60, 1e-2
    config.eval.every = 0
    return config
