"""The README's Python runs as it stands."""

import re
from pathlib import Path

README = Path(__file__).resolve().parents[1] / "README.md"


def test_the_snippets_run_in_order_and_print_what_they_say(smollm2_folder: Path, capsys):
    snippets = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(snippets) == 3
    exec(compile("\n".join(snippets), "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert printed.startswith(" Paris.") and "'used_blocks': 0" in printed
    assert "\n240\nEvent(step=29, act='preempt', request_id=2," in printed
    assert printed.rstrip().endswith("\n2")
