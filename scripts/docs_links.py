"""Hook of mkdocs: a link to a file outside docs becomes its path: the site does not hold it."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([^)#]+)\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with each page's text."""
    return OUTSIDE.sub(lambda link: f"`{link[2]}`", markdown)
