"""The one exception for input that the engine refuses."""


class UserError(ValueError):
    """Say in one sentence what was asked, why it cannot be done, and the limit.

    Command-line programs print the sentence alone and exit with a non-zero code; a caller of the Python API
    can catch it and go on: nothing is left half done when it is raised.
    """
