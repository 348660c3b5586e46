"""The command ``mediator pipeline embed``: catalogs of many cards into the registry, read by a model on Spark."""

from dataclasses import asdict
from typing import Annotated

import typer

from mediator.cli.options import CommandGroup
from mediator.errors import BadRequestError
from pipeline.cli.jobs import SparkOptions, is_small, job, print_result, require_spark

app = CommandGroup()


@app.command(epilog="Example: mediator pipeline embed 'catalog/*.parquet' --tenant acme")
def embed(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SOURCE",
            help="A card a line (.jsonl, .ndjson), or Parquet with cards in a column `card` or as its rows; files, "
            "folders of them, and patterns such as 'cards-*.jsonl'.",
        ),
    ] = None,
    registered: Annotated[
        bool, typer.Option("--registered", help="Instead of a catalog, embed what is registered, of all tenants.")
    ] = False,
    tenant: Annotated[
        str | None, typer.Option(metavar="NAME", help="Whose agents a catalog's are.", show_default="default")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="With --registered, the model that the service is to have, as in its settings.",
            show_default="registry.model",
        ),
    ] = None,
    *,
    options: SparkOptions,
) -> None:
    """Register many cards with vectors that are made here in parallel, so that the service has not to make them.

    Vectors are kept in the lake: a run that was interrupted is simply made once more. A service has to run here.
    """
    require_spark()
    from pipeline.embedding.catalogs import files_of

    if bool(sources) == registered:
        raise typer.BadParameter("expected either a SOURCE or --registered", param_hint="SOURCE")
    if registered and tenant is not None:
        raise typer.BadParameter("expected none with --registered, which is about all tenants", param_hint="--tenant")
    if model is not None and not registered:
        raise typer.BadParameter(
            "expected --registered: a catalog is read by the service's model", param_hint="--model"
        )
    whose = "default" if tenant is None else tenant
    if whose not in {"default", *options.load().tenants}:
        raise typer.BadParameter(f'no tenant "{whose[:100]}" in the settings', param_hint="--tenant")
    try:
        files = files_of(sources or [])
    except BadRequestError as error:
        raise typer.BadParameter(str(error), param_hint="SOURCE") from None
    small = not registered and is_small(files)
    with job("embed", options, creates=True, short=lambda _settings, _lake: small) as work:
        from pipeline.embedding.model import find_model
        from pipeline.embedding.registry_client import RegistryClient
        from pipeline.embedding.run import embed_catalog, embed_registered
        from pipeline.source.options import database_options
        from registry.service import MODELS
        from registry.settings import RegistrySettings

        settings, service = work.settings, RegistryClient(work.settings.data_dir)
        service.status()
        chosen = find_model(
            model or settings.section(RegistrySettings).embedding_model, settings.data_dir / MODELS, work.on_progress
        )
        if registered:
            summary = embed_registered(
                work.spark, work.lake, database_options(settings), chosen, service, work.on_progress
            )
        else:
            summary = embed_catalog(work.spark, work.lake, files, chosen, service, whose, work.on_progress)
        work.numbers.update(asdict(summary))
    print_result(summary.lines(), work.numbers, options.as_json)
