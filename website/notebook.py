"""A notebook as Markdown: its text, its code, and what the code printed or drew when the notebook was saved."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any


def notebook(file: Path) -> str:
    """The cells of a notebook, without its title: the page has one."""
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    return re.sub(r"\A# .*\n+", "", "\n\n".join(part for cell in cells for part in _cell(cell)))


def _cell(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"]).strip()
    if cell["cell_type"] == "markdown":
        return [source]
    outputs = [text for output in cell.get("outputs", ()) if (text := _output(output))]
    return [f"```python\n{source}\n```", *outputs] if source else outputs


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {"text/plain": output.get("text", "")})
    if "image/png" in data:
        return f'<img alt="what the code above drew" src="data:image/png;base64,{"".join(data["image/png"]).strip()}">'
    text = html.escape("".join(data.get("text/plain", "")).rstrip())
    return f'<pre class="output">{text}</pre>' if text else ""
