"""`loraplex bench` with its two verbs; without a verb it is `run`."""

from typing import Any

import typer
from typer.core import TyperGroup

from loraplex.cli.bench import bench_run
from loraplex.cli.bench_compare import bench_compare
from loraplex.cli.help_page import FlagPage


class RunsByDefault(TyperGroup):
    """`loraplex bench --load burst` means `loraplex bench run --load burst`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0] not in self.commands and args[0] != "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


bench_app = typer.Typer(
    cls=RunsByDefault,
    help="Measure a server (`run`, which is meant where no verb is given) or compare systems.",
)
bench_app.command("run")(bench_run)
bench_app.command("compare", cls=FlagPage)(bench_compare)
