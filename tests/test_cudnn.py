"""Algorithms without a fixed order of additions are known, and kept out of deterministic runs."""

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from experiments.devices import cudnn
from experiments.training.setup import without_order

_TEN_TIMES = """
import json, pathlib, sys
import jax, jax.numpy as jnp, numpy as np
jax.devices()
from experiments.devices import cudnn
excluded = cudnn.exclude_unordered(pathlib.Path(sys.argv[1]))
image = jax.random.normal(jax.random.key(0), (8, 572, 572, 1))
cotangent = jax.random.normal(jax.random.key(1), (8, 570, 570, 64))
def conv(kernel):
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(image, kernel, (1, 1), "VALID", dimension_numbers=layout)
gradient = jax.jit(lambda c: jax.vjp(conv, jnp.zeros((3, 3, 1, 64)))[1](c)[0])
results = {np.asarray(gradient(cotangent)).tobytes() for _ in range(10)}
print(json.dumps([excluded, len(results)]))
"""


def test_without_cudnn_it_is_said():
    if jax.default_backend() == "gpu":
        pytest.skip("cuDNN is here")
    with pytest.raises(cudnn.CudnnError, match=r"libcudnn\.so\.9 is not loaded"):
        cudnn.unordered_engines()


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
def test_a_kernels_gradient_has_the_same_bits_ten_times(tmp_path):
    file = tmp_path / "rules.json"
    command = [sys.executable, "-c", _TEN_TIMES, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    excluded, results = json.loads(done.stdout.splitlines()[-1])
    assert results == 1
    assert excluded == len(json.loads(file.read_text())["rules"]) > 0


@pytest.mark.parametrize(("unique", "names"), [(False, "scatter"), (True, "")])
def test_scatters_without_an_order_are_named(unique, names):
    def scattered(x, at):
        return x.at[at].add(1.0, unique_indices=unique)

    class Text:  # before a CPU's compiler has made loops of it
        def as_text(self):
            lowered = jax.jit(scattered).lower(jnp.zeros(8), jnp.arange(3))
            return lowered.as_text(dialect="hlo")

    assert without_order(Text()) == names
