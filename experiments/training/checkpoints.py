"""Checkpoints that survive: written atomically, read back with their digest.

A checkpoint is a folder per step, made by orbax: arrays by name, and a small record. It appears
under its name only once it is complete. Its record holds a digest of the arrays, so that damage is
noticed; a damaged checkpoint is set aside, with a warning, and the one before it is used.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import hashlib
import os
import pathlib
import shutil
import sys
from collections.abc import Collection, Container
from typing import Any

import jax
import numpy as np
from absl import logging

Arrays = dict[str, np.ndarray]


class CheckpointError(RuntimeError):
    """No checkpoint can be used, although there are some; or none can be written."""


@dataclasses.dataclass(frozen=True)
class Restored:
    step: int
    arrays: Arrays
    record: dict[str, Any]
    """What was saved beside the arrays."""


def flatten(tree: Any) -> dict[str, Any]:
    """The leaves by name, as `params.conv1.kernel`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def unflatten(like: Any, arrays: Arrays, source: str | pathlib.Path = "the checkpoint") -> Any:
    """A tree like another, with these leaves: the inverse of `flatten`."""
    advice = ". A checkpoint goes with the code and the options of the model that it is of"
    wanted = flatten(like)
    if wanted.keys() != arrays.keys():
        missing = wanted.keys() - arrays.keys()
        unknown = arrays.keys() - wanted.keys()
        raise CheckpointError(
            f"{source} is of another model or optimiser: it lacks {_listed(missing)}, and has "
            f"{_listed(unknown)} that is not wanted{advice}"
        )
    for name, leaf in wanted.items():
        if leaf.shape != arrays[name].shape or leaf.dtype != arrays[name].dtype:
            raise CheckpointError(
                f"{source} has {name} as {arrays[name].dtype}{list(arrays[name].shape)}, the "
                f"model as {leaf.dtype}{list(leaf.shape)}{advice}"
            )
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted])


def _listed(names: Collection[str]) -> str:
    """A few of them."""
    shown = ", ".join(sorted(names)[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown or "nothing"


class Checkpoints:
    """The checkpoints in a folder, of which the newest `keep` stay; None: all."""

    def __init__(self, folder: pathlib.Path, *, keep: int | None, read_only: bool = False):
        import orbax.checkpoint as ocp

        # Orbax warns of what is meant, as of `read_only`, and prints what it raises as well.
        logging.set_verbosity(logging.FATAL)
        self._ocp, self.folder = ocp, folder.absolute()
        self._manager, self._read_only = None, read_only
        _ignore_closed_loops()
        if read_only and not folder.is_dir():
            return
        alone = {}
        if jax.process_count() > 1:  # this process does it all, and waits for no other
            processes = ocp.options.MultiprocessingOptions(
                primary_host=jax.process_index(), active_processes={jax.process_index()}
            )
            alone = {"multiprocessing_options": processes}
            self.folder.mkdir(parents=True, exist_ok=True)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            enable_async_checkpointing=False,
            create=not (read_only or alone),
            read_only=read_only,
            **alone,
        )
        self._manager = ocp.CheckpointManager(
            self.folder, options=options, item_names=("arrays", "record")
        )

    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps()) if self._manager else []

    def save(self, step: int, tree: Any, record: dict[str, Any]) -> None:
        """Write one. If the step is there already, it is left as it is: a run comes to the same
        state again.
        """
        if step in self.steps():
            return
        arrays = {name: np.asarray(leaf) for name, leaf in flatten(tree).items()}
        args = self._ocp.args
        content = args.Composite(
            arrays=args.StandardSave(arrays),
            record=args.JsonSave({"digest": digest(arrays), "record": record}),
        )
        try:
            self._manager.save(step, args=content, force=True)
            self._manager.wait_until_finished()
        except Exception as error:  # whatever orbax makes of a full disk
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written to {self.folder}: "
                f"{_reason(error)}. Those before it are as they were"
            ) from error

    def keep_only(self, wanted: Container[int]) -> None:
        """Remove those of other steps."""
        for step in self.steps():
            if step not in wanted:
                self._manager.delete(step)

    def record(self, step: int) -> dict[str, Any]:
        """What was saved beside the arrays; nothing if it is damaged."""
        args = self._ocp.args
        try:
            found = self._manager.restore(step, args=args.Composite(record=args.JsonRestore()))
            return found.record["record"]
        except Exception:  # whatever orbax makes of damaged files
            return {}

    def restore(self) -> Restored | None:
        """The newest one that is whole; None if there is none at all."""
        damaged = []
        for step in reversed(self.steps()):
            try:
                found = self._read(step)
            except Exception as error:  # whatever orbax makes of damaged files
                damaged.append(step)
                print(
                    f"warning: the checkpoint of step {step} is damaged ({_first_line(error)})",
                    flush=True,
                )
                continue
            for step in damaged:
                self._set_aside(step)
            if damaged:
                print(f"going on from the checkpoint of step {found.step} instead", flush=True)
            return found
        if damaged:
            raise CheckpointError(
                f"all checkpoints in {self.folder} are damaged (steps {damaged}); to start anew, "
                "remove that folder"
            )
        return None

    def _read(self, step: int) -> Restored:
        args = self._ocp.args
        found = self._manager.restore(
            step, args=args.Composite(arrays=args.StandardRestore(), record=args.JsonRestore())
        )
        arrays = {name: np.asarray(x) for name, x in found.arrays.items()}
        if digest(arrays) != found.record["digest"]:
            raise ValueError("its arrays do not have the digest that was saved with them")
        return Restored(step, arrays, found.record["record"])

    def _set_aside(self, step: int) -> None:
        """So that the step can be written again."""
        if self._read_only:
            return
        aside = self.folder.parent / "damaged" / f"{self.folder.name}-{step}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.parent.mkdir(exist_ok=True)
        (self.folder / str(step)).rename(aside)
        self._manager.reload()

    def close(self) -> None:
        if self._manager:
            self._manager.close()


@functools.cache
def _ignore_closed_loops() -> None:
    """If one of orbax's writes fails, the others find its event loop closed, and threads print that
    beside the error.
    """
    before = sys.unraisablehook

    def hook(found: Any) -> None:
        if str(found.exc_value) != "Event loop is closed":
            before(found)

    sys.unraisablehook = hook


def _reason(error: Exception) -> str:
    """What the system said, if it is in what the libraries between say."""
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO)
    found = [os.strerror(code) for code in codes if os.strerror(code) in str(error)]
    return found[0] if found else _first_line(error)


def _first_line(error: Exception) -> str:
    """Without the middle, if it is long: the cause is at the end."""
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return line if len(line) <= 200 else f"{line[:90]} ... {line[-100:]}"


def digest(arrays: Arrays) -> str:
    """Of names, types, shapes and values."""
    total = hashlib.sha256()
    for name in sorted(arrays):
        x = arrays[name]
        total.update(f"{name} {x.dtype} {x.shape};".encode())
        total.update(np.ascontiguousarray(x).tobytes())
    return total.hexdigest()
