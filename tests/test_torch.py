"""Scores and all gradients against PyTorch, in float64, with the same weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models
from models._torch_file import read_torch_file

from .support import assert_close, normal

torch = pytest.importorskip("torch")
F = torch.nn.functional


class Weights:
    """A model's variables as PyTorch tensors, in their JAX layout, so that gradients are too."""

    def __init__(self, model):
        self.tensors = {
            ".".join(map(str, path)): torch.tensor(np.asarray(v[...]), requires_grad=True)
            for path, v in nnx.to_flat_state(nnx.state(model, (nnx.Param, nnx.BatchStat)))
        }

    def __getitem__(self, name):
        return self.tensors[name]

    def gradients(self, like):
        return {k: jnp.asarray(self.tensors[k].grad.numpy()) for k in like}

    def conv(self, x, name, bias=None, **options):
        kernel = self[f"{name}.kernel"].permute(3, 2, 0, 1).contiguous()
        bias = self.tensors.get(bias or f"{name}.bias")
        return F.conv2d(x, kernel, bias, **options)

    def batch_norm(self, x, name, training):
        scale, bias, mean, var = (self[f"{name}.{k}"] for k in ("scale", "bias", "mean", "var"))
        mean, var = mean.detach().clone(), var.detach().clone()
        return F.batch_norm(x, mean, var, scale, bias, training=training, eps=1e-5)


def randomise(model):
    """Biases, scales and statistics away from 0 and 1."""
    for seed, (_, v) in enumerate(nnx.to_flat_state(nnx.state(model, (nnx.Param, nnx.BatchStat)))):
        if v[...].ndim == 1:
            v[...] = v[...] + 0.3 * jnp.abs(normal(seed, *v.shape))
    return model


def assert_agree(model, image, theirs):
    """The output, and the gradients of a weighted sum of it with respect to weights and image."""
    weights = Weights(model)
    x = torch.tensor(np.asarray(image), requires_grad=True)
    y = theirs(weights, x.permute(0, 3, 1, 2))
    y.backward(torch.cos(torch.arange(y.numel(), dtype=y.dtype)).reshape(y.shape))
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    @jax.jit
    def ours(params, image):
        def scalar(params, image):
            y = nnx.merge(graphdef, params, rest, copy=True)(image)
            channels_first = jnp.moveaxis(y, -1, 1)
            return channels_first.ravel() @ jnp.cos(jnp.arange(y.size)), y

        return jax.grad(scalar, argnums=(0, 1), has_aux=True)(params, image)

    (gradients, image_gradient), output = ours(params, image)
    y = y.detach().numpy()
    y = jnp.asarray(y.transpose(0, 2, 3, 1) if y.ndim == 4 else y)
    assert_close(output, y)
    found = {".".join(map(str, k)): v[...] for k, v in nnx.to_flat_state(gradients)}
    assert_close(found, weights.gradients(found))
    assert_close(image_gradient, jnp.asarray(x.grad.numpy()))


def make(name, *args, **options):
    model = models.create(name, *args, param_dtype=jnp.float64, rngs=nnx.Rngs(0), **options)
    return randomise(model)


def torch_unet(w, x, upsampling="transposed"):
    skips = []
    for i in range(5):
        x = F.relu(w.conv(x, f"conv_d{i}a_b"))
        x = F.relu(w.conv(x, f"conv_d{i}b_c"))
        if i < 4:
            skips.append(x)
            x = F.max_pool2d(x, 2)
    for i in (3, 2, 1, 0):
        name = f"upconv_d4c_u{i}a" if i == 3 else f"upconv_u{i + 1}d_u{i}a"
        if upsampling == "transposed":
            kernel = w[f"{name}.kernel"].flip(0, 1).permute(2, 3, 0, 1)
            x = F.relu(F.conv_transpose2d(x, kernel, w[f"{name}.bias"], stride=2))
        else:
            x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
            x = F.relu(w.conv(x, name))
        cut = (skips[i].shape[2] - x.shape[2]) // 2
        x = torch.cat([skips[i][:, :, cut:-cut, cut:-cut], x], 1)
        x = F.relu(w.conv(x, f"conv_u{i}b_c"))
        x = F.relu(w.conv(x, f"conv_u{i}c_d"))
    return w.conv(x, "conv_u0d_score")


@pytest.mark.parametrize("upsampling", ["transposed", "bilinear"])
def test_unet(upsampling):
    model = make("unet", channels=2, upsampling=upsampling)
    model.eval()
    image = normal(1, 1, 188, 188, 1)
    assert_agree(model, image, lambda w, x: torch_unet(w, x, upsampling))


def torch_resnet50(w, x, training, blocks):
    def unit(x, name, **options):
        return w.batch_norm(w.conv(x, f"{name}.conv", **options), f"{name}.norm", training)

    x = F.relu(unit(x, "conv1", stride=2, padding=3))
    x = F.max_pool2d(x, 3, 2, 1)
    for stage, count in enumerate(blocks, start=1):
        for i in range(count):
            name = f"layer{stage}.{i}"
            stride = 2 if i == 0 and stage > 1 else 1
            shortcut = unit(x, f"{name}.downsample", stride=stride) if i == 0 else x
            y = F.relu(unit(x, f"{name}.conv1"))
            y = F.relu(unit(y, f"{name}.conv2", stride=stride, padding=1))
            x = F.relu(unit(y, f"{name}.conv3") + shortcut)
    return x.mean((2, 3)) @ w["fc.kernel"] + w["fc.bias"]


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_resnet50(training):
    model = make("resnet50", 7, width=16)
    model.train() if training else model.eval()
    image = normal(1, 2, 45, 38, 3)
    assert_agree(model, image, lambda w, x: torch_resnet50(w, x, training, (3, 4, 6, 3)))


def test_alexnet():
    def theirs(w, x):
        for i in range(1, 6):
            options = {"padding": {2: 2}.get(i, 1)}
            if i == 1:
                # SAME with stride 4: as many outputs as the stride fits
                total = [max(0, (-(-n // 4) - 1) * 4 + 11 - n) for n in x.shape[2:]]
                (top, bottom), (left, right) = [(t // 2, t - t // 2) for t in total]
                x = F.pad(x, (left, right, top, bottom))
                options = {"stride": 4}
            x = F.relu(w.conv(x, f"conv{i}", bias=f"bias{i}", **options))
            if i <= 2:
                x = F.local_response_norm(x, 5, alpha=5e-4, beta=0.75, k=2.0)
            if i in (1, 2, 5):
                x = F.max_pool2d(x, 3, 2)
        return x

    assert_agree(make("alexnet", width=4), normal(1, 2, 112, 99, 3), theirs)


def torch_vgg16(w, x):
    for block, count in enumerate((2, 2, 3, 3, 3), start=1):
        for i in range(1, count + 1):
            x = F.relu(w.conv(x, f"conv{block}_{i}", padding=1))
        x = F.max_pool2d(x, 2)
    return x


def test_vgg16():
    assert_agree(make("vgg16", width=4), normal(1, 2, 64, 71, 3), torch_vgg16)


def test_vgg16_classifier():
    """On the original size the sliding classifier is the dense one."""
    model = make("vgg16", 5, width=1)
    model.eval()

    def theirs(w, x):
        x = torch_vgg16(w, x).flatten(1)
        for name in ("fc6", "fc7", "fc8"):
            kernel = w[f"classifier.{name}.kernel"].permute(3, 2, 0, 1).flatten(1)
            x = F.linear(x, kernel, w[f"classifier.{name}.bias"])
            x = x if name == "fc8" else F.relu(x)
        return x

    assert_agree(model, normal(1, 1, 224, 224, 3), theirs)


def test_ties_of_max_pool():
    """A ReLU makes windows of zeros; both send the gradient to the first."""
    from jaxtile import ops

    x = np.maximum(np.asarray(normal(0, 1, 12, 12, 2)), 0.5)
    ours = jax.grad(lambda x: (ops.max_pool(x, window=3, strides=2) ** 2).sum())(jnp.asarray(x))
    t = torch.tensor(x, requires_grad=True)
    (F.max_pool2d(t.permute(0, 3, 1, 2), 3, 2) ** 2).sum().backward()
    assert_close(ours, jnp.asarray(t.grad.numpy()))


def test_what_torch_saves_is_read(tmp_path):
    """Without its code: a whole module is refused."""
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)).half()
    torch.save({"model": module.state_dict(), "epoch": 3}, tmp_path / "a.pth")
    found = read_torch_file(tmp_path / "a.pth")
    want = module.state_dict()
    assert list(found) == list(want)
    for name, value in want.items():
        np.testing.assert_array_equal(found[name], value.numpy())
    torch.save(module, tmp_path / "b.pth")
    with pytest.raises(ValueError, match="only weights are read"):
        read_torch_file(tmp_path / "b.pth")
