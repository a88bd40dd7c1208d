"""A training run, from its config to its summary.

Read `task.py` first (a model as pure functions), then `step.py` (one step, compiled), and
`evaluation.py`, which hands files of any size to `whole_files.py`. On disk a run is a folder
(`workdir.py`) with checkpoints (`checkpoints.py`, and `saved.py`, which knows the newest and the
best). Beside the run stand its clocks (`instruments.py`), advice for when memory does not suffice
(`out_of_memory.py`), and at its end `summary.py` with `pictures.py`. `experiments.train` puts them
together.
"""
