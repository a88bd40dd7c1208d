"""What to store, recompute or offload: decisions on top of `jaxtile`."""

from ._absent import NoDeviceError as NoDeviceError
from ._bytes import format_bytes as format_bytes
from ._bytes import parse_bytes as parse_bytes
from ._catalogue import names as names
from ._catalogue import resolve as resolve
from ._costs import Costs as Costs
from ._costs import costs as costs
from ._frameworks import chainer as chainer
from ._frameworks import retained as retained
from ._frameworks import tensorflow as tensorflow
from ._frameworks import training_steps as training_steps
from ._frameworks import untied as untied
from ._plan import Plan as Plan
from ._planner import plan as plan
from ._search import BudgetError as BudgetError
