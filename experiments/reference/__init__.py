"""Figures of other frameworks and papers, computed anew from this project's models.

Nothing here is needed to train. `frameworks.py` has what other frameworks keep for their backward
pass. `lower_sets.py` repeats the order in which a reference program searched. `table.py` sets
policies beside these figures, for `python -m experiments.plan --reference`.
"""
