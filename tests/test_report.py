"""The report of a sweep, looked at in a real browser where there is one."""

import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

import policies
from experiments.measuring.cells import Cell
from experiments.measuring.results import Result, append, read
from experiments.report import conclusions, pareto, write

from .browser import needs_browser, opened
from .programs import python

ROOT = pathlib.Path(__file__).parent.parent
PLAN_ARGUMENTS = (jnp.ones((8, 8, 3, 3), jnp.float32), jnp.ones((1, 8, 64, 64), jnp.float32))


def loss(kernel, image):
    for _ in range(3):
        image = jnp.tanh(jax.lax.conv(image, kernel, (1, 1), "SAME"))
    return jnp.mean(image**2)


def values(seconds, size, **more):
    return {
        "seconds": seconds,
        "spread": 0.1,
        "compiled_bytes": size,
        "estimated_bytes": size,
        "observed_peak": None,
        "megapixels_per_second": 1 / seconds,
        "flops_per_second": 1e9 / seconds,
        "compile_seconds": 3.0,
        **more,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("sweep")
    plan = policies.plan(
        loss, *PLAN_ARGUMENTS, in_axes=(None, (2, 3)), budget="600kB", progress=lambda line: None
    )
    machine = {"jax": jax.__version__}
    results = [
        Result(Cell("unet", 572, policy="plain"), "ok", values(0.1, 9e9), machine),
        Result(Cell("unet", 572, policy="sqrt"), "ok", values(0.12, 5e9), machine),
        Result(Cell("unet", 764, policy="sqrt"), "ok", values(0.3, 8e9), machine),
        Result(
            Cell("unet", 572, policy="budget:2GB"),
            "ok",
            values(0.2, 2e9, plan=plan.as_json()),
            machine,
        ),
        Result(
            Cell("alexnet", policy="budget:1kB"),
            "does not fit",
            {"message": "</script> no"},
            machine,
        ),
    ]
    for result in results:
        append(found / "results.jsonl", result)
    write(found, list(read(found)[0].values()))
    return found


def test_the_page_stands_alone(folder):
    page = (folder / "report.html").read_text()
    assert "<!--" not in page
    assert "http" not in page.replace("http-equiv", "")
    for name in ("pareto-unet", "sizes-unet", "largest", "plan-3"):
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_it_concludes(folder):
    page = (folder / "report.html").read_text()
    least = "budget:2GB needs 0.22 of plain JAX&#x27;s memory and takes 2.00 times as long."
    assert f"<li>unet, 8 x 572 x 572, float32: {least}</li>" in page
    assert "<li>unet, 8 x 764 x 764, float32: plain JAX was not measured, or does not fit; " in page
    rows = json.loads(page.split("const rows = ")[1].split(";\n")[0])
    assert rows[1]["time / plain"] == pytest.approx(1.2)
    assert rows[1]["memory / plain"] == pytest.approx(5 / 9)
    assert "time / plain" not in rows[2]


@pytest.mark.parametrize(
    ("spread", "words"),
    [
        (0.01, "times as long; retained is the fastest, 0.90 times at 0.89 of the memory."),
        (
            0.15,  # retained's, of 90 ms, and plain's, of 100 ms
            "takes 1.20 times as long; retained is among the fastest (the spread does not tell it "
            "from plain), 0.90 times at 0.89 of the memory.",
        ),
        (
            0.5,
            "sqrt needs 0.56 of plain JAX's memory and takes 1.20 times as long, but their times "
            "cannot be told apart (steps of one policy spread by up to 50%).",
        ),
        (None, "cannot be told apart (one step each was timed)."),
    ],
)
def test_it_does_not_conclude_what_the_spread_does_not_support(spread, words):
    results = [
        Result(Cell("unet", 572, policy=policy), "ok", values(seconds, size, spread=spread), {})
        for policy, seconds, size in [
            ("plain", 0.1, 9e9),
            ("sqrt", 0.12, 5e9),
            ("retained", 0.09, 8e9),
        ]
    ]
    (found,) = conclusions(results)
    assert words in found
    assert ("fastest" in found) == (spread in (0.01, 0.15))


def test_pareto():
    assert pareto([(3, 1), (1, 3), (2, 2), (2.5, 2.5)]) == [(1, 3), (2, 2), (3, 1)]


def test_a_folder_without_results(tmp_path):
    done = python("-m", "experiments.report", f"--workdir={tmp_path}")
    assert done.returncode == 1
    assert "run experiments.sweep first" in done.stderr


NASTY = "<!--<script>alert(1)</script>--> $\\frac$ & \u2028 \0"


def test_foreign_lines_and_names_that_are_code(tmp_path):
    machine = {"jax": NASTY}
    for result in (
        Result(
            Cell("unet", policy=NASTY, tiles=NASTY, dtype=NASTY), "ok", values(0.1, 9e9), machine
        ),
        Result(Cell("unet", 764, policy="plain"), "ok", {"seconds": 0.2}, machine),
        Result(Cell("unet", 572, policy="sqrt"), "ok", values(0.1, 8e9, plan={"a": 1}), machine),
        Result(Cell("unet", 572, policy="plain"), "ok", values(0.1, "much"), machine),
        Result(Cell("alexnet", policy=NASTY), "error", {"message": NASTY}, machine),
        Result(Cell("alexnet"), NASTY, {}, machine),
    ):
        append(tmp_path / "results.jsonl", result)
    with open(tmp_path / "results.jsonl", "ab") as file:
        file.write(b"a note\n\xff\n{}\n")
    done = python("-m", "experiments.report", f"--workdir={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("warning: not a result, left out: results.jsonl, line") == 3
    assert "warning: the plan of unet,572,sqrt,,float32,0 cannot be shown" in done.stdout
    page = (tmp_path / "report.html").read_text()
    assert "<!--" not in page
    assert page.count("<script") == page.count("</script") == 1
    found = rows_of(page)
    assert [row["policy"] for row in found] == [NASTY, "plain", "sqrt", "plain", NASTY, "plain"]
    assert found[0]["tiles"] == found[4]["message"] == found[5]["status"] == NASTY
    assert [row.get("MiB") is None for row in found] == [False, True, False, True, True, True]


def rows_of(page: str):
    line = next(s for s in page.split("\n") if s.startswith("const rows = "))
    return json.loads(line.removeprefix("const rows = ").removesuffix(";"))


@needs_browser
def test_in_a_browser(folder):
    """It renders, sorts, filters, shows a plan, and has no errors."""
    from selenium.webdriver.common.by import By

    with opened(folder / "report.html") as driver:

        def column(name):
            heads = [h.text.split(" ▲")[0].split(" ▼")[0] for h in find("th")]
            at = heads.index(name)
            return [row.find_elements(By.TAG_NAME, "td")[at].text for row in find("tbody tr")]

        def find(selector):
            return driver.find_elements(By.CSS_SELECTOR, selector)

        for image in find("#pictures img"):
            assert int(image.get_attribute("naturalWidth")) > 100
        assert len(find("#pictures img")) == 3
        assert column("ms") == ["100", "120", "200", "300", ""]

        def click(name):
            next(h for h in find("th") if h.text.startswith(name)).click()

        click("MiB")
        smallest = [float(x) for x in column("MiB") if x]
        assert smallest == sorted(smallest)
        click("MiB")
        largest = [float(x) for x in column("MiB") if x]
        assert largest == sorted(largest, reverse=True)
        assert column("MiB")[-1] == ""
        box = find("#filter")[0]
        box.send_keys("sqrt 764")
        assert column("size") == ["764"]
        assert find("#count")[0].text == "1 of 5 cells."
        box.clear()
        box.send_keys("budget:2")
        find("tr.planned")[0].click()
        assert "bytes: budget" in find("#plan pre")[0].text
        assert int(find("#plan img")[0].get_attribute("naturalWidth")) > 100
        driver.save_screenshot(str(folder / "page.png"))


def test_rows_are_json(folder):
    rows = rows_of((folder / "report.html").read_text())
    assert [row["status"] for row in rows].count("ok") == 4
    assert rows[-1]["message"] == "</script> no"
