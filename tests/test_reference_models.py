"""Structure, work, retention and liveness of the models against the graphs of other systems."""

import dataclasses
import math

import pytest

import models
from experiments.reference import frameworks

from . import reference_models as reference
from .replay import replay, tensorflow, training_steps, untied


def forward(name):
    return [o for o in reference.facts(name)["ops"] if o.get("phase") == "forward"]


def channels_last(shape):
    return (shape[0], *shape[2:], shape[1]) if len(shape) > 2 else tuple(shape)


# Parameters


def total(shapes):
    return sum(math.prod(s) for s in shapes.values())


def test_unet_parameters():
    facts, found = reference.facts("unet_chainer"), reference.abstract(models.UNet)
    found = reference.parameters(found)
    for parameter in facts["parameters"]:
        layer, kind = parameter["name"].split("/")
        shape = parameter["shape"]
        if kind == "W":
            if layer.startswith("upconv"):  # IOHW, the others OIHW
                shape = [shape[1], shape[0], *shape[2:]]
            assert found[f"{layer}.kernel"] == (*shape[2:], shape[1], shape[0])
        else:
            assert found[f"{layer}.bias"] == tuple(shape)
    assert len(found) == len(facts["parameters"]) == 46
    assert total(found) == facts["totals"]["params"] == 31_100_354


def test_resnet50_parameters():
    facts = reference.facts("resnet50_megengine")
    folded = reference.abstract(lambda rngs: models.ResNet50(folded=True, rngs=rngs))
    found = reference.parameters(folded)
    for parameter in facts["parameters"]:
        layer, _, kind = parameter["name"].rpartition(".")
        shape = parameter["shape"]
        if layer == "fc":
            wanted = tuple(shape[::-1])
            assert found["fc.kernel" if kind == "weight" else "fc.bias"] == wanted
        elif kind == "weight":
            assert found[f"{layer}.conv.kernel"] == (*shape[2:], shape[1], shape[0])
        else:
            assert found[f"{layer}.bias"] == (shape[1],)
    assert len(found) == len(facts["parameters"]) == 104
    assert total(found) == facts["totals"]["params"] == 25_526_632


def test_alexnet_parameters():
    facts, found = reference.facts("alexnet_tf"), reference.abstract(models.AlexNet)
    found = reference.parameters(found)
    for parameter in facts["parameters"]:
        layer, kind = parameter["name"].split("/")
        path = f"{layer}.kernel" if kind == "weights" else layer.replace("conv", "bias")
        assert found[path] == tuple(parameter["shape"])
    assert len(found) == 10
    assert total(found) == facts["totals"]["params"] == 2_469_696


def test_local_cnn_parameters():
    facts, found = reference.facts("local_cnn"), reference.abstract(models.LocalCNN)
    found = reference.parameters(found)
    for parameter in facts["parameters"]:
        name, shape = parameter["name"], parameter["shape"]
        if name == "classifier.weights1":
            assert found["classifier.kernel"] == (*shape[2:], shape[1], shape[0])
        elif name.endswith(".W"):  # [OC, 1, 1, IC, KH, KW, OH, OW]
            wanted = (*shape[6:], *shape[4:6], shape[3], shape[0])
            assert found[name.replace("W", "filter.kernel")] == wanted
        elif name.endswith(".b"):
            assert found[name] == channels_last(shape)[1:]
        else:
            assert math.prod(found[name]) == math.prod(shape) == 1
    assert len(found) == 7
    assert total(found) == facts["totals"]["params"] == 293_629_250


def test_vgg16_parameters():
    found = reference.parameters(reference.abstract(models.VGG16))
    assert total(found) == 14_714_688  # 13 convolutions
    with_head = reference.abstract(lambda rngs: models.VGG16(1000, rngs=rngs))
    assert total(reference.parameters(with_head)) == 138_357_544  # torchvision's


# Operations, in order: name, inputs, shape, bytes, work


def test_unet_operations():
    ours, theirs = reference.unet(), forward("unet_chainer")
    weights = {p["name"] for p in reference.facts("unet_chainer")["parameters"]}
    assert [o.name for o in ours.operations] == [o["outputs"][0] for o in theirs]
    for a, b in zip(ours.operations, theirs, strict=True):
        assert a.output.shape == channels_last(b["out_shapes"][0])
        assert a.output.bytes == b["out_bytes"][0]
        assert a.macs == b["macs"]
        assert named_inputs(ours, a) == [t for t in b["inputs"] if t not in {*weights, "x", "t"}]
        if b["type"] != "SoftmaxCrossEntropy":  # whose work the reference guesses
            assert a.flops == b.get("flops", 0)
    totals = reference.facts("unet_chainer")["totals"]
    assert ours.macs == totals["macs"] == 1_258_354_034_688
    assert ours.activation_bytes == totals["forward_activation_bytes"] == 11_781_604_356
    assert len(ours.operations) == totals["forward_activation_count"] == 60


def named_inputs(graph, operation):
    results = {o.name for o in graph.operations}
    return [t.name for t in operation.inputs if t.name in results]


def test_resnet50_operations():
    ours = reference.resnet50()
    theirs = reference.facts("resnet50_megengine")["ops"]
    assert len(theirs) == 234
    constants = [o for o in theirs if o["type"] == "ImmutableTensor"]
    arguments = {t.name: t for t in ours.arguments}
    image = arguments.pop("args[0]")
    assert sorted(t.bytes for t in arguments.values()) == sorted(o["memory"] for o in constants)
    assert all("computation" not in o for o in constants)
    source, *computed, sink = [o for o in theirs if o["type"] != "ImmutableTensor"]
    # The callbacks that bring the image and take the result away: memory as the reference counts.
    assert (source["type"], source["memory"]) == ("InputCallback", 0)
    assert image.bytes == 10 * 3 * 224 * 224 * 4
    assert (sink["type"], sink["memory"]) == ("OutputCallback", ours.operations[-1].output.bytes)
    outputs = {o["outputs"][0]: o["name"] for o in computed}
    for a, b in zip(ours.operations, computed, strict=True):
        assert a.name == b["name"]
        assert a.output.bytes == b["out_bytes"][0]
        assert a.flops == b.get("computation", 0)
        assert a.traffic == b["memory"]
        read = {outputs[t] for t in b["inputs"] if t in outputs}
        assert set(named_inputs(ours, a)) == read
        assert a.output.shape == channels_last(b["out_shapes"][0])
    totals = reference.facts("resnet50_megengine")["totals"]
    assert ours.flops == totals["flops"] == 81_954_092_640
    assert ours.traffic + sink["memory"] == totals["memory_traffic"] == 2_449_144_128
    activations = ours.activation_bytes - ours["flatten"].output.bytes  # theirs is an alias
    assert activations == totals["forward_activation_bytes"] == 1_057_992_080
    assert len(ours.operations) - 1 == totals["forward_activation_count"] == 127


def layout(name):
    """A layout copy is the tensor that it is a copy of, in the other layout."""
    pool = "gradients/pool{}_grad/MaxPoolGrad-0-TransposeNHWCToNCHW-LayoutOptimizer"
    for i in (1, 2):
        if name == pool.format(i):
            return f"lrn{i}/LRN", "NCHW"
    if "Transpose" in name:
        base, _, to = name.split("-")[0], None, name.split("To")[1][:4]
        return ("image" if base == "conv1/Conv2D" else base), to
    return name, "NHWC" if "LRN" in name else "NCHW"


def test_alexnet_operations():
    ours = {o.name: o for o in reference.alexnet().operations}
    theirs = [o for o in forward("alexnet_tf") if o["type"] != "Identity"]
    assert len(theirs) == 29
    computed = [o for o in theirs if o["type"] != "Transpose"]
    assert [o["name"] for o in computed] == [name for name in ours if name != "loss"]
    for o in computed:
        a, shape = ours[o["name"]], tuple(o["out_shapes"][0])
        assert a.output.shape == (shape if o["type"] == "LRN" else channels_last(shape))
        assert a.output.bytes == o["out_bytes"][0]
        assert a.macs == o["macs"]
        if o["type"] != "LRN":
            assert a.flops == o["flops"]
    image = 128 * 224 * 224 * 3 * 4
    copies = [layout(o["name"])[0] for o in theirs if o["type"] == "Transpose"]
    total = sum(a.output.bytes for name, a in ours.items() if name != "loss")
    total += sum(image if name == "image" else ours[name].output.bytes for name in copies)
    facts = reference.facts("alexnet_tf")["totals"]
    assert total == facts["forward_activation_bytes"] == 1_497_300_992
    assert sum(a.macs for a in ours.values()) == facts["macs"] == 84_242_595_840


def test_local_cnn_operations():
    ours = reference.local_cnn()
    theirs = [o for o in forward("local_cnn") if o["type"] != "data"]
    tensors = {t: (s, b) for o in theirs for t, s, b in zip_outputs(o)}
    found = {output_name(o.name): o for o in ours.operations}
    assert list(found) == list(tensors)
    for name, (shape, n) in tensors.items():
        assert found[name].output.bytes == n
        assert math.prod(found[name].output.shape) == math.prod(shape)
        if len(shape) == 4 and shape[2] > 1:
            assert found[name].output.shape == channels_last(shape)
    macs = {o["name"]: o["macs"] for o in theirs}
    assert {o.name: o.macs for o in ours.operations if o.name in macs} == macs
    assert ours.macs == reference.facts("local_cnn")["totals"]["macs"] == 75_139_301_376


def zip_outputs(op):
    return zip(op["outputs"], op["out_shapes"], op["out_bytes"], strict=True)


def output_name(name):
    """Ours are named after the operation, theirs after its port."""
    ports = {
        "classifier.softmax.probability": "classifier.softmax.probability",
        "classifier.evaluate": "classifier.evaluate.ouptut",
        "classifier.evaluate.accuracy": "classifier.evaluate.accuracy",
    }
    return ports.get(name, f"{name}.output")


# What is kept for the backward pass


def test_unet_retention():
    kept = frameworks.retained(reference.unet(), frameworks.chainer)
    theirs = {
        t
        for o in forward("unet_chainer")
        for t in (*o.get("retained_inputs", ()), *o.get("retained_outputs", ()))
    }
    weights = {p["name"] for p in reference.facts("unet_chainer")["parameters"]}
    assert set(kept) == theirs - weights - {"x", "t"}
    assert len(kept) == 33
    assert sum(kept.values()) == 6_558_696_448


def test_alexnet_retention():
    kept = frameworks.retained(reference.alexnet(), tensorflow)
    facts = reference.facts("alexnet_tf")["totals"]
    wanted = {layout(name) for name in facts["retained"]}
    assert {(n.split("@")[0], "NHWC" if "@" in n else "NCHW") for n in kept} == wanted
    assert sum(kept.values()) == facts["retained_bytes"] == 916_324_352


def test_local_cnn_retention():
    graph = reference.local_cnn()
    trained = [o for o in graph.operations if "evaluate" not in o.name]
    kept = frameworks.retained(dataclasses.replace(graph, operations=tuple(trained)), untied)
    facts = reference.facts("local_cnn")
    theirs = {
        t
        for o in facts["ops"]
        for t in (*o.get("retained_inputs", ()), *o.get("retained_outputs", ()))
    }
    activations = {t["name"] for t in facts["tensors"] if t["role"] == "activation"}
    assert {output_name(name) for name in kept} == theirs & activations
    assert sum(kept.values()) == facts["totals"]["retained_bytes"] == 360_540_160


# Live bytes, replaying our own graphs


def sizes(graph):
    found = {t.name: t.bytes for t in graph.arguments}
    found |= {o.name: o.output.bytes for o in graph.operations}
    return found | {f"grad:{name}": n for name, n in found.items()}


def steps(graph):
    return [(o.name, [t.name for t in o.inputs], [o.name]) for o in graph.operations]


def weights(graph):
    return [t.name for t in graph.arguments if t.name.startswith("state")]


def peak(graph, steps, names, **options):
    """The peak, at the operation as the reference calls it."""
    found = replay(steps, sizes(graph), **options)
    return {"peak_bytes": found.bytes, "at": names(found.at)}


def unet_name(at):
    op = next(o for o in forward("unet_chainer") if o["outputs"][0] == at.removeprefix("grad:"))
    return op["name"] + ("_grad" if at.startswith("grad:") else "")


def unet_listed(op):
    """What Chainer's graph lists as read by a gradient: a ReLU's output, else all inputs too."""
    unary = op.kind == "elementwise"
    return [*([] if unary else [t.name for t in op.inputs]), *frameworks.chainer(op)]


def unet_cases():
    graph = reference.unet()
    lean = training_steps(graph, frameworks.chainer)
    listed = training_steps(graph, unet_listed)
    everything = [o.name for o in graph.operations]
    kept = list(frameworks.retained(graph, frameworks.chainer))
    grads = [f"grad:{w}" for w in weights(graph)]
    return {
        "forward_only_no_retention": (steps(graph), []),
        "forward_keep_all": (steps(graph), everything),
        "forward_keep_retained": (steps(graph), kept),
        "train_keep_all_until_end": (listed, everything + grads),
        "train_keep_retained_until_end": (lean, kept + grads),
        "train_keep_listed_freed_after_last_use": (listed, grads),
        "train_keep_retained_freed_after_last_use": (lean, grads),
    }


@pytest.mark.parametrize("name", sorted(reference.facts("unet_chainer")["memory"]))
def test_unet_peaks(name):
    graph = reference.unet()
    run, keep = unet_cases()[name]
    resident = [t.name for t in graph.arguments if "dropout" not in t.name]
    found = peak(graph, run, unet_name, resident=resident, keep=keep)
    assert found == reference.facts("unet_chainer")["memory"][name]


def test_resnet50_peaks():
    graph, memory = reference.resnet50(), reference.facts("resnet50_megengine")["memory"]
    found = peak(graph, steps(graph), str)
    assert found == memory["live_peak_activations_and_workspace"]
    assert found["peak_bytes"] == 96_337_920
    found = peak(graph, steps(graph), str, resident=[t.name for t in graph.arguments])
    assert found == memory["live_peak_with_params_and_input"]


def local_cnn_cases():
    graph = reference.local_cnn()
    trained = tuple(o for o in graph.operations if "evaluate" not in o.name)
    training = training_steps(
        dataclasses.replace(graph, operations=trained), untied, constant=INPUTS
    )
    everything = [o.name for o in graph.operations]
    kept = [o.name for o in trained]
    grads = [f"grad:{w}" for w in weights(graph)]
    every_grad = [t for _, _, writes in training for t in writes if t.startswith("grad:")]
    return {
        "forward_no_retention": (steps(graph), []),
        "forward_keep_all": (steps(graph), everything),
        "train_freed_after_last_use": (training, grads),
        "train_keep_activations": (training, kept + grads),
        "train_keep_all_buffers": (training, kept + every_grad),
    }


INPUTS = ("args[0]", "args[1]")


@pytest.mark.parametrize("name", sorted(reference.facts("local_cnn")["memory"]))
def test_local_cnn_peaks(name):
    graph = reference.local_cnn()
    run, keep = local_cnn_cases()[name]

    def named(at):
        return at.removeprefix("grad:") + (".grad" if at.startswith("grad:") else "")

    found = peak(graph, run, named, resident=[t.name for t in graph.arguments], keep=keep)
    assert found == reference.facts("local_cnn")["memory"][name]


def alexnet_sizes():
    """Bytes of each of TensorFlow's tensors, from our graph: a copy has its original's."""
    graph = reference.alexnet()
    ours = sizes(graph) | {"image": next(t.bytes for t in graph.arguments if t.name == "args[0]")}
    by_path = {t.name: t.bytes for t in graph.arguments}
    found = {}
    for t in reference.facts("alexnet_tf")["tensors"]:
        name, role = t["name"], t["role"]
        if role == "activation":
            found[name] = ours[layout(name)[0]]
        elif role == "parameter":
            layer, kind = name.split("/")
            path = f"['{layer}']['kernel']" if kind == "weights" else f"bias{layer[-1]}"
            found[name] = next(n for p, n in by_path.items() if path in p)
        else:  # gradients, shape constants: TensorFlow's own
            found[name] = t["bytes"]
    return found


@pytest.mark.parametrize("name", sorted(reference.facts("alexnet_tf")["memory"]))
def test_alexnet_peaks(name):
    """TensorFlow's steps, layout copies and all, with the sizes of our tensors."""
    facts = reference.facts("alexnet_tf")
    roles = {t["name"]: t["role"] for t in facts["tensors"]}
    base = {n: r[6:] for n, r in roles.items() if r.startswith("alias:")}
    ops = [o for o in facts["ops"] if o["phase"] in ("forward", "backward")]
    run = [
        (o["name"], [base.get(t, t) for t in o["inputs"]], [base.get(t, t) for t in o["outputs"]])
        for o in ops
        if name.startswith("train") or o["phase"] == "forward"
    ]
    of = lambda *wanted: [n for n, r in roles.items() if r in wanted]  # noqa: E731
    keep = {
        "forward_no_retention": [],
        "forward_keep_all": of("activation"),
        "forward_keep_read_by_backward": facts["totals"]["retained"],
        "train_keep_all_until_end": of("activation", "param_gradient"),
        "train_freed_after_last_use": of("param_gradient"),
    }[name]
    resident = of("parameter", "input", "constant")
    found = replay(run, alexnet_sizes(), resident=resident, keep=keep)
    assert {"peak_bytes": found.bytes, "at": found.at} == facts["memory"][name]
