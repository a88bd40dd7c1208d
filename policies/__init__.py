"""Named policies: what to store, recompute or offload.

`resolve` turns a name into a policy, `names` lists them. `plan` is `jaxtile.plan`.
"""

from jaxtile import BudgetError as BudgetError
from jaxtile import Plan as Plan
from jaxtile import plan as plan
from jaxtile._amounts import format_bytes as format_bytes
from jaxtile._amounts import parse_bytes as parse_bytes
from jaxtile._plan.absent import NoDeviceError as NoDeviceError
from jaxtile._plan.costs import Costs as Costs
from jaxtile._plan.costs import costs as costs
from jaxtile.policy import names as names
from jaxtile.policy import resolve as resolve

from . import _catalogue as _catalogue  # enters the policies into the table of names
