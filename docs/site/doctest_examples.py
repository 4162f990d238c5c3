"""Our docstrings head their doctests with `Example:`; mkdocstrings shows doctests as code below `Examples:` only."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object


class DoctestExamples(Extension):
    """Rename the heading before docstrings are parsed."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Change one docstring."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(r"^(\s*)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
