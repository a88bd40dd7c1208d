"""ResNet-50, as a rule v1.5 (the stride is on the 3 x 3 convolution), trained, frozen or folded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxtile import nn, ops

from ._sizes import check_image


class Trunk(nnx.Module):
    """ResNet-50 without its classifier: `ResNet50` has one beside it, and `UNet` a way up.

    Args as those of `ResNet50`.
    """

    def __init__(
        self,
        *,
        in_channels: int = 3,
        blocks: Sequence[int] = (3, 4, 6, 3),
        width: int = 64,
        spatial: int = 2,
        stride_first: bool = False,
        zero_init_residual: bool = False,
        **options: Any,
    ):
        self.in_channels, self.stride_first = in_channels, stride_first
        self.blocks, self.width, self.spatial = tuple(blocks), width, spatial
        options["spatial"] = spatial
        self.conv1 = Unit(in_channels, width, 7, 2, 3, **options)
        n_in = width
        for stage, count in enumerate(self.blocks, start=1):
            layers = []
            for i in range(count):
                strides = (1, 2 if i == 0 and stage > 1 else 1)
                strides = strides[::-1] if stride_first else strides
                layers.append(Bottleneck(n_in, width, strides, zero_init_residual, **options))
                n_in = 4 * width
            setattr(self, f"layer{stage}", nnx.List(layers))
            width *= 2

    @property
    def widths(self) -> tuple[int, ...]:
        """Channels of the image, and of what each level gives."""
        stages = (4 * self.width * 2**i for i in range(len(self.blocks)))
        return self.in_channels, self.width, *stages

    def level(self, x: jax.Array, level: int) -> jax.Array:
        """From the level before to this one, of half the size: 1 is the first convolution, 2 the
        pool and the first stage, and so on.
        """
        if level == 1:
            return self.conv1(x, "conv1", relu=True)
        if level == 2:
            x = checkpoint_name(ops.max_pool(x, window=3, strides=2, padding=1), "maxpool")
        for i, block in enumerate(getattr(self, f"layer{level - 1}")):
            x = block(x, f"layer{level - 1}.{i}")
        return x


class ResNet50(Trunk):
    """ResNet-50. Trained with the statistics of the batch; `fold_batch_norm` gives the graph that
    inference engines run.

    Names, per convolution: `conv1`, `layer1.0.conv1`, `layer1.0.downsample`, and after
    normalisation and ReLU `conv1.bias_relu`, `layer1.0.conv1.bias_relu`; where the branches meet
    `layer1.0.add`, and after ReLU `layer1.0.bias_relu`; then `maxpool`, `avgpool`, `flatten`, `fc`,
    `fc.bias_add`; in `probabilities`, `softmax.max`, `.sub`, `.exp`, `.sum`, `.div`.

    Args:
      num_classes: of the classifier.
      in_channels: channels of the image.
      blocks: per stage. (3, 4, 23, 3) is ResNet-101, (3, 8, 36, 3) ResNet-152.
      width: channels of the stem and of the first stage's 3 x 3 convolutions.
      spatial: spatial axes: 1, 2, or 3 for volumes.
      frozen: normalise with the running statistics in training too, and never change them.
      momentum: of the running statistics (PyTorch's 0.1 is 0.9 here).
      stride_first: the 1 x 1 convolution before the 3 x 3 one has the stride: version 1, as Keras.
      zero_init_residual: the last norm of each block starts with a scale of 0, and so each block as
        its shortcut. With few images in a batch it learns faster (torchvision's option).
      folded: without batch norm, with one bias per ReLU: what `fold_batch_norm` returns.
      dtype: of the computation; None takes it from image and weights.
      param_dtype: of the weights.
      rngs: as `nnx.Rngs(0)`.
    """

    def __init__(
        self,
        num_classes: int = 1000,
        *,
        in_channels: int = 3,
        blocks: Sequence[int] = (3, 4, 6, 3),
        width: int = 64,
        spatial: int = 2,
        frozen: bool = False,
        momentum: float = 0.9,
        stride_first: bool = False,
        zero_init_residual: bool = False,
        folded: bool = False,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.folded = folded
        super().__init__(
            in_channels=in_channels,
            blocks=blocks,
            width=width,
            spatial=spatial,
            stride_first=stride_first,
            zero_init_residual=zero_init_residual,
            frozen=frozen,
            momentum=momentum,
            folded=folded,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        n_in = self.widths[-1]
        self.fc = nnx.Linear(n_in, num_classes, dtype=dtype, param_dtype=param_dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The logits."""
        check_image("ResNet50", x.shape, self.spatial, self.in_channels)
        for level in range(1, len(self.widths)):
            x = self.level(x, level)
        space = tuple(range(1, x.ndim - 1))
        x = checkpoint_name(x.mean(space, keepdims=True), "avgpool")
        x = checkpoint_name(x.reshape(x.shape[0], -1), "flatten")
        dtype = self.fc.dtype or jnp.result_type(x, self.fc.kernel[...])
        y = x.astype(dtype) @ self.fc.kernel[...].astype(dtype)
        y = checkpoint_name(y, "fc")
        return checkpoint_name(y + self.fc.bias[...].astype(dtype), "fc.bias_add")

    def probabilities(self, x: jax.Array) -> jax.Array:
        """Softmax of the logits."""
        y = self(x)
        top = checkpoint_name(y.max(-1, keepdims=True), "softmax.max")
        e = checkpoint_name(jnp.exp(checkpoint_name(y - top, "softmax.sub")), "softmax.exp")
        return checkpoint_name(
            e / checkpoint_name(e.sum(-1, keepdims=True), "softmax.sum"), "softmax.div"
        )

    def loss(self, x: jax.Array, labels: jax.Array) -> jax.Array:
        """Mean softmax cross-entropy; images labelled -1 do not count."""
        return checkpoint_name(ops.softmax_cross_entropy(self(x), labels), "loss")


class Unit(nnx.Module):
    """A convolution and its batch norm; folded, a bias in its place (or none: `bias=False`)."""

    def __init__(
        self,
        n_in: int,
        n_out: int,
        kernel: int,
        stride: int,
        padding: int,
        *,
        spatial: int,
        frozen: bool,
        momentum: float,
        folded: bool,
        bias: bool = True,
        zero_scale: bool = False,
        dtype: Any,
        param_dtype: Any,
        rngs: nnx.Rngs,
    ):
        types = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.conv = nn.Conv(
            n_in,
            n_out,
            (kernel,) * spatial,
            stride,
            padding=padding,
            use_bias=False,
            kernel_init=nnx.initializers.he_normal(),
            **types,
        )
        self.norm = nnx.data(None)
        self.bias = nnx.data(None)
        if not folded:
            scale = nnx.initializers.zeros if zero_scale else nnx.initializers.ones
            self.norm = nn.BatchNorm(
                n_out, frozen=frozen, momentum=momentum, scale_init=scale, **types
            )
        elif bias:
            self.bias = nnx.Param(jnp.zeros(n_out, param_dtype))

    def __call__(self, x: jax.Array, name: str, *, relu: bool = False) -> jax.Array:
        x = checkpoint_name(self.conv(x), name)
        if self.norm is not None:
            x = self.norm(x)
        if self.bias is not None:
            x = x + self.bias[...].astype(x.dtype)
        return checkpoint_name(nnx.relu(x), f"{name}.bias_relu") if relu else x


class Bottleneck(nnx.Module):
    """1 x 1, 3 x 3, 1 x 1, and a shortcut. Folded, one bias serves both branches."""

    def __init__(
        self,
        n_in: int,
        width: int,
        strides: tuple[int, int],
        zero_init_residual: bool,
        *,
        folded: bool,
        **options: Any,
    ):
        n_out, stride = 4 * width, max(strides)
        self.downsample = nnx.data(None)
        if stride != 1 or n_in != n_out:
            self.downsample = Unit(n_in, n_out, 1, stride, 0, folded=folded, bias=False, **options)
        self.conv1 = Unit(n_in, width, 1, strides[0], 0, folded=folded, **options)
        self.conv2 = Unit(width, width, 3, strides[1], 1, folded=folded, **options)
        last = {"bias": False, "zero_scale": zero_init_residual}
        self.conv3 = Unit(width, n_out, 1, 1, 0, folded=folded, **last, **options)
        self.bias = nnx.data(None)
        if folded:
            self.bias = nnx.Param(jnp.zeros(n_out, options["param_dtype"]))

    def __call__(self, x: jax.Array, name: str) -> jax.Array:
        shortcut = x if self.downsample is None else self.downsample(x, f"{name}.downsample")
        x = self.conv1(x, f"{name}.conv1", relu=True)
        x = self.conv2(x, f"{name}.conv2", relu=True)
        x = self.conv3(x, f"{name}.conv3")
        x = checkpoint_name(x + shortcut, f"{name}.add")
        if self.bias is not None:
            x = x + self.bias[...].astype(x.dtype)
        return checkpoint_name(nnx.relu(x), f"{name}.bias_relu")


def fold_batch_norm(model: ResNet50) -> ResNet50:
    """The same function as `model` in evaluation mode, without its batch norms.

    A batch norm with running statistics is a scale and a shift per channel: the scale goes into the
    convolution's weights, the shift becomes a bias. Where two branches meet, their shifts become
    one bias: 53 convolutions, 49 biases. The weights are computed in float64 on the host.
    """
    if model.folded:
        raise ValueError("this ResNet50 has no batch norm to fold: it is folded already")
    folded = nnx.eval_shape(
        lambda: ResNet50(
            model.fc.out_features,
            in_channels=model.in_channels,
            blocks=model.blocks,
            width=model.width,
            spatial=model.spatial,
            stride_first=model.stride_first,
            folded=True,
            dtype=model.fc.dtype,
            param_dtype=model.fc.param_dtype,
            rngs=nnx.Rngs(0),
        )
    )
    _fold_unit(model.conv1, folded.conv1)
    for stage in range(1, len(model.blocks) + 1):
        name = f"layer{stage}"
        for source, target in zip(getattr(model, name), getattr(folded, name), strict=True):
            _fold_unit(source.conv1, target.conv1)
            _fold_unit(source.conv2, target.conv2)
            shift = _fold_unit(source.conv3, target.conv3)
            if source.downsample is not None:
                shift = shift + _fold_unit(source.downsample, target.downsample)
            target.bias.set_value(jnp.asarray(shift, model.fc.param_dtype))
    folded.fc.kernel.set_value(model.fc.kernel[...])
    folded.fc.bias.set_value(model.fc.bias[...])
    return folded


def _fold_unit(source: Unit, target: Unit) -> np.ndarray:
    """Write the scaled weights, and the bias if the target has one; returns the shift."""
    norm = source.norm
    scale, bias, mean, var = (
        np.asarray(v[...], np.float64) for v in (norm.scale, norm.bias, norm.mean, norm.var)
    )
    gain = scale / np.sqrt(var + norm.epsilon)
    shift = bias - mean * gain
    kernel = source.conv.kernel[...]
    target.conv.kernel.set_value(jnp.asarray(np.asarray(kernel, np.float64) * gain, kernel.dtype))
    if target.bias is not None:
        target.bias.set_value(jnp.asarray(shift, kernel.dtype))
    return shift
