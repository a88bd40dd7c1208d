"""A training run, from its config to its summary.

Read `run.py` first: a run, its parts, and how far it is; `experiments.train` has its loop. Then
`learner.py` (model and task as pure functions), `step.py` (one step, compiled), and
`evaluation.py`, which hands files of any size to `whole_files.py`. `setup.py` loads the data. On
disk a run is a folder (`workdir.py`) with checkpoints (`checkpoints.py`, and `saved.py`, which
knows the newest and the best). `trained.py` reads a model back. Beside the run stand its clocks
(`instruments.py`), advice for when memory does not suffice (`out_of_memory.py`), and at its end
`summary.py` with `pictures.py` and `page.py`.
"""
