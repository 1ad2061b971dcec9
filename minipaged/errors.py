"""Two kinds of error: what a user asked for cannot be, and the books of a cache are used wrongly."""


class UserError(ValueError):
    """Say in one sentence what was asked, why it cannot be done, and the limit.

    Command-line programs print the sentence alone and exit with a non-zero code; a caller of the Python API
    can catch it and go on: nothing is left half done when it is raised.
    """


class AccountingError(RuntimeError):
    """A cache's books are used wrongly: a block is freed twice, or taken where none is left. A fault in an engine."""
