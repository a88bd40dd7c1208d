"""Most of the time of tests is compilation, so XLA is told to make it short.

LLVM does not optimise, and jaxlib 0.10 emits code without MLIR, which takes a quarter of the time
(later ones cannot). XLA's own passes stay as they are, and with them, but for a few bytes, the
memory that a program needs.
"""

from jaxlib.version import __version__

FLAGS = "--xla_backend_optimization_level=0"
if __version__.startswith("0.10."):
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
