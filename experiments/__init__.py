"""The programs, and the rooms that hold their parts.

Each file in this folder is a program, run as `python -m experiments.NAME`:

    train      train a model as a config file says
    predict    apply a trained model to an image of any size
    compare    two runs or more, side by side
    plan       plan a model for a budget of memory; `--reference` compares policies
    largest    the largest image that trains within a budget, per policy
    gigapixel  steps on images in host memory, larger than the device
    sweep      measure models x sizes x policies
    report     a page about a sweep
    bench      jaxtile beside plain JAX, and PyTorch
    grids      time and memory of finer and finer grids
    scaling    the time of a step on many devices, on paper
    calibrate  measure what operations cost on this device, for the planner
    cell       one measurement of a sweep, in a process of its own
    peers      the same step in PyTorch, in a process of its own

The rooms, in an order in which each needs only rooms before it: `program` (config, command line,
end), `images` (files of any size), `data` (labelled examples), `tasks` (what scores mean),
`devices`, `measuring`, `predicting`, `training`, `reference`. No room imports a program.
"""

import os

# They draw to files. A notebook's kernel names a backend for what it starts, which may be missing.
os.environ["MPLBACKEND"] = "Agg"
