"""Notes of a reader of model repositories, in addition to errors: each once, in order."""

import dataclasses
import logging

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Notes:
    infos: list[str] = dataclasses.field(default_factory=list)
    """What is accepted without effect, and what was chosen."""
    warnings: list[str] = dataclasses.field(default_factory=list)
    """What is served in another way than it is written."""

    def info(self, text: str) -> None:
        if text not in self.infos:
            self.infos.append(text)

    def warning(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)

    def log(self) -> None:
        """Log all notes."""
        for text in self.infos:
            logger.info("%s", text)
        for text in self.warnings:
            logger.warning("%s", text)
