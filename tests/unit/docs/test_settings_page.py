"""docs/settings.md tells every setting, and none that is not there."""

import re
from pathlib import Path

from loraplex.core.config import ModelConfig
from loraplex.core.server_config import ServerConfig

PAGE = Path(__file__).parents[3] / "docs" / "settings.md"


def test_every_setting_has_a_row():
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [*ServerConfig.__struct_fields__, *ModelConfig.__struct_fields__]
