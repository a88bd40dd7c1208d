"""What refusals advise, followed to the letter: then it works, and is exact."""

import re

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxtile
from jaxtile import TilingError

from .meshes import devices
from .support import assert_close, assert_same, conv, max_pool, normal, parametrize_few

W, X = normal(1, 3, 3, 2, 2), normal(0, 1, 8, 6, 2)
TILED = {"in_axes": (None, (1, 2)), "tiles": (2, 2)}


def refusal(call) -> str:
    with pytest.raises(TilingError) as caught:
        call()
    return str(caught.value)


def quoted(message: str, begin: str) -> str:
    """The code that a message shows, by how it begins."""
    return re.search(rf"`({re.escape(begin)}[^`]*)`", message).group(1)


@jax.custom_jvp
def running_sum(x):
    return jnp.cumsum(x, 1)


running_sum.defjvp(lambda x, t: (running_sum(*x), jnp.cumsum(*t, 1)))


@jax.custom_vjp
def backwards_sum(x):
    return jnp.cumsum(x, 1)


backwards_sum.defvjp(
    lambda x: (backwards_sum(x), None), lambda _, c: (lax.cumsum(c, 1, reverse=True),)
)

NEED_WHOLE = {
    "slice": lambda x: jnp.sort(x[:, 1:7], 1),
    "custom_jvp": running_sum,
    "custom_vjp": backwards_sum,
    "branch": lambda x: lax.cond(jnp.sin(1.0) > 0.5 * x.max(), running_sum, jnp.sin, x),
    "pad": lambda x: jnp.cumsum(jnp.pad(x[:, ::2], ((0, 0), (1, 1), (0, 0), (0, 0))), 1),
    "concatenate": lambda x: jnp.cumsum(jnp.concatenate([x, x[:, ::-1]], 1), 2),
    "channels": lambda x: jnp.sort(x.sum(-1), 1),
    "percentile": lambda x: jnp.percentile(x, 40.0),
    "median": lambda x: jnp.median(x, (1, 2)),
    "hard examples": lambda x: lax.top_k(x.mean(-1).reshape(-1), 5)[0].mean(),
    "kernel": lambda x: conv(x, x[0, :3, :3, :, None]),
    "transposed": lambda x: x[:, :6] + jnp.swapaxes(x[:, :6], 1, 2),
    "axis twice": lambda x: jnp.einsum("nhwc,nkwc->nhk", x, x),
    "attention": lambda x: jax.nn.softmax(jnp.einsum("nhwc,nijc->nhwij", x, x).sum(4), 3),
    "lookup": lambda x: jnp.take_along_axis(x, jnp.argmax(x, 3)[..., None], 1),
    "svd": lambda x: jnp.linalg.svd(x[0, :, :, 0], compute_uv=False),
    "inner gradient": jax.grad(lambda x: (max_pool(x) ** 2).sum()),
    "product": lambda x: jnp.prod(x, (1, 2)),
    "repeated": lambda x: jnp.tile(x, (1, 2, 1, 1)),
    "reshape": lambda x: x.reshape(1, 6, 8, 2),
    "fourier": lambda x: jnp.fft.rfft2(x, axes=(1, 2)).real,
    "brightest": lambda x: x.max((1, 2)) * x.reshape(1, -1, 2).argmax(1),
}


@parametrize_few("name", NEED_WHOLE, always=4)
def test_name_the_operands_and_save_them(name):
    """Also where the operand of the primitive is not the user's, but made from what is."""
    need_whole = NEED_WHOLE[name]

    def before(w, x):
        return need_whole(jnp.tanh(conv(x, w)))

    message = refusal(lambda: jaxtile.checkpoint(before, **TILED)(W, X))
    statement, policy = (
        quoted(message, "x = jax"),
        quoted(message, "policy=").removeprefix("policy="),
    )
    assert quoted(message, "import") == "import jax.ad_checkpoint"

    def after(w, x):
        x = jnp.tanh(conv(x, w))
        names = {"jax": jax, "x": x}
        exec(statement, names)
        return need_whole(names["x"]), conv(names["x"], w)

    assert_same(after, W, X, **TILED, policy=eval(policy))


def attention(w, x):
    """To all positions, in tiles of queries."""
    source = jax.ad_checkpoint.checkpoint_name(jnp.tanh(conv(x, w)), "source").reshape(1, -1, 2)
    keys = jax.ad_checkpoint.checkpoint_name(source @ w[0, 0], "keys")
    values = jax.ad_checkpoint.checkpoint_name(source @ w[0, 1], "values")
    return jax.nn.softmax(conv(x, w).reshape(1, -1, 2) @ keys.swapaxes(1, 2)) @ values


def deformed(w, x):
    """Each position looks where the image says."""
    rows = (jnp.arange(8)[:, None] + conv(x, w)[0, ..., 0].astype(int)) % 8
    source = jax.ad_checkpoint.checkpoint_name(jnp.tanh(conv(x, w)), "source")
    return conv(source[0][rows, jnp.arange(6)][None], w)


def test_save_what_is_read_whole():
    message = refusal(lambda: jaxtile.checkpoint(deformed, **TILED)(W, X))
    assert "name and save what it reads" in message
    message = refusal(lambda: jaxtile.checkpoint(attention, **TILED)(W, X))
    assert "name and save one of its operands (the keys and the values of attention)" in message
    policy = jax.checkpoint_policies.save_only_these_names("keys")
    message = refusal(lambda: jaxtile.checkpoint(attention, **TILED, policy=policy)(W, X))
    assert "name and save the one whose positions are summed over (the values" in message


@parametrize_few(
    "fun, names",
    [(attention, ("keys", "values")), (deformed, ("source",)), (attention, ("source",))],
    always=2,
)
def test_what_is_read_whole_was_saved(fun, names):
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    assert_same(fun, W, X, **TILED, policy=policy)
    last = jaxtile.explain(fun, W, X, **TILED, policy=policy).regions[-1]
    assert last.grid == (2, 2)


def test_do_it_before_the_reshape():
    def weighed(x):
        still = lax.stop_gradient(x)
        return x * lax.reduce(still, 1.0, lambda a, b: a * b, (x.ndim - 1,))[..., None]

    def after(w, x):
        return weighed(conv(x, w).reshape(1, 48, 2))

    def before(w, x):
        return weighed(conv(x, w)).reshape(1, 48, 2)

    message = refusal(lambda: jaxtile.checkpoint(after, **TILED)(W, X))
    assert "What to do: do it before the `reshape`" in message

    assert_close(before(W, X), after(W, X))
    assert_same(before, W, X, **TILED)


def test_pass_by_position_what_is_to_be_tiled():
    def fun(w, image):
        return conv(image, w)

    tiled = jaxtile.checkpoint(fun, **TILED)
    message = refusal(lambda: tiled(W, image=X))
    assert "2 entries for 1 positional" in message
    assert "pass by position what is to be tiled" in message
    assert_close(tiled(W, X), fun(W, X))


def test_no_elements():
    empty = X[:, :0]
    message = refusal(lambda: jaxtile.checkpoint(lambda w, x: x * w[0, 0, 0], **TILED)(W, empty))
    assert "call the function itself, or tile another axis" in message
    other = jaxtile.checkpoint(lambda w, x: x * w[0, 0, 0], in_axes=(None, (2,)), tiles=(2,))
    assert other(W, empty).shape == empty.shape


@pytest.mark.parametrize("rows", ["at most", "a name"])
def test_more_tiles_than_rows(rows):
    message = refusal(
        lambda: jaxtile.checkpoint(lambda w, x: conv(x, w, 4), **TILED | {"tiles": (3, 2)})(W, X)
    )
    at_most = int(re.search(r"use at most (\d+)", message).group(1))
    assert "give it a name with `jax.ad_checkpoint.checkpoint_name`" in message
    if rows == "at most":
        assert_same(lambda w, x: conv(x, w, 4), W, X, in_axes=(None, (1, 2)), tiles=(at_most, 2))
    else:
        assert_same(
            lambda w, x: (jax.ad_checkpoint.checkpoint_name(conv(x, w, 4), "end"), conv(x, w)),
            *(W, X),
            in_axes=(None, (1, 2)),
            tiles={"end": (2, 2), ...: (3, 2)},
        )


class Sowing(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))

    def __call__(self, x):
        y = self.norm(x)
        self.sow(nnx.Intermediate, "seen", (y**3).mean())
        return y


def test_modules_that_sow():
    def fun(model, x):
        return (model(x) ** 3).sum()

    plain, tiled = Sowing(), Sowing()
    message = refusal(lambda: jaxtile.checkpoint(fun, **TILED)(tiled, X))
    use, first = re.search(r"`(jaxtile\.nn\.\w+)`, after `(import [\w.]+)`", message).groups()
    known = {}
    exec(first, known)
    assert not nnx.state(tiled, nnx.Intermediate)
    assert_close(eval(use, known)(fun, **TILED)(tiled, X), fun(plain, X))
    assert nnx.state(plain, nnx.Intermediate)
    assert_close(jax.tree.leaves(nnx.state(tiled)), jax.tree.leaves(nnx.state(plain)))


def test_a_rule_that_closes_over_an_array():
    def closes_over(w, x):
        scale = jnp.cos(x)
        call = jax.custom_vjp(jnp.sin)
        call.defvjp(lambda x: (jnp.sin(x), None), lambda _, c: (c * scale,))
        return conv(call(x), w)

    @jax.custom_vjp
    def call(x, scale):
        return jnp.sin(x)

    call.defvjp(lambda x, scale: (jnp.sin(x), scale), lambda scale, c: (c * scale, None))

    def passes(w, x):
        return conv(call(x, jnp.cos(x)), w)

    message = refusal(lambda: jaxtile.checkpoint(closes_over, **TILED)(W, X))
    assert "pass it to the function as an operand" in message
    assert_same(passes, W, X, **TILED)


def test_a_stream_gives_to_others_what_needs_whole_arrays():
    with pytest.raises(TilingError) as caught:
        jaxtile.stream(lambda w, x: jnp.cumsum(conv(x, w), 1), **TILED)(W, np.asarray(X))
    assert "can be done to its result" in caught.value.__notes__[-1]
    found = jaxtile.stream(lambda w, x: conv(x, w), **TILED)(W, np.asarray(X))
    assert_close(jnp.cumsum(found, 1), jnp.cumsum(conv(X, W), 1))


def test_windows_of_one_array_from_a_constant():
    def pool(x, begin):
        return lax.reduce_window(x, begin, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "SAME")

    message = refusal(
        lambda: jaxtile.checkpoint(lambda w, x: pool(x, w[0, 0, 0, 0]), **TILED)(W, X)
    )
    assert "start from a constant" in message
    assert_same(lambda w, x: pool(conv(x, w), -jnp.inf), W, X, **TILED)

    def both(x):
        return lax.reduce_window(
            (x, -x),
            (-jnp.inf, -jnp.inf),
            lambda a, b: (lax.max(a[0], b[0]), lax.max(a[1], b[1])),
            *((1, 2, 2, 1), (1, 1, 1, 1), "SAME"),
        )

    message = refusal(lambda: jaxtile.checkpoint(lambda w, x: both(x), **TILED)(W, X))
    assert "reduce one array at a time" in message
    apart = jaxtile.checkpoint(lambda w, x: (pool(x, -jnp.inf), pool(-x, -jnp.inf)), **TILED)
    assert_close(apart(W, X), both(X))


def blur(w, x):
    return jnp.tanh(conv(x, w))


class Settings:
    stride = 1


TILE = {"tiles": (2, 2)}
BOTH = {"in_axes": (None, (1, 2))} | TILE
ROWS = {"mesh": devices(2), "mesh_axes": ("rows", None)} if jax.device_count() > 1 else {}
OPTIONS = {
    "axes without a mesh": (
        BOTH | {"mesh_axes": ROWS.get("mesh_axes")},
        "needs `mesh`: pass the mesh whose axes these are",
        BOTH | ROWS,
    ),
    "a mesh without devices": (
        BOTH | ROWS | {"mesh": jax.sharding.AbstractMesh((2,), ("rows",))},
        "`jax.make_mesh` makes one that can run",
        BOTH | ROWS,
    ),
    "no axis of the mesh": (
        BOTH | ROWS | {"mesh_axes": (None, None)},
        "names no axis of `mesh`, which has ('rows',): name one, or leave out `mesh`",
        BOTH,
    ),
    "too few axes": (
        BOTH | ROWS | {"mesh_axes": ("rows",)},
        "use None for an axis that stays on each device",
        BOTH | ROWS,
    ),
    "one axis twice": (
        BOTH | ROWS | {"mesh_axes": ("rows", "rows")},
        "one mesh axis can hold one tiled axis",
        BOTH | ROWS,
    ),
    "an array that is static": (
        BOTH | {"static_argnums": 0},
        "leave it out there; what is not an array in it is static anyway",
        BOTH,
    ),
    "axes of all arguments": (
        {"in_axes": (1, 2)} | TILE,
        "write ((1, 2), (1, 2)), or ((1,), (2,))",
        {"in_axes": ((1,), (2,)), "tiles": (2,)},
    ),
    "no name": (
        BOTH | {"tiles": {"x": (2, 2)}},
        "add that name, or the key `...` for all other regions",
        BOTH | {"tiles": {...: (2, 2)}},
    ),
    "a policy and a budget": (
        BOTH | {"budget": "1MB", "policy": "sqrt"},
        "give one of them",
        BOTH | {"policy": "sqrt"},
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name):
    """What was wrong with the options, and the same with the advised ones."""
    wrong, advice, right = OPTIONS[name]
    fun = (lambda w, x: x * w[0, 0, 0] + 1) if name == "axes of all arguments" else blur
    assert advice in refusal(lambda: jaxtile.checkpoint(fun, **wrong)(W, X))
    if name == "axes of all arguments":
        assert jaxtile.checkpoint(fun, **right).explain(W, X).regions
    else:
        assert_close(jax.jit(jaxtile.checkpoint(fun, **right))(W, X), fun(W, X))


def test_an_object_is_registered_or_static():
    def fun(w, x, settings):
        return conv(x, w, settings.stride)

    axes = {"in_axes": (None, (1, 2), None)} | TILE
    message = refusal(lambda: jaxtile.checkpoint(fun, **axes)(W, X, Settings()))
    assert "register its class with `jax.tree_util`, or give the number" in message
    static = jaxtile.checkpoint(fun, **axes, static_argnums=2)
    assert_close(static(W, X, Settings()), fun(W, X, Settings()))
    jax.tree_util.register_static(Settings)
    registered = jaxtile.checkpoint(fun, **axes)
    assert_close(registered(W, X, Settings()), fun(W, X, Settings()))


def test_forward_mode_on_a_mesh():
    mesh = devices(2, axis_types=(AxisType.Auto,))
    on_mesh = jaxtile.checkpoint(blur, **BOTH, mesh=mesh, mesh_axes=("rows", None))

    def moved(f):
        return jax.jit(lambda *args: jax.jvp(f, args, args))(W, images)

    images = jnp.concatenate([X, X + 1])
    message = refusal(lambda: moved(on_mesh))
    assert "leave out `mesh`, or call it inside `jax.shard_map`" in message
    tiled = jaxtile.checkpoint(blur, **BOTH)
    inside = jax.shard_map(tiled, mesh=mesh, in_specs=(P(), P("rows")), out_specs=P("rows"))
    assert_close(moved(tiled), moved(blur))
    assert_close(moved(inside), moved(blur))
