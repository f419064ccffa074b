"""`python -m loraplex`, and the `loraplex` command."""

from loraplex.core.imports import without_collection


def main() -> None:
    """Run the command line."""
    with without_collection():
        from loraplex.cli.main import app  # noqa: PLC0415
    app()


if __name__ == "__main__":
    main()
