"""What a tiled function changes in its NNX modules, wherever these are in the arguments.

Each case is a function and its arguments; the plain function, called the same way on modules made
the same way, says what must come out: results, gradients, and every variable afterwards.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from flax import errors, nnx

import jaxtile
import policies
from jaxtile import TilingError, nn

from .support import assert_close, normal, parametrize_few

IMAGE = normal(0, 2, 7, 6, 3)
MAP = (1, 2)
FLOAT64 = {"dtype": jnp.float64, "param_dtype": jnp.float64}
TILES = (3, 2)


class Model(nnx.Module):
    """What a call changes: the statistics of a batch norm, and a count."""

    def __init__(self, seed: int = 0, norm: nnx.Module | None = None):
        self.weight = nnx.Param(jnp.exp(jnp.sin(seed + jnp.arange(3.0))))
        self.norm = norm or nn.BatchNorm(3, rngs=nnx.Rngs(0), **FLOAT64)
        self.calls = nnx.Variable(jnp.zeros(()))

    def __call__(self, x):
        self.calls[...] += 1
        return jnp.tanh(self.norm(x * self.weight))


class Full(Model):
    """A convolution too, and random numbers."""

    def __init__(self):
        super().__init__()
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(3, 3, (3, 3), rngs=rngs, **FLOAT64)
        self.dropout = nn.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.dropout(super().__call__(self.conv(x)))


def sharing():
    """Two models that share a batch norm."""
    norm = nn.BatchNorm(3, rngs=nnx.Rngs(5), **FLOAT64)
    return Model(1, norm), Model(2, norm)


def variable_first(scale, image):
    scale[...] = scale[...] * 2 + image.mean()
    return image * scale[...]


def grow(model, image):
    """A new variable, an attribute that is no array, and variables that change places."""
    model.seen = nnx.BatchStat(image.mean((0, 1, 2)))
    model.mode = "used"
    model.norm.mean, model.norm.var = model.norm.var, model.norm.mean
    return image * model.norm.var[...]


def record(seen, image):
    """A variable that holds a tuple, which grows with each call."""
    seen.set_value((*seen.get_value(), image.mean()))
    return image


CASES = {
    "argument": (lambda m, x: m(x), lambda: (Full(), IMAGE), (None, MAP)),
    "tuple": (
        lambda ms, x: ms[1](ms[0](x)),
        lambda: ((Model(1), Model(2)), IMAGE),
        (None, MAP),
    ),
    "list": (lambda ms, x: ms[1](ms[0](x)), lambda: ([Model(1), Model(2)], IMAGE), (None, MAP)),
    "dict": (
        lambda d: d["model"](d["image"]) + d["shift"],
        lambda: ({"model": Model(), "image": IMAGE, "shift": 2.0},),
        ({"model": None, "image": MAP, "shift": None},),
    ),
    "nested": (
        lambda d, x: d["a"][0](x) + d["a"][1]["b"](x) * d["c"],
        lambda: ({"a": (Model(1), {"b": Model(2)}), "c": normal(1, 3)}, IMAGE),
        (None, MAP),
    ),
    "twice": (
        lambda a, b, x: b(a(x)),
        lambda: (lambda m: (m, m, IMAGE))(Model()),
        (None, None, MAP),
    ),
    "twice in one list": (
        lambda ms, x: ms[1](ms[0](x)),
        lambda: (lambda m: ([m, m], IMAGE))(Model()),
        (None, MAP),
    ),
    "a part besides": (
        lambda norm, m, x: norm(m(x)),
        lambda: (lambda m: (m.norm, m, IMAGE))(Model()),
        (None, None, MAP),
    ),
    "shared part": (
        lambda a, b, x: b(a(x)),
        lambda: (*sharing(), IMAGE),
        (None, None, MAP),
    ),
    "shared part in a dict": (
        lambda d, x: d["b"](d["a"](x)),
        lambda: (dict(zip("ab", sharing(), strict=True)), IMAGE),
        (None, MAP),
    ),
    "variable": (variable_first, lambda: (nnx.Param(normal(2, 3)), IMAGE), (None, MAP)),
    "variable in a list, and its module": (
        lambda vs, m, x: variable_first(vs[0], m(x)),
        lambda: (lambda m: ([m.norm.scale], m, IMAGE))(Model()),
        (None, None, MAP),
    ),
    "variable of a tuple": (record, lambda: (nnx.Variable(()), IMAGE), (None, MAP)),
    "nothing changes": (
        lambda m, x: m.conv(x),
        lambda: (Full(), IMAGE),
        (None, MAP),
    ),
    "new variables and attributes": (grow, lambda: (Model(), IMAGE), (None, MAP)),
    "other mode": (
        lambda m, x: (m(x), m.eval(), m(x))[2],
        lambda: (Model(), IMAGE),
        (None, MAP),
    ),
}


def is_node(x):
    return isinstance(x, nnx.Pytree | nnx.Variable)


def parts(args):
    """The modules and variables in the arguments, and how to put others in their places."""
    flat, tree = jax.tree.flatten(args, is_leaf=is_node)

    def rebuild(nodes):
        nodes = iter(nodes)
        return jax.tree.unflatten(tree, [next(nodes) if is_node(x) else x for x in flat])

    return [x for x in flat if is_node(x)], rebuild


def arrays(pytree):
    """Leaves, with random keys as numbers."""

    def number(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if is_key else x

    return jax.tree.map(number, jax.tree.leaves(pytree))


def compare(run, name):
    """Run the tiled and the plain function, each on its own modules."""
    fun, make, in_axes = CASES[name]
    args, plain_args = make(), make()
    tiled = nn.checkpoint(fun, in_axes=in_axes, tiles=TILES)
    assert_close(run(tiled, args), run(fun, plain_args))
    graphdef, state = nnx.split(parts(args)[0])
    plain_graphdef, plain_state = nnx.split(parts(plain_args)[0])
    assert graphdef == plain_graphdef
    assert_close(arrays(state), arrays(plain_state))


@parametrize_few("name", CASES, always=4)
def test_under_nnx_jit(name):
    def run(fun, args):
        step = nnx.jit(fun)
        return [step(*args), step(*args)]

    compare(run, name)


@pytest.mark.parametrize("name", ["nested", "twice", "variable"])
def test_without_jit(name):
    compare(lambda fun, args: fun(*args), name)


@parametrize_few("name", CASES)
def test_gradients_of_split_modules(name):
    def run(fun, args):
        nodes, rebuild = parts(args)
        graphdef, params, rest = nnx.split(nodes, nnx.Param, ...)

        @jax.jit
        @functools.partial(jax.value_and_grad, has_aux=True)
        def step(params, rest):
            nodes = nnx.merge(graphdef, params, rest, copy=True)
            out = fun(*rebuild(nodes))
            return jnp.mean(out**2), (out, nnx.state(nodes))

        return arrays(step(params, rest))

    compare(run, name)


@parametrize_few("name", ["argument", "tuple", "twice in one list", "dict", "variable"])
def test_nnx_value_and_grad(name):
    def run(fun, args):
        def loss(*args):
            return jnp.mean(fun(*args) ** 2)

        step = nnx.jit(nnx.value_and_grad(loss))
        return arrays([step(*args), step(*args)])

    compare(run, name)


def test_nnx_grad_refuses_shared_arguments_as_ever():
    model = Model()
    loss = nn.checkpoint(lambda a, b, x: jnp.mean(a(b(x))), in_axes=(None, None, MAP), tiles=TILES)
    with pytest.raises(ValueError, match="Inconsistent aliasing"):
        nnx.grad(loss)(model, model, IMAGE)


def test_modules_as_keywords():
    def fun(x, *, model, again):
        return again["model"](model(x))

    def run(fun):
        model = Model()
        step = nnx.jit(lambda model: fun(IMAGE, model=model, again={"model": model}))
        return arrays([step(model), step(model), nnx.state(model)])

    assert_close(run(nn.checkpoint(fun, in_axes=(MAP,), tiles=TILES)), run(fun))


def test_the_module_that_is_returned_is_the_one_given():
    def fun(model, x):
        return {"image": model(x), "model": model, "norm": model.norm, "new": Model(7)}

    model, plain = Model(), Model()
    got = nn.checkpoint(fun, in_axes=(None, MAP), tiles=TILES)(model, IMAGE)
    want = fun(plain, IMAGE)
    assert got["model"] is model
    assert got["norm"] is model.norm
    assert_close(arrays(got), arrays(want))


def test_arrays_beside_a_module_are_tiled():
    """The region that reads the image in the dict has the grid that was asked for."""
    fun, make, in_axes = CASES["dict"]
    found = nn.explain(fun, *make(), in_axes=in_axes, tiles=TILES)
    assert {region.grid for region in found.regions} == {TILES}


def test_a_module_from_outside_the_trace():
    """It may be read. What changes it is refused, and leaves it as it was."""
    model = Full()
    plain = model.conv(IMAGE)
    before = arrays(nnx.state(model))

    def run(fun):
        return jax.jit(lambda x: nn.checkpoint(fun, in_axes=(None, MAP), tiles=TILES)(model, x))(
            IMAGE
        )

    assert_close(run(lambda model, x: model.conv(x)), plain)
    with pytest.raises(errors.TraceContextError):
        run(lambda model, x: model(x))
    assert_close(arrays(nnx.state(model)), before)


@pytest.mark.parametrize("checkpoint", [jaxtile.checkpoint, nn.checkpoint])
@pytest.mark.parametrize("part", ["norm", "dropout"])
def test_a_module_that_the_function_closes_over(checkpoint, part):
    """It may be read, with gradients; to change it is an error."""
    model = Full()
    got = checkpoint(lambda x: model.conv(x), in_axes=(MAP,), tiles=TILES)(IMAGE)
    assert_close(got, model.conv(IMAGE))
    with pytest.raises(errors.TraceContextError, match="Cannot mutate"):
        checkpoint(lambda x: getattr(model, part)(x), in_axes=(MAP,), tiles=TILES)(IMAGE)


CHANGES = {
    "statistics": (lambda m, x: m.norm(x), r"m\.norm\.mean\.value, m\.norm\.var\.value"),
    "random count": (lambda m, x: m.dropout(x), r"m\.dropout\.rngs\.count\.value"),
    "mode": (lambda m, x: (m.eval(), m.norm(x))[1], r"in place: m\."),
    "new variable": (grow, r"in place: model\."),
}


@pytest.mark.parametrize("name", CHANGES)
def test_plain_checkpoint_refuses_what_it_would_lose(name):
    fun, changed = CHANGES[name]
    for run in (
        lambda: jaxtile.checkpoint(fun, in_axes=(None, MAP), tiles=TILES)(Full(), IMAGE),
        lambda: jaxtile.explain(fun, Full(), IMAGE, in_axes=(None, MAP), tiles=TILES),
        lambda: jaxtile.policy.outline(fun, Full(), IMAGE, in_axes=(None, MAP)),
    ):
        with pytest.raises(TilingError, match=f"{changed}.*jaxtile.nn.checkpoint"):
            run()


def test_plain_checkpoint_of_a_module_that_does_not_change():
    model = Full()
    model.eval()
    fun = lambda model, x: model.norm(model.conv(x))  # noqa: E731
    got = jaxtile.checkpoint(fun, in_axes=(None, MAP), tiles=TILES)(model, IMAGE)
    assert_close(got, fun(model, IMAGE))


def fill(d, x):
    d["mean"] = x.mean()
    return x


def append(values, x):
    values[0].append(x.mean())
    return x


@pytest.mark.parametrize("checkpoint", [jaxtile.checkpoint, nn.checkpoint])
def test_containers_that_change(checkpoint):
    for fun, argument, name in (
        (fill, {"mean": 0.0}, r"d\['mean'\]"),
        (fill, {"other": 0.0}, r"d\."),
        (append, ([1.0],), r"values\."),
        (append, ([Model()],), r"values\."),
    ):
        with pytest.raises(TilingError, match=f"in place: {name}"):
            checkpoint(fun, in_axes=(None, MAP), tiles=TILES)(argument, IMAGE)


def test_containers_that_change_as_keywords():
    def fun(x, *, b, a):
        return fill(a, x)

    with pytest.raises(TilingError, match=r"in place: \['a'\]\."):
        jaxtile.checkpoint(fun, in_axes=(MAP,))(IMAGE, b={}, a={})


@jax.tree_util.register_pytree_node_class
class Halves:
    """A pytree that computes its leaves: other ones each time."""

    def __init__(self, whole):
        self.whole = whole

    def tree_flatten(self):
        return (self.whole / 2,), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(leaves[0] * 2)


def test_a_pytree_that_computes_its_leaves_does_not_change():
    def fun(halves, x):
        return halves.whole * x

    got = jaxtile.checkpoint(fun, in_axes=(None, MAP), tiles=TILES)(Halves(jnp.ones(3)), IMAGE)
    assert_close(got, IMAGE)


@pytest.mark.parametrize("checkpoint", [jaxtile.checkpoint, nn.checkpoint])
def test_an_object_that_is_used_up_is_not_changed(checkpoint):
    """Equinox's states: to set one gives another, and the old one refuses to be used."""
    layer, state = eqx.nn.make_with_state(eqx.nn.StateIndex)(jnp.zeros(3))

    def fun(state, x):
        mean = x.mean((0, 1, 2))
        return x - mean, state.set(layer, mean)

    out, state = checkpoint(fun, in_axes=(None, MAP), tiles=TILES)(state, IMAGE)
    assert_close(out, IMAGE - IMAGE.mean((0, 1, 2)))
    assert_close(state.get(layer), IMAGE.mean((0, 1, 2)))


def test_one_in_another():
    """The outermost schedule wins, and all changes arrive."""

    def inner(model, x):
        return model(x)

    def outer(fun, model, x):
        return fun(model, fun(model, x)) + model(x)

    def run(wrap):
        model = Model()
        fun = wrap(functools.partial(outer, wrap(inner)))
        return [fun(model, IMAGE), arrays(nnx.state(model))]

    assert_close(
        run(lambda fun: nn.checkpoint(fun, in_axes=(None, MAP), tiles=TILES)), run(lambda fun: fun)
    )


def test_under_nnx_vmap():
    def run(fun):
        model = nnx.vmap(Model)(jnp.arange(2))
        out = nnx.vmap(fun, in_axes=(0, None))(model, IMAGE)
        return [out, arrays(nnx.state(model))]

    def fun(model, x):
        return model(x)

    assert_close(run(nn.checkpoint(fun, in_axes=(None, MAP), tiles=TILES)), run(fun))


@pytest.mark.parametrize("checkpoint", [jaxtile.checkpoint, nn.checkpoint])
def test_a_state_is_a_value(checkpoint):
    """A merged module shares variables with its state; the function returns what it wants."""
    graphdef, state = nnx.split(Model())

    def fun(state, x):
        model = nnx.merge(graphdef, state)
        return model(x), nnx.state(model, nnx.BatchStat)

    run = checkpoint(fun, in_axes=(None, MAP), tiles=TILES)
    got, want = (arrays(jax.jit(f)(state, IMAGE)) for f in (run, fun))
    assert_close(got, want)


@pytest.mark.parametrize("checkpoint", [jaxtile.checkpoint, nn.checkpoint])
def test_mutable_arrays_are_refused(checkpoint):
    def fun(scale, x):
        return x * scale[...]

    ref = jax.new_ref(jnp.ones(3))
    for scale, name in (
        (ref, "scale"),
        (nnx.Variable(jnp.ones(3), ref=True), r"scale\.value"),
        (nnx.Variable(jnp.ones(3), hijax=True), "scale"),
    ):
        with pytest.raises(TilingError, match=f"{name} of the function is a mutable array"):
            checkpoint(fun, in_axes=(None, MAP), tiles=TILES)(scale, IMAGE)
    with pytest.raises(TilingError, match="constant 0 of the function is a mutable array"):
        checkpoint(lambda x: fun(ref, x), in_axes=(MAP,), tiles=TILES)(IMAGE)


def test_what_only_looks_leaves_modules_as_they_are():
    fun, make, in_axes = CASES["twice in one list"]
    args = make()
    before = arrays(args)
    found = [nn.operations(fun, *args), jaxtile.operations(fun, *args)]
    assert found[0].flops == found[1].flops > 0
    nn.explain(fun, *args, in_axes=in_axes, tiles=TILES)
    assert_close(arrays(args), before)


@pytest.mark.parametrize("name", ["twice in one list", "variable"])
def test_a_plan_for_modules_anywhere(name):
    fun, make, in_axes = CASES[name]
    args = make()
    before = arrays(args)
    plan = policies.plan(fun, *args, in_axes=in_axes, budget="1MB", progress=lambda line: None)
    assert_close(arrays(args), before)
    got = nnx.jit(nn.checkpoint(fun, in_axes=in_axes, policy=plan))(*args)
    assert_close(got, fun(*make()))
