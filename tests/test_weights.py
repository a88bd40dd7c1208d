"""Weights in the layouts of torchvision and Keras, from real files."""

import io
import os
import pickle
import sys
import types
import zipfile
from collections import OrderedDict

import h5py
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import models
from experiments.program.config import ConfigError, base
from experiments.training.learner import Learner
from experiments.training.trained import first_weights

from .support import assert_close, normal


def make(name, *args, **options):
    return models.create(name, *args, rngs=nnx.Rngs(0), **options)


def resnet50(classes=3, blocks=(1, 1)):
    return make("resnet50", classes, blocks=blocks, width=2)


def state_dict(blocks=(1, 1), classes=3):
    """As torchvision's ResNet writes it, in its order, here of width 2."""
    random = np.random.default_rng(0)
    tensors = {}

    def add(name, *shape):
        tensors[name] = random.standard_normal(shape).astype(np.float32)

    def norm(name, n):
        for k in ("weight", "bias", "running_mean"):
            add(f"{name}.{k}", n)
        tensors[f"{name}.running_var"] = random.random(n).astype(np.float32) + 0.5
        tensors[f"{name}.num_batches_tracked"] = np.array(7)

    add("conv1.weight", 2, 3, 7, 7)
    norm("bn1", 2)
    n_in = 2
    for stage, count in enumerate(blocks, start=1):
        width = 2**stage
        for i in range(count):
            name = f"layer{stage}.{i}"
            add(f"{name}.conv1.weight", width, n_in, 1, 1)
            norm(f"{name}.bn1", width)
            add(f"{name}.conv2.weight", width, width, 3, 3)
            norm(f"{name}.bn2", width)
            add(f"{name}.conv3.weight", 4 * width, width, 1, 1)
            norm(f"{name}.bn3", 4 * width)
            if i == 0:
                add(f"{name}.downsample.0.weight", 4 * width, n_in, 1, 1)
                norm(f"{name}.downsample.1", 4 * width)
            n_in = 4 * width
    add("fc.weight", classes, n_in)
    add("fc.bias", classes)
    return tensors


def arrays(model):
    return jax.tree.leaves(nnx.state(model, (nnx.Param, nnx.BatchStat)))


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_resnet50_from_a_file(tmp_path, suffix):
    tensors, path = state_dict(), tmp_path / f"resnet{suffix}"
    save_file(tensors, path) if suffix == ".safetensors" else np.savez(path, **tensors)
    model = resnet50()
    models.load_weights(model, path)
    np.testing.assert_array_equal(
        model.layer2[0].conv2.conv.kernel[...],
        tensors["layer2.0.conv2.weight"].transpose(2, 3, 1, 0),
    )
    np.testing.assert_array_equal(
        model.layer1[0].downsample.norm.var[...], tensors["layer1.0.downsample.1.running_var"]
    )
    np.testing.assert_array_equal(model.fc.kernel[...], tensors["fc.weight"].T)
    model.eval()
    image = normal(0, 1, 33, 33, 3).astype(jnp.float32)
    assert_close(models.fold_batch_norm(model)(image), model(image), 1e-5)


@pytest.mark.slow
def test_vgg16_and_alexnet():
    """Every tensor is written once: fill with numbered constants, then find all of them."""
    vgg = [0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28]
    for name, features, dense, size in (
        ("vgg16", vgg, (0, 3, 6), 7),
        ("alexnet", [0, 3, 6, 8, 10], (1, 4, 6), 6),
    ):
        model = make(name, 3, width=1)
        kernels = [v.shape for _, v in nnx.to_flat_state(nnx.state(model, nnx.Param))]
        convolutions = sorted((s for s in kernels if len(s) == 4 and s[0] != size), key=len)
        assert len(convolutions) - 2 == len(features)
        tensors = {}
        layers = model_layers(model, name)
        for i, (layer, index) in enumerate(zip(layers, features, strict=True)):
            shape = layer.shape
            tensors[f"features.{index}.weight"] = np.full((shape[3], shape[2], *shape[:2]), i + 1.0)
            tensors[f"features.{index}.bias"] = np.full(shape[3], -i - 1.0)
        head = model.classifier
        for i, index in zip(("fc6", "fc7", "fc8"), dense, strict=True):
            shape = getattr(head, i).kernel.shape
            matrix = np.arange(np.prod(shape)).reshape(shape[3], -1)
            tensors[f"classifier.{index}.weight"] = matrix
            tensors[f"classifier.{index}.bias"] = np.arange(shape[3])
        models.load_weights(model, tensors)
        assert [float(k[...].max()) for k in layers] == [i + 1.0 for i in range(len(features))]
        wanted = tensors[f"classifier.{dense[0]}.weight"].reshape(4096, -1, size, size)
        np.testing.assert_array_equal(head.fc6.kernel[...], wanted.transpose(2, 3, 1, 0))
        headless = make(name, width=1)
        models.load_weights(headless, tensors)  # the classifier is left out
        assert float(model_layers(headless, name)[1][...].max()) == 2


def model_layers(model, name):
    if name == "alexnet":
        return [getattr(model, f"conv{i}").kernel for i in range(1, 6)]
    blocks = enumerate((2, 2, 3, 3, 3), start=1)
    return [getattr(model, f"conv{b}_{i}").kernel for b, n in blocks for i in range(1, n + 1)]


def test_a_new_classifier():
    model = resnet50(classes=9)
    before = np.asarray(model.fc.kernel[...])
    models.load_weights(model, state_dict(), skip=["fc."])
    np.testing.assert_array_equal(model.fc.kernel[...], before)


def broken(change):
    tensors = state_dict()
    change(tensors)
    return tensors


@pytest.mark.parametrize(
    "tensors, message",
    [
        (
            broken(lambda t: t.pop("layer2.0.bn2.running_mean")),
            "no tensor layer2.0.bn2.running_mean, which ResNet50 needs",
        ),
        (
            broken(lambda t: t.update({"fc.weight": np.zeros((5, 16))})),
            r"fc.weight in the state dict has shape \(5, 16\), but the model needs \(3, 16\)",
        ),
        (state_dict(blocks=(2, 1)), "15 tensors.*layer1.1.conv1.weight.*another"),
        ({}, r"conv1.weight.*\(nor 42 more\)"),
    ],
)
def test_a_wrong_state_dict_changes_nothing(tensors, message):
    model = resnet50()
    before = [np.asarray(a) for a in arrays(model)]
    with pytest.raises(ValueError, match=message):
        models.load_weights(model, tensors)
    for a, b in zip(arrays(model), before, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_damaged_files(tmp_path, suffix):
    path = tmp_path / f"weights{suffix}"
    with pytest.raises(FileNotFoundError, match="no file"):
        models.load_weights(resnet50(), path)
    path.write_bytes(b"not weights at all")
    with pytest.raises(ValueError, match=f"damaged or not a {suffix} file"):
        models.load_weights(resnet50(), path)


def test_what_cannot_be_loaded(tmp_path):
    path = tmp_path / "weights.pth"
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"weights\.pth is damaged.*no zip archive"):
        models.load_weights(resnet50(), path)
    with pytest.raises(TypeError, match="UNet"):
        models.load_weights(make("unet", channels=2, depth=1), {})
    with pytest.raises(ValueError, match="fold_batch_norm"):
        models.load_weights(make("resnet50", blocks=(1,), width=2, folded=True), state_dict())


def write_pth(path, tensors, monkeypatch, hostile=False):
    """As `torch.save` does: a pickle that names PyTorch's functions, and a file for each tensor."""
    utils = types.ModuleType("torch._utils")
    exec("def _rebuild_tensor_v2(*_): pass", utils.__dict__)
    utils._rebuild_tensor_v2.__module__ = "torch._utils"
    torch = types.ModuleType("torch")
    for name in ("FloatStorage", "LongStorage"):
        setattr(torch, name, type(name, (), {"__module__": "torch"}))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._utils", utils)
    stored = []

    class Tensor:
        def __init__(self, array):
            self.array = array

        def __reduce__(self):
            stored.append(np.array(self.array.T, order="C"))  # saved transposed, with strides
            kind = torch.LongStorage if self.array.dtype.kind == "i" else torch.FloatStorage
            strides = [n // self.array.itemsize for n in stored[-1].T.strides]
            storage = Storage(("storage", kind, str(len(stored) - 1), "cpu", self.array.size))
            shape = (storage, 0, self.array.shape, tuple(strides), False, OrderedDict())
            return utils._rebuild_tensor_v2, shape

    class Storage(tuple):
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return tuple(value) if isinstance(value, Storage) else None

    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(path) + ".hacked",)

    found = OrderedDict((k, Tensor(v)) for k, v in tensors.items())
    if hostile:
        found["x"] = Hostile()
    buffer = io.BytesIO()
    Pickler(buffer, 2).dump({"epoch": 3, "state_dict": found})
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", buffer.getvalue())
        for i, array in enumerate(stored):
            archive.writestr(f"archive/data/{i}", array.tobytes())
    monkeypatch.delitem(sys.modules, "torch")


def test_a_pth_file_is_read_without_running_its_code(tmp_path, monkeypatch):
    write_pth(tmp_path / "a.pth", state_dict(), monkeypatch)
    found, want = resnet50(), resnet50()
    models.load_weights(found, tmp_path / "a.pth")
    models.load_weights(want, state_dict())
    assert_close(arrays(found), arrays(want))
    write_pth(tmp_path / "b.pth", state_dict(), monkeypatch, hostile=True)
    with pytest.raises(ValueError, match=r"it calls \w+\.mkdir, and only weights are read"):
        models.load_weights(found, tmp_path / "b.pth")
    assert not (tmp_path / "b.pth.hacked").exists()


def in_keras(tensors):
    """ResNet50's weights as Keras would have them."""
    names = {"weight": "gamma", "bias": "beta", "running_mean": "moving_mean"}
    names["running_var"] = "moving_variance"
    found = {}
    for name, array in tensors.items():
        layer, variable = name.rsplit(".", 1)
        if variable == "num_batches_tracked":
            continue
        if layer == "fc":
            found[f"predictions/{'kernel' if variable == 'weight' else 'bias'}"] = array.T
            continue
        *block, unit = (
            layer.replace(".downsample.0", ".conv0").replace(".downsample.1", ".bn0").split(".")
        )
        where = (
            f"conv{int(block[0][-1]) + 1}_block{int(block[1]) + 1}_{unit[-1]}" if block else "conv1"
        )
        if "conv" in unit:
            kernel = array.transpose(2, 3, 1, 0)
            found[f"{where}_conv/kernel"] = kernel if block else kernel[:, :, ::-1]
            found[f"{where}_conv/bias"] = np.arange(len(array), dtype=np.float64)
        else:
            shift = {"running_mean": np.arange(len(array)), "running_var": 1e-5 - 1.001e-5}
            found[f"{where}_bn/{names[variable]}"] = array + shift.get(variable, 0)
    return found


def write_h5(path, tensors):
    """As Keras 3 does for `.weights.h5`, and as older ones did."""
    with h5py.File(path, "w") as file:
        for i, layer in enumerate(dict.fromkeys(name.split("/")[0] for name in tensors)):
            variables = [(k, v) for k, v in tensors.items() if k.startswith(f"{layer}/")]
            if path.name.endswith(".weights.h5"):
                group = file.create_group(f"layers/layer_{i}/vars")
                group.attrs["name"] = layer
                for number, (_, array) in enumerate(variables):
                    group[str(number)] = array
            else:
                for name, array in variables:
                    file[f"{layer}/{name}:0"] = array


@pytest.mark.parametrize("name", ["a.npz", "a.h5", "a.weights.h5"])
def test_resnet50_of_keras(tmp_path, name):
    tensors = in_keras(state_dict())
    path = tmp_path / name
    np.savez(path, **tensors) if name.endswith(".npz") else write_h5(path, tensors)
    with pytest.raises(ValueError, match="make the model with `stride_first=True`"):
        models.load_weights(resnet50(), path)
    found, want = (make("resnet50", 3, blocks=(1, 1), width=2, stride_first=True) for _ in "ab")
    models.load_weights(found, path)
    models.load_weights(want, state_dict())
    assert_close(arrays(found), arrays(want), 1e-7)
    write_h5(tmp_path / "b.h5", {**tensors, "dense_3/kernel": np.zeros(3)})
    with pytest.raises(ValueError, match="dense_3 is no layer of Keras' ResNet50 or VGG16"):
        models.load_weights(found, tmp_path / "b.h5")


def vgg16_state_dict(model):
    random = np.random.default_rng(0)
    tensors, index = {}, 0
    for block in model.conv_blocks():
        for conv in block:
            *size, n_in, n_out = conv.kernel.shape
            tensors[f"features.{index}.weight"] = random.standard_normal((n_out, n_in, *size))
            tensors[f"features.{index}.bias"] = random.standard_normal(n_out)
            index += 2
        index += 1
    return tensors


@pytest.mark.parametrize("options", [{"pooled": True}, {"dense": True}])
def test_vgg16_with_a_classifier_that_slides(tmp_path, options):
    """Its own begins anew; that of the file is left out."""
    config = base("vgg16", width=2, **options)
    config.data.channels = 3
    tensors = vgg16_state_dict(make("vgg16", width=2))
    tensors["classifier.6.weight"] = np.zeros((1000, 4096))
    np.savez(tmp_path / "vgg16.npz", **tensors)
    weights, remarks = first_weights(Learner(config), str(tmp_path / "vgg16.npz"))
    assert remarks == "; the classifier begins anew"
    kernel = weights.params["conv1_1"]["kernel"][...]
    np.testing.assert_array_equal(kernel, np.float32(tensors["features.0.weight"]).T.swapaxes(0, 1))


@pytest.mark.slow
def test_vgg16_of_timm():
    """Its dense layers are convolutions; names may have what DataParallel puts before them."""
    ours, timms = (make("vgg16", 3, width=2) for _ in range(2))
    random = np.random.default_rng(1)
    tensors = vgg16_state_dict(ours)
    shapes = {"0": (4096, 784), "3": (4096, 4096), "6": (3, 4096)}
    for name, shape in shapes.items():
        tensors[f"classifier.{name}.weight"] = random.standard_normal(shape, np.float32)
        tensors[f"classifier.{name}.bias"] = random.standard_normal(shape[0], np.float32)
    models.load_weights(ours, tensors)
    renamed = {"classifier.0": "pre_logits.fc1", "classifier.3": "pre_logits.fc2"}
    renamed["classifier.6"] = "head.fc"
    other = {}
    for name, array in tensors.items():
        layer, _, variable = name.rpartition(".")
        if array.ndim == 2 and layer != "classifier.6":
            array = array.reshape(4096, -1, *((7, 7) if layer == "classifier.0" else (1, 1)))
        other[f"module.{renamed.get(layer, layer)}.{variable}"] = array
    models.load_weights(timms, other)
    for a, b in zip(arrays(ours), arrays(timms), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_unet_with_the_encoder_of_vgg16(tmp_path):
    vgg = make("vgg16", width=2)
    tensors = vgg16_state_dict(vgg)
    np.savez(tmp_path / "vgg16.npz", **tensors, **{"classifier.0.weight": np.zeros((4096, 784))})
    models.load_weights(vgg, tensors)
    options = {"channels": 2, "encoder": "vgg16", "padding": "SAME"}
    config = base("unet", **options)
    config.data.channels = 3
    weights, remarks = first_weights(Learner(config), str(tmp_path / "vgg16.npz"))
    assert remarks == "; all after the encoder begins anew"
    ours = [
        weights.params[f"conv_d{i}{pair}"]
        for i, pairs in enumerate(("a_b b_c",) * 2 + ("a_b b_c c_d",) * 3)
        for pair in pairs.split()
    ]
    theirs = [nnx.state(conv, nnx.Param) for block in vgg.conv_blocks() for conv in block]
    assert_close(jax.tree.leaves(ours), jax.tree.leaves(theirs), 0)
    scores = jax.eval_shape(lambda: make("unet", 3, **options)(jnp.zeros((1, 32, 48, 3))))
    assert scores.shape == (1, 32, 48, 2)
    with pytest.raises(ValueError, match="without norms, and here `norm` is 'batch'"):
        models.load_weights(nnx.eval_shape(lambda: make("unet", norm="batch", **options)), tensors)
    with pytest.raises(ValueError, match=r"wants `padding='SAME'`.*given are 'VALID', 2 and None"):
        make("unet", 3, **{**options, "padding": "VALID"})


@pytest.mark.slow
def test_a_unet_with_the_encoder_of_resnet50(tmp_path):
    tensors = state_dict()
    np.savez(tmp_path / "resnet50.npz", **tensors)
    resnet = resnet50()
    models.load_weights(resnet, tensors)
    options = {"channels": 2, "encoder": "resnet50", "blocks": (1, 1), "padding": "SAME"}
    config = base("unet", **options)
    config.data.channels = 3
    weights, remarks = first_weights(Learner(config), str(tmp_path / "resnet50.npz"))
    assert remarks == "; all after the encoder begins anew"
    ours = [weights.params["resnet"], weights.variables["resnet"]]
    theirs = [nnx.state(resnet, kind) for kind in (nnx.Param, nnx.BatchStat)]
    del theirs[0]["fc"]
    assert_close(jax.tree.leaves(ours), jax.tree.leaves(theirs), 0)
    assert len(jax.tree.leaves(ours)) == sum(
        k.split(".")[-1] != "num_batches_tracked" and k[:2] != "fc" for k in tensors
    )

    unet = make("unet", 3, **options)
    models.load_weights(unet, tensors)
    resnet.eval()
    unet.eval()
    image = normal(0, 1, 16, 24, 3).astype(np.float32)
    levels = [image]
    for i in range(1, 4):
        levels.append(unet._down(levels[-1], i))
    assert [x.shape[1:] for x in levels[1:]] == [(8, 12, 2), (4, 6, 8), (2, 3, 16)]
    pooled = levels[-1].mean((1, 2))
    assert_close(pooled @ resnet.fc.kernel[...] + resnet.fc.bias[...], resnet(image), 1e-6)

    with pytest.raises(ValueError, match="weights are for images, and this model has 3 spatial"):
        models.load_weights(make("unet", 3, spatial=3, **options), tensors)
    with pytest.raises(ValueError, match="make the model with `stride_first=True`"):
        models.load_weights(unet, in_keras(tensors))
    keras = make("unet", 3, stride_first=True, **options)
    models.load_weights(keras, in_keras(tensors))
    assert_close(keras.resnet.conv1.norm.mean[...], unet.resnet.conv1.norm.mean[...], 1e-7)
    with pytest.raises(ValueError, match=r"wants `padding='SAME'`.* has a `depth` of 3; given"):
        make("unet", 3, depth=2, **options)


def test_a_file_without_a_classifier(tmp_path):
    tensors = {k: v for k, v in in_keras(state_dict()).items() if "predictions" not in k}
    np.savez(tmp_path / "notop.npz", **tensors)
    config = base("resnet50", blocks=(1, 1), width=2, stride_first=True)
    config.data.channels = 3
    _, remarks = first_weights(Learner(config), str(tmp_path / "notop.npz"))
    assert remarks.startswith("; fc.weight, fc.bias begin anew; Keras trained these on BGR")
    flags = "'--config.data.mean=(0.48503, 0.45796, 0.4076)' '--config.data.std=(0.0039216,)'"
    assert flags in remarks


def test_training_begins_with_a_file(tmp_path):
    """Of three classes, where there are four: the last layer begins anew."""
    save_file(state_dict(), tmp_path / "a.safetensors")
    config = base("resnet50", blocks=(1, 1), width=2)
    config.data.channels, config.data.classes = 3, 4
    learner = Learner(config)
    weights, new = first_weights(learner, str(tmp_path / "a.safetensors"))
    assert new == "; fc.weight, fc.bias begin anew"
    want = resnet50()
    models.load_weights(want, state_dict())
    np.testing.assert_array_equal(
        weights.params["conv1"]["conv"]["kernel"][...], want.conv1.conv.kernel
    )
    assert weights.params["fc"]["kernel"].shape == (16, 4)
    config.model.blocks = (1, 1, 1)
    deeper = Learner(config)
    with pytest.raises(ConfigError, match="has no tensor"):
        first_weights(deeper, str(tmp_path / "a.safetensors"))
