"""`loraplex compat triton export`: writes a repository for a real Triton."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loraplex.cli.options import errors_to_exit_code
from loraplex.core.errors import ConfigError

if TYPE_CHECKING:
    from loraplex.compat.triton.export import Export

_SOURCE = Path("tensorrt_llm", "1", "source")
"""Place of the repository that is written for a model: below a folder that Triton takes for a
version, so that Triton ignores it."""


def export(
    folder: Annotated[
        Path | None, typer.Argument(help="Repository to write: a new folder.")
    ] = None,
    model_repository: Annotated[
        list[Path] | None,
        typer.Option(help="Repository that loraplex compat triton serves; repeatable."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Instead: model for TensorRT-LLM's five models."),
    ] = None,
    lora_dir: Annotated[
        str | None, typer.Option(help="With --model: the option of loraplex compat triton init.")
    ] = None,
    decoupled: Annotated[
        bool, typer.Option(help="With --model: the option of loraplex compat triton init.")
    ] = False,
    backend_directory: Annotated[
        Path | None,
        typer.Option(help="Folder for the backend vllm, for repositories with backend: vllm."),
    ] = None,
    request_socket: Annotated[
        str,
        typer.Option(
            help="Unix socket of the server, for Triton's user (default: in a folder of its own)."
        ),
    ] = "",
    join: Annotated[
        bool, typer.Option(help="Use the server that runs at --request-socket.")
    ] = False,
    execution_env: Annotated[
        str, typer.Option(help="Virtual environment for Triton's Python: EXECUTION_ENV_PATH.")
    ] = "",
    python: Annotated[
        str, typer.Option(help="Python with loraplex, which starts the server (default: this one).")
    ] = sys.executable,
    server_flag: Annotated[
        list[str] | None,
        typer.Option(
            help="Flag for loraplex compat triton, as --server-flag=--memory=8GiB; repeatable."
        ),
    ] = None,
) -> None:
    """Write models for tritonserver that forward requests to loraplex."""
    from loraplex.compat.triton.export import Export, export_vllm_backend  # noqa: PLC0415 - slow import

    with errors_to_exit_code():
        if join and not request_socket:
            raise ConfigError("--join needs --request-socket: where the server listens")
        how = Export(
            socket=request_socket,
            starts_server=not join,
            python=python,
            server_flags=tuple(server_flag or ()),
            environment=execution_env,
        )
        if folder is None and backend_directory is None:
            raise ConfigError("nothing to write: give a folder, or --backend-directory")
        if folder is not None:
            sources = _sources(folder, model_repository or [], model, lora_dir, decoupled=decoupled)
            _export(folder, sources, how)
        if backend_directory is not None:
            backend = export_vllm_backend(backend_directory, how)
            print(f"wrote {backend}: give tritonserver --backend-directory {backend_directory}")


def _sources(
    folder: Path,
    repositories: list[Path],
    model: str | None,
    lora_dir: str | None,
    *,
    decoupled: bool,
) -> list[Path]:
    """Return the repositories that the server will read."""
    from loraplex.compat.triton.five_models import write_filled_models  # noqa: PLC0415 - slow import

    if bool(repositories) == (model is not None):
        raise ConfigError("give --model-repository DIR, or --model MODEL")
    if model is None:
        return repositories
    source = folder / _SOURCE
    write_filled_models(source, model, lora_dir=lora_dir, is_decoupled=decoupled)
    return [source]


def _export(folder: Path, sources: list[Path], how: "Export") -> None:
    from loraplex.compat.triton.export import export_models  # noqa: PLC0415 - slow import
    from loraplex.compat.triton.repository import read_repositories  # noqa: PLC0415 - slow import

    repository = read_repositories(sources)
    repository.notes.log()
    export_models(folder, sources, repository.declarations, how)
    names = ", ".join(declaration.name for declaration in repository.declarations)
    print(f"wrote {folder} ({names}): tritonserver --model-repository {folder}")
