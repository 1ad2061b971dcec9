"""What the command lines of this project share."""

import argparse
from typing import NoReturn

FAILURE = 2
"""The exit code after a refusal."""


class OneSentenceParser(argparse.ArgumentParser):
    """A parser whose complaints are one sentence, without the usage lines."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and leave with code `FAILURE`."""
        self.exit(FAILURE, f"{self.prog}: {message}\n")
