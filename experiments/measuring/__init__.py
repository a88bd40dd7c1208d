"""Time and memory of models under policies, measured one by one.

`problems.py` has the models at their reference sizes, with networks of other libraries from
`third_party.py` and `convnext.py`, and `baselines.py` what JAX offers without jaxtile. `cells.py`
says what one measurement is, `results.py` keeps what came of it in a file, and `processes.py` runs
each in a process of its own, with `child.py`, which ends that process when its parent ends.
`measure.py` times one compiled function. `torch_models.py` has the models in PyTorch, and
`report.html` is the page that `experiments.report` fills.
"""
