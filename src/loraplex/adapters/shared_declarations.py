"""Shared declarations as one server last read them, and its changes to them."""

import contextlib
import dataclasses
import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from loraplex.adapters.declaration import (
    MAX_DOCUMENT_BYTES,
    Declaration,
    DeclaredName,
    check_declaration,
    read_declaration,
    written_name,
    written_version,
)
from loraplex.adapters.declaration_places import DeclarationPlace, Listed
from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.errors import (
    AdapterExistsError,
    AdapterLoadError,
    ConfigError,
    LoraplexError,
    PermissionDeniedError,
)

logger = logging.getLogger(__name__)

KEPT_VERSIONS: Final = 8
"""Number of versions of which a server keeps the documents that it wrote. A writer must not be able
to create a version again that was declared before: that takes a delay of this many versions."""
REMOVED_SECONDS: Final = 7 * 86400.0
"""Time after which the documents of an unloaded adapter are deleted."""
_ALL: Final = 1 << 53
_READ_ONLY: Final = (errno.EROFS, errno.EACCES, errno.EPERM)
_OF_ENTRY: Final = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.EISDIR, errno.ENOTDIR)
_MAX_TIDIED: Final = 64
"""Maximum number of unloaded adapters whose documents one change deletes."""


@dataclasses.dataclass(frozen=True, slots=True)
class _ReadDocument:
    tag: str
    declaration: Declaration | None
    """None: it declares no adapter, which was logged."""
    problem: str = ""
    """What was logged."""


class SharedDeclarations:
    """Declarations in one place. Every method may be called from any thread, and blocks."""

    def __init__(
        self,
        place: DeclarationPlace,
        what: str,
        max_documents: int,
        unix_seconds: Callable[[], float] = time.time,
    ) -> None:
        """what: the place as messages name it. max_documents: maximum number of documents."""
        self.what = what
        self._place = place
        self._max_documents = max_documents
        self._unix_seconds = unix_seconds
        self._turn = threading.Lock()
        self._documents: dict[str, _ReadDocument] = {}
        self._valid: Mapping[DeclaredName, Declaration] = MappingProxyType({})
        self._default_model = ""

    def read(self, default_model: str = "") -> Mapping[DeclaredName, Declaration]:
        """Return the valid declaration of each name, removed ones included.

        default_model: the model of declarations that name none. Only new and changed documents are
        read. Raises AdapterLoadError, and then the earlier result stays valid.
        """
        with self._turn:
            return self._read(default_model)

    def write(self, declaration: Declaration) -> Mapping[DeclaredName, Declaration]:
        """Declare a version; return all declarations after it.

        Raises AdapterExistsError if another server declared this version or a later one,
        PermissionDeniedError if the place is read-only.
        """
        check_declaration(declaration)
        body = msgspec.json.encode(declaration)
        if len(body) > MAX_DOCUMENT_BYTES:
            raise ConfigError(
                f"the declaration of adapter {declaration.name!r} has more than "
                f"{readable_bytes(MAX_DOCUMENT_BYTES)}"
            )
        with self._turn:
            self._require_newer(declaration)
            self._require_space(declaration)
            try:
                with _failing(
                    f"adapter {declaration.name!r} cannot be declared in {self.what}",
                    is_change=True,
                ):
                    self._place.create(declaration.file_name, body)
            except FileExistsError:
                self._read(self._default_model)
                self._require_newer(declaration)
                # Its name is taken by a document that is not valid.
                raise _conflict(declaration, None) from None
            after = self._read(self._default_model)
            if after.get(declaration.key) != declaration:
                raise _conflict(declaration, after.get(declaration.key))
            with contextlib.suppress(Exception):  # the documents that remain have no effect
                self._tidy(declaration)
            return after

    def _read(self, default_model: str) -> Mapping[DeclaredName, Declaration]:
        with _failing(f"the adapter declarations of {self.what} cannot be read"):
            try:
                found = self._place.documents()
            except FileNotFoundError:
                if self._documents:
                    raise
                found = {}
            newest = _newest(found)
            self._check_number(newest, found)
            documents = {name: self._document(name, listed) for name, listed in newest.items()}
        kept = {name: one for name, one in documents.items() if one is not None}
        if kept != self._documents or default_model != self._default_model:
            self._documents, self._default_model = kept, default_model
            self._valid = MappingProxyType(_valid(kept, default_model))
        return self._valid

    def _document(self, name: str, listed: Listed) -> _ReadDocument | None:
        """Read a document if it is new or has changed; None: it was deleted meanwhile."""
        before = self._documents.get(name)
        if before is not None and before.tag == listed.tag:
            return before
        try:
            if listed.problem:
                raise ConfigError(f"{name} cannot be read: {listed.problem}")
            if listed.num_bytes > MAX_DOCUMENT_BYTES:
                raise ConfigError(f"{name} has more than {readable_bytes(MAX_DOCUMENT_BYTES)}")
            declaration = read_declaration(self._place.read(name), name)
        except FileNotFoundError:
            return None
        except ConfigError as error:
            return _left_out(listed.tag, before, error.message)
        except OSError as error:
            if error.errno not in _OF_ENTRY:
                raise
            # Its permissions may change without its content.
            return _left_out("", before, f"{name} cannot be read: {error.strerror}")
        return _ReadDocument(listed.tag, declaration)

    def _check_number(self, newest: Mapping[str, Listed], found: Mapping[str, Listed]) -> None:
        if len(newest) > self._max_documents:
            raise AdapterLoadError(
                f"{self.what} has {len(newest)} adapter declarations; at most "
                f"{self._max_documents} are read: delete some, or raise max_adapter_declarations"
            )
        if self._documents and not found:
            # So does a folder look that is not mounted.
            raise AdapterLoadError(
                f"{self.what} has lost all its adapter declarations: the adapters stay as they are "
                "until there is one again"
            )

    def _require_newer(self, declaration: Declaration) -> None:
        present = self._valid.get(declaration.key)
        if present is not None and present.version >= declaration.version:
            raise _conflict(declaration, present)

    def _require_space(self, declaration: Declaration) -> None:
        is_new = declaration.key not in self._valid
        if is_new and len(self._documents) >= self._max_documents:
            raise PermissionDeniedError(
                f"{self.what} has {len(self._documents)} adapter declarations, its limit: the "
                "operator raises it with max_adapter_declarations"
            )

    def _tidy(self, declaration: Declaration) -> None:
        """Delete documents that have no effect any longer, the oldest versions first."""
        oldest = self._unix_seconds() - REMOVED_SECONDS
        expired = [
            removed.stem
            for removed in self._valid.values()
            if removed.is_removed and 0 < removed.created < oldest
        ][:_MAX_TIDIED]
        last_kept = dict.fromkeys(expired, _ALL)
        last_kept[declaration.stem] = declaration.version - KEPT_VERSIONS
        written = filter(None, map(written_version, self._place.documents()))
        for stem, version in sorted(written, key=lambda one: one[1]):
            if version <= last_kept.get(stem, 0):
                self._place.delete(written_name(stem, version))


def _left_out(tag: str, before: _ReadDocument | None, problem: str) -> _ReadDocument:
    """Return a document that means what it meant before: an editor may be writing it."""
    declaration = None if before is None else before.declaration
    if before is None or before.problem != problem or before.tag != tag:
        stays = "" if declaration is None else "; its earlier content stays in force"
        logger.warning("adapter declarations: %s%s", problem, stays)
    return _ReadDocument(tag, declaration, problem)


def _newest(found: Mapping[str, Listed]) -> dict[str, Listed]:
    """Leave out the earlier versions of documents that servers wrote."""
    newest: dict[str, int] = {}
    for stem, version in filter(None, map(written_version, found)):
        newest[stem] = max(version, newest.get(stem, 0))
    return {
        name: listed
        for name, listed in found.items()
        if (written := written_version(name)) is None or written[1] == newest[written[0]]
    }


def _valid(
    documents: Mapping[str, _ReadDocument], default_model: str
) -> dict[DeclaredName, Declaration]:
    """Return the declaration of each name that has the greatest version.

    Of one version the document whose name sorts first is valid, on every server.
    """
    valid: dict[DeclaredName, Declaration] = {}
    for name in sorted(documents):
        declaration = documents[name].declaration
        if declaration is None:
            continue
        if not declaration.model:
            declaration = msgspec.structs.replace(declaration, model=default_model)
        present = valid.get(declaration.key)
        if present is None or declaration.version > present.version:
            valid[declaration.key] = declaration
        elif declaration.version == present.version:
            logger.warning(
                "adapter declarations: %s and another document declare version %d of adapter %r",
                name,
                declaration.version,
                declaration.name,
            )
    return valid


@contextlib.contextmanager
def _failing(what: str, *, is_change: bool = False) -> Iterator[None]:
    """Raise an error of the tree in place of any of the file system or of a store's package."""
    try:
        yield
    except (LoraplexError, FileExistsError):
        raise
    except Exception as error:
        if is_change and (
            isinstance(error, PermissionError)
            or (isinstance(error, OSError) and error.errno in _READ_ONLY)
        ):
            raise PermissionDeniedError(
                f"{what}: they are read-only for this server ({error}); change the document of the "
                "adapter instead"
            ) from error
        raise AdapterLoadError(f"{what} now: {type(error).__name__}: {error}") from error


def _conflict(declaration: Declaration, present: Declaration | None) -> AdapterExistsError:
    of_present = (
        "a document that is not valid has its place"
        if present is None
        else f"it has version {present.version} (digest {present.digest[:12] or 'not given'})"
    )
    return AdapterExistsError(
        f"version {declaration.version} of adapter {declaration.name!r} was not declared: "
        f"{of_present}, which another server or a person wrote meanwhile; look at it, and try "
        "again",
        param="name",
    )
