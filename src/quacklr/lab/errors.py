"""What a user can mend: told in one sentence, with exit code 2, and no traceback."""

from __future__ import annotations


class UserError(Exception):
    """A sentence that names the thing that is wrong and the way out."""
