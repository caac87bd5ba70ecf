r"""A Markdown extension: formulas become MathML when the site is built, so pages need no script and no font.

Formulas are written as GitHub renders them: $`\sqrt{d}`$ in a line, and blocks that begin with ```math.
"""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor

INLINE = r"\$`([^`]+)`\$"
BLOCK = re.compile(r"^```math\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Inline(InlineProcessor):
    """A formula in a line."""

    def handleMatch(self, m: Any, data: str) -> tuple[str, int, int]:  # type: ignore[override]  # noqa: ARG002, N802
        """The MathML of a formula, stashed so that Markdown does not read it."""
        return self.md.htmlStash.store(convert(m[1])), m.start(0), m.end(0)


class Blocks(Preprocessor):
    """Formulas in blocks of their own."""

    def run(self, lines: list[str]) -> list[str]:
        """Replace each block by its MathML."""
        return BLOCK.sub(self._stash, "\n".join(lines)).split("\n")

    def _stash(self, found: re.Match[str]) -> str:
        html = f'<div class="formula">{convert(found[1].strip(), display="block")}</div>'
        return f"\n{self.md.htmlStash.store(html)}\n"


class MathML(Extension):
    """Registers both kinds of formulas, before code is read."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        """Add the processors."""
        md.preprocessors.register(Blocks(md), "mathml-blocks", 28)  # fenced code has 25, and 30 removes placeholders
        md.inlinePatterns.register(Inline(INLINE, md), "mathml", 200)  # inline code has 190


def makeExtension(**options: Any) -> MathML:  # noqa: N802
    """The name that Markdown looks for."""
    return MathML(**options)
