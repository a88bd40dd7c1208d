"""Pages about runs, and runs side by side."""

import json
import pathlib
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from experiments import compare
from experiments.program.config import ConfigError, base
from experiments.training import page

ROOT = pathlib.Path(__file__).parent.parent


def test_a_page_about_a_run(tmp_path):
    """Well-formed; what users named is text in it, not part of it."""
    (tmp_path / "loss.png").write_bytes(b"\x89PNG")
    quality = {"loss": 0.5, "iou": [0.25, None], "counted": [1200, 0], "other": [1, 2, 3]}
    rows = [("quality", "IoU <0.3> & more")]
    path = page.write(tmp_path, rows, quality, ["<b>cell", "rest"], [tmp_path / "loss.png"])
    text = path.read_text()
    tree = ElementTree.fromstring(
        re.sub(r"<!doctype html>|<meta[^>]*>", "", text).replace('==">', '=="/>')
    )
    cells = [[cell.text for cell in row] for row in tree.iter("tr")]
    assert cells == [
        ["quality", "IoU <0.3> & more"],
        ["class", "iou", "counted"],
        ["<b>cell", "0.2500", "1,200"],
        ["rest", "-", "0"],
    ]
    assert next(tree.iter("img")).attrib["src"] == "data:image/png;base64,iVBORw=="


def folder(path, policy, iou, done):
    config = base("unet", channels=4)
    config.policy = policy
    path.mkdir()
    (path / "config.json").write_text(config.to_json())
    lines = [{"step": i + 1, "loss": 1.0 / (i + 1)} for i in range(done)]
    lines.append({"step": done, "split": "eval", "loss": 0.25, "mean_iou": iou, "iou": [iou, 1.0]})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_what_differs_and_what_was_reached(tmp_path):
    one, two = folder(tmp_path / "a", "sqrt", 0.5, 3), folder(tmp_path / "b", "whole", 0.75, 5)
    sizes = {"bytes": {"compiled": 3 * 2**20, "plain_compiled": 6 * 2**20}}
    (two / "summary.json").write_text(json.dumps(sizes))
    runs = {"a": compare.read(one), "b": compare.read(two)}
    rows = {line[:20].strip(): line[20:].split() for line in compare.table(runs).splitlines()}
    assert rows["policy"] == ["'sqrt'", "'whole'"]
    assert "model.channels" not in rows
    assert rows["mean_iou"] == ["0.5", "0.75"]
    assert rows["steps done"] == ["3", "5"]
    assert rows["bytes a step"] == ["-", "3", "MiB"]
    compare.draw(runs, tmp_path / "compare.png")
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    command = [sys.executable, "-m", "experiments.compare", str(one), str(two)]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert told.strip() == compare.table({str(one): runs["a"], str(two): runs["b"]}).strip()
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        compare.read(tmp_path)
    with pytest.raises(ConfigError, match="a run is named twice"):
        compare.main(["compare", str(one), f"{one}/"])
