"""The settings of the logging extension, which set the level of our own log.

The most detailed level that is on counts: a verbose level above 0 shows everything. Where the log
goes and how its lines look is fixed while the server runs, but the format is kept and returned.
"""

import logging
from collections.abc import Mapping
from types import MappingProxyType

from loraplex.core.errors import InvalidRequestError, UnsupportedFeatureError

LogValue = bool | int | str

LOGGER = "loraplex"
FORMATS = ("default", "ISO8601")
MAX_VERBOSE_LEVEL = 2**32 - 1

DEFAULTS: Mapping[str, LogValue] = MappingProxyType(
    {
        "log_file": "",
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "default",
    }
)
OTHER_NAMES = {"log_warnings": "log_warning", "log_errors": "log_error"}


class LogSettings:
    """Log settings of the whole process. The initial level stays until a change."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger(LOGGER)
        self._settings = dict(DEFAULTS)
        level = self._logger.getEffectiveLevel()
        self._settings["log_info"] = level <= logging.INFO
        self._settings["log_warning"] = level <= logging.WARNING
        self._settings["log_error"] = level <= logging.ERROR
        self._settings["log_verbose_level"] = int(level <= logging.DEBUG)

    def report(self) -> dict[str, LogValue]:
        return dict(self._settings)

    def update(self, changes: Mapping[str, object]) -> dict[str, LogValue]:
        """Change what is named; names that are not known change nothing, as in Triton.

        Raises InvalidRequestError and UnsupportedFeatureError, and then nothing has changed.
        """
        named = {OTHER_NAMES.get(name, name): value for name, value in changes.items()}
        checked = {name: _checked(name, v) for name, v in named.items() if name in DEFAULTS}
        self._settings.update(checked)
        if checked:
            self._logger.setLevel(self._level())
        return self.report()

    def _level(self) -> int:
        if self._settings["log_verbose_level"]:
            return logging.DEBUG
        for name, level in (
            ("log_info", logging.INFO),
            ("log_warning", logging.WARNING),
            ("log_error", logging.ERROR),
        ):
            if self._settings[name]:
                return level
        return logging.CRITICAL


def _checked(name: str, value: object) -> LogValue:
    if name == "log_file":
        raise UnsupportedFeatureError(
            "log file location can not be updated through network protocol", param=name
        )
    if name == "log_verbose_level":
        if type(value) is not int or not 0 <= value <= MAX_VERBOSE_LEVEL:
            raise InvalidRequestError(
                f"expect unsigned integer for '{name}', got {_shown(value)}", param=name
            )
        return value
    if name == "log_format":
        if not isinstance(value, str) or value not in FORMATS:
            raise InvalidRequestError(
                f"invalid argument for --log_format, got: {_shown(value)}; the formats are "
                f"{', '.join(FORMATS)}",
                param=name,
            )
        return value
    if not isinstance(value, bool):
        raise InvalidRequestError(f"expect boolean for '{name}', got {_shown(value)}", param=name)
    return value


def _shown(value: object) -> str:
    return repr(value)[:40]
