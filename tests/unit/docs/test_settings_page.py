"""docs/settings.md has every setting: each field of the settings structs has its metadata."""

import pytest

from loraplex.core.config import SETTINGS, ModelConfig
from loraplex.core.server_config import ServerConfig
from tools.settings_page import settings_page


def test_every_setting_has_a_row():
    page = settings_page()
    fields = {*ServerConfig.__struct_fields__, *ModelConfig.__struct_fields__}
    assert set(SETTINGS) == fields
    assert [name for name in fields if f"\n| `{name}` | " not in page] == []


@pytest.mark.parametrize("field", SETTINGS.values(), ids=lambda field: field.name)
def test_a_summary_is_a_phrase_that_ends_before_its_default(field):
    assert not field.setting.summary.endswith((".", ","))
    assert field.setting.summary[0].isupper()
    assert not field.setting.details or field.setting.details.endswith((".", ".**"))


def test_no_setting_of_a_model_has_the_name_of_a_servers():
    assert not set(ServerConfig.__struct_fields__) & set(ModelConfig.__struct_fields__)
