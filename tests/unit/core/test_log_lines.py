import re
import subprocess
import sys

PROGRAM = """
import logging
from loraplex.core.log_lines import log_to_standard_error

log_to_standard_error("warning", *{arguments})
logging.getLogger("a.b").info("not reported")
logging.getLogger("a.b").warning("reported")
"""


def line(*arguments: str) -> str:
    program = PROGRAM.format(arguments=arguments)
    run = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60
    )
    assert not run.stdout
    return run.stderr


def test_a_line_has_level_time_source_and_message():
    start = r"W \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} "
    assert re.fullmatch(start + "a.b: reported\n", line())
    assert re.fullmatch(start + "engine: reported and more\n", line("engine", " and more"))
