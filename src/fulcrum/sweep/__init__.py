"""Many runs side by side: what each lever costs and brings, told in the terminal, in files and in TensorBoard."""

from .comparison import Comparison, compare
from .report import show, write

__all__ = ["Comparison", "compare", "show", "write"]
