"""Remote sources: each writes a file by its name, if it has changed."""

import urllib.parse
from pathlib import Path
from typing import Any, Protocol

import msgspec

from loraplex.adapters.sources.download import Allowance, Arrived, Missing, write_stream
from loraplex.adapters.sources.http import HttpClient
from loraplex.adapters.sources.policy import HUB_HOSTS, SourcePolicy
from loraplex.adapters.sources.reference import Reference, SourceKind
from loraplex.core.errors import (
    AdapterLoadError,
    InvalidAdapterError,
    LoraplexError,
    UnsupportedFeatureError,
)

_MAX_METADATA_BYTES = 8 << 20
"""Maximum size of the hub's description of a repository, which lists every file."""
_CHUNK_BYTES = 1 << 20
_OBJECT_TAGS = ("ETag", "etag", "content_md5", "md5Hash", "LastModified", "last_modified", "mtime")


class Remote(Protocol):
    """Remote file, or folder of files."""

    def get(
        self, name: str, target: Path, allowance: Allowance, known_tag: str
    ) -> Arrived | Missing:
        """Write the file of that name to `target`; the name is empty for a source of one file.

        Raises InvalidAdapterError, PermissionDeniedError, AdapterTooLargeError, AdapterLoadError.
        """
        ...


class HttpRemote:
    """Source over http and https: a file, or the files below a URL."""

    def __init__(self, url: str, policy: SourcePolicy) -> None:
        self._url = url
        self._client = HttpClient(policy)

    def get(
        self, name: str, target: Path, allowance: Allowance, known_tag: str
    ) -> Arrived | Missing:
        parts = urllib.parse.urlsplit(self._url)
        path = f"{parts.path.rstrip('/')}/{name}" if name else parts.path
        url = urllib.parse.urlunsplit(parts._replace(path=path))
        return self._client.download(url, target, allowance, known_tag)


class HubRemote:
    """Repository of the Hugging Face hub. All files are of one commit, which is their tag.

    Only the endpoint and the token come from huggingface_hub. Its own download may use a native
    client (Xet), which would bypass the address check and the size limits.
    """

    def __init__(
        self, reference: Reference, policy: SourcePolicy, endpoint: str, token: str | None
    ) -> None:
        self._reference = reference
        self._endpoint = endpoint.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = HttpClient(policy, HUB_HOSTS)
        self._commit = ""
        self._names: frozenset[str] | None = None
        """Names of all files of the commit; None: not known."""

    def get(
        self, name: str, target: Path, allowance: Allowance, known_tag: str
    ) -> Arrived | Missing:
        commit = self._commit = self._commit or self._find_commit(allowance)
        if commit == known_tag:
            return Missing.UNCHANGED
        repository, folder = self._reference.location, self._reference.folder
        path = "/".join(part for part in (folder, name) if part)
        if self._names is not None and path not in self._names:
            return Missing.ABSENT
        url = f"{self._endpoint}/{repository}/resolve/{commit}/{urllib.parse.quote(path)}"
        got = self._client.download(url, target, allowance, headers=self._headers)
        if isinstance(got, Missing):
            return got
        return Arrived(commit, got.sha256, got.num_bytes)

    def _find_commit(self, allowance: Allowance) -> str:
        """Return the commit that the revision means now."""
        repository, revision = self._reference.location, self._reference.revision
        url = f"{self._endpoint}/api/models/{repository}/revision/{revision}"
        body = self._client.read(url, allowance, self._headers, _MAX_METADATA_BYTES)
        if not body:
            raise InvalidAdapterError(
                f"the hub has no repository {repository} with the revision {revision}", param="path"
            )
        try:
            found = msgspec.json.decode(body, type=_Repository)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise AdapterLoadError(
                f"the hub's description of {repository} is unreadable"
            ) from error
        if found.siblings:
            self._names = frozenset(file.rfilename for file in found.siblings)
        return found.sha


class _RepositoryFile(msgspec.Struct):
    rfilename: str


class _Repository(msgspec.Struct):
    sha: str
    siblings: list[_RepositoryFile] = []


class ObjectRemote:
    """Source in an object store, through fsspec and the store's package."""

    def __init__(self, reference: Reference) -> None:
        self._url = reference.location
        self._files, self._path = object_store(self._url)

    def get(
        self, name: str, target: Path, allowance: Allowance, known_tag: str
    ) -> Arrived | Missing:
        path = f"{self._path}/{name}" if name else self._path
        try:
            return self._get(path, target, allowance, known_tag)
        except FileNotFoundError:
            return Missing.ABSENT
        except LoraplexError:
            raise
        except PermissionError as error:
            raise InvalidAdapterError(f"{self._url} may not be read: {error}") from error
        except Exception as error:  # each store's package has errors of its own
            raise _failed(self._url, error) from error

    def _get(
        self, path: str, target: Path, allowance: Allowance, known_tag: str
    ) -> Arrived | Missing:
        self._files.invalidate_cache()
        info = self._files.info(path)
        if info.get("type") == "directory":
            return Missing.ABSENT
        tag = object_tag(info)
        if tag and tag == known_tag:
            return Missing.UNCHANGED
        size = int(info.get("size") or 0)
        allowance.require_bytes(size)
        with self._files.open(path, "rb") as stream:
            chunks = iter(lambda: stream.read(_CHUNK_BYTES), b"")
            sha256, num_bytes = write_stream(chunks, target, allowance, size)
        if num_bytes != size:
            raise AdapterLoadError(f"{self._url} ended after {num_bytes} of {size} bytes")
        allowance.spend(num_bytes)
        return Arrived(tag, sha256, num_bytes)


def object_store(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it.

    Raises UnsupportedFeatureError without the store's package, or AdapterLoadError.
    """
    try:
        import fsspec  # noqa: PLC0415 - slow import, seldom needed

        files, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        scheme = url.partition("://")[0]
        raise UnsupportedFeatureError(
            f"{scheme}:// needs a package that is not installed ({error}); "
            "pip install 'loraplex[remote]'",
            param="path",
        ) from error
    except Exception as error:
        raise _failed(url, error) from error
    return files, str(path)


def open_remote(reference: Reference, policy: SourcePolicy) -> Remote:
    """Open a remote source. Raises PermissionDeniedError or UnsupportedFeatureError."""
    if reference.kind is SourceKind.OBJECT:
        policy.check_bucket(reference.location)
        return ObjectRemote(reference)
    if reference.kind is SourceKind.HUB:
        from huggingface_hub import constants, get_token  # noqa: PLC0415 - slow import

        return HubRemote(reference, policy, constants.ENDPOINT, get_token())
    return HttpRemote(reference.location, policy)


def object_tag(info: dict[str, Any]) -> str:
    """Return a tag that changes when an object does; empty if the store has none."""
    found = next((key for key in _OBJECT_TAGS if info.get(key)), None)
    return "" if found is None else f"{found} {info[found]}"


def _failed(url: str, error: Exception) -> AdapterLoadError:
    return AdapterLoadError(f"{url} cannot be fetched now: {type(error).__name__}: {error}")
