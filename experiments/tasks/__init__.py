"""What scores mean: a loss, measures of quality, what is written, and how it is drawn.

`_base.py` says what a task is; the built-in ones, `_classes.py` and `_numbers.py`, are written to
it as anybody's is. A config names one as `"segmentation"` or `"my_package.tasks:Depth"`.
"""

from __future__ import annotations

from collections.abc import Callable

import models

from ._base import Task as Task
from ._classes import Classification as Classification
from ._classes import MultiLabel as MultiLabel
from ._classes import Segmentation as Segmentation
from ._classes import class_colours as class_colours
from ._numbers import Regression as Regression

_TASKS: dict[str, Callable[..., Task]] = {
    "segmentation": Segmentation,
    "classification": Classification,
    "multi_label": MultiLabel,
    "regression": Regression,
}


def create(name: str, *, classes: int, dense: bool) -> Task:
    """A task by name, for so many scores, at each position (`dense`) or for each image.

    `"auto"` is segmentation or classification, whichever the scores are for.
    """
    if name == "auto":
        name = "segmentation" if dense else "classification"
    make = models.find(name, _TASKS, "task")
    task = models.call(make, f"the task {name!r}", {}, {"classes": classes, "dense": dense})
    if not isinstance(task, Task):
        raise ValueError(
            f"the task {name!r} makes a {type(task).__name__}, which is not derived from "
            "experiments.tasks.Task"
        )
    for method in ("loss", "compare"):
        if getattr(type(task), method) is getattr(Task, method):
            raise ValueError(f"the task {name!r} has no `{method}(self, scores, labels)`")
    if task.dense != dense:
        raise ValueError(
            f"the task {name!r} needs scores for each {_unit(task.dense)}, but the model has some "
            f"for each {_unit(dense)}"
        )
    return task


def _unit(dense: bool) -> str:
    return "position" if dense else "image"
