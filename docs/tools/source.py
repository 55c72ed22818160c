"""Pages with the source of a file, in which every class and function can be linked to."""

import ast
from functools import cache
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_for_filename


def page_of(path: str) -> str:
    """Return the name of the page that shows a file or folder of the repository."""
    return f"source/{path}.md"


def page(root: Path, path: str) -> str:
    """Return that page."""
    if (root / path).is_dir():
        names = sorted(file.relative_to(root).as_posix() for file in (root / path).rglob("*.*") if file.is_file())
        return f"# {path}\n\n" + "\n".join(f"- `{name}`" for name in names) + "\n"
    text = (root / path).read_text(encoding="utf-8")
    lines = highlight(text, get_lexer_for_filename(path, stripnl=False), HtmlFormatter(nowrap=True)).splitlines()
    names = {line: name for name, line in symbols(root / path).items()} if path.endswith(".py") else {}
    marked = [
        f'<span id="{names[number]}"></span>{line}' if number in names else line for number, line in enumerate(lines, 1)
    ]
    # &#10; in place of line ends: Markdown looks at raw HTML line by line
    code = "&#10;".join(marked)
    head = f"---\nsearch:\n  exclude: true\nhide: [toc]\n---\n\n# {path}\n\n"
    return f'{head}<div class="source highlight"><pre><code><span>{code}</span></code></pre></div>\n'


def line_of(path: Path, name: str) -> int:
    """Return the line in which a class, function, method or constant is defined."""
    known = symbols(path)
    if name not in known:
        raise LookupError(f"{path} has no {name}; it has {', '.join(known)}")
    return known[name]


@cache
def symbols(path: Path) -> dict[str, int]:
    """Return the names that a Python file defines, ``Class.method`` included, and their lines."""
    found: dict[str, int] = {}

    def visit(body: list[ast.stmt], above: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                found[above + node.name] = node.lineno
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{above}{node.name}.")
            targets = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            found.update({above + target.id: node.lineno for target in targets if isinstance(target, ast.Name)})

    visit(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return found
