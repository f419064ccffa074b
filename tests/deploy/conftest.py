"""Checks of deploy/, run by `make charts` with the packages of tests/deploy/requirements.txt.

`make test` leaves them out where Helm's library is not installed: it has 244 MB.
"""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("helm_python") else ["test_*.py"]
