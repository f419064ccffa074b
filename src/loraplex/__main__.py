"""`python -m loraplex`: the same as the `loraplex` command."""

from loraplex.cli.main import app

app()
