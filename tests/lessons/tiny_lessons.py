"""Small lessons for the tests of the machinery, which need no model and start at once."""

from pathlib import Path

from minipaged.lessons.reading import Lesson

GOOD = '''\
# %% [markdown] given="12"
# # 01  Doubling
#
# Each of the 12 numbers is doubled.

# %%
# copy this, which a shell would do too
class NotYet(Exception):
    pass


def check_double(double):
    try:
        print("right: double" if double(2) == 4 else "wrong: double")
    except NotYet:
        print("not yet: double")


# %% tags=["exercise"]
def double(x):
    """Return twice ``x``."""
    raise NotYet


# %% [markdown]
# <details>
# <summary>Hint</summary>
#
# Add.
#
# </details>
#
# <details>
# <summary>Solution</summary>
#
# ```python
# def double(x):
#     return x + x
# ```
#
# </details>

# %%
check_double(double)
'''


def write_lesson(folder: Path, name: str = "01_doubling", source: str = GOOD) -> Lesson:
    """Write a lesson's source and return the lesson."""
    path = folder / f"{name}.py"
    path.write_text(source, encoding="utf-8")
    return Lesson(path)
