"""Measurements that anyone can repeat: ``python -m minipaged.bench NAME``.

Each bench writes its raw samples as JSON, with machine, versions, commit and date, and draws a plot beside it
from that JSON alone. Whatever is compared runs in one process, in turns, so that a busy minute of the machine
hits both sides, and what is reported is the median.

     ours  theirs  ours  theirs  ours  theirs        -> median of each, their ratio
    ───────────────────────────────────────────▶ time
"""
