"""What a policy sees of a function, and what it says: for those who write one.

A policy is an object with a method `choose(outline)`. It gets the operations of the whole function,
and returns which results are stored, on which grid each is computed, and on which grid everything
else is.

>>> import jax, jax.numpy as jnp, jaxtile
>>> from jaxtile.policy import Choice
>>> class StoreTheWidest:
...     def choose(self, outline):
...         widest = max((part for part in outline.parts if part.tiled), key=lambda p: p.bytes)
...         return {widest.name: Choice((2, 2)), ...: Choice("whole")}
>>> def loss(kernel, image):
...     for _ in range(3):
...         image = jnp.tanh(jax.lax.conv(image, kernel, (1, 1), "SAME"))
...     return jnp.mean(image**2)
>>> args = jnp.ones((4, 4, 3, 3)), jnp.ones((1, 4, 16, 16))
>>> tiled = jaxtile.checkpoint(loss, in_axes=(None, (2, 3)), policy=StoreTheWidest())
>>> bool(jnp.allclose(tiled(*args), loss(*args)))
True

`register` gives a policy a name. The names that come with jaxtile are in the package `policies`;
those of other packages are found by the entry point `jaxtile.policies`.
"""

from ._named import Decide as Decide
from ._named import Named as Named
from ._named import names as names
from ._named import register as register
from ._named import resolve as resolve
from ._outline import Choice as Choice
from ._outline import Choices as Choices
from ._outline import GraphPolicy as GraphPolicy
from ._outline import GridSpec as GridSpec
from ._outline import Outline as Outline
from ._outline import Part as Part
from ._outline import Place as Place
from ._outline import outline as outline
