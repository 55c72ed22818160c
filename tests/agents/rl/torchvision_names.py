"""Declares the compiled operators that ``import torchvision`` looks for, where its build does not fit that of torch.

Imported by the scripts that run the real libraries in a Python of their own, which use none of these operators.
"""

from torch import library

_LIBRARY = library.Library("torchvision", "FRAGMENT")
for _name in ("nms", "qnms"):
    try:
        _LIBRARY.define(f"{_name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    except RuntimeError:
        pass  # torchvision has it
