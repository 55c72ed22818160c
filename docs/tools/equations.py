"""Equations as MathML, which browsers draw by themselves: no script and no font has to be fetched."""

from typing import Any

from latex2mathml.converter import convert


def display(source: str, language: str, css_class: str, options: Any, md: Any, **kwargs: Any) -> str:
    """Return a fenced block ``math``, one equation a line in LaTeX, as HTML; a formatter of pymdownx.superfences."""
    lines = [line.strip() for line in source.splitlines() if line.strip()]
    return f'<div class="{css_class}">{"".join(convert(line, display="block") for line in lines)}</div>'
