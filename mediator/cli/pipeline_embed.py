"""The command ``mediator pipeline embed``: catalogs of many cards into the registry, read by a model on Spark."""

from dataclasses import asdict
from typing import Annotated

import typer

from mediator.cli.options import AsJson, Config, DataDir, load
from mediator.cli.pipeline_running import Conf, Lake, Master, Remote, is_little, job, require_spark, tell
from mediator.errors import BadRequestError


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(epilog="Example: mediator pipeline embed 'catalog/*.parquet' --tenant acme")(embed)


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
    master: Master = None,
    conf: Conf = None,
    remote: Remote = None,
    lake: Lake = None,
    config: Config = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
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
    if whose not in {"default", *load(config, data_dir=data_dir).tenants}:
        raise typer.BadParameter(f'no tenant "{whose[:100]}" in the settings', param_hint="--tenant")
    try:
        files = files_of(sources or [])
    except BadRequestError as error:
        raise typer.BadParameter(str(error), param_hint="SOURCE") from None
    with job(
        "embed",
        master=master,
        conf=conf,
        remote=remote,
        lake=lake,
        config=config,
        data_dir=data_dir,
        creates=True,
        little=lambda _settings, _lake: not registered and is_little(files),
    ) as work:
        from pipeline.embedding.handing import Service
        from pipeline.embedding.model import find_model
        from pipeline.embedding.run import embed_catalog, embed_registered
        from pipeline.source.options import place_of
        from registry.assembly import MODELS

        settings, service = work.settings, Service(work.settings.data_dir)
        service.status()
        chosen = find_model(model or settings.registry.model, settings.data_dir / MODELS, work.told)
        if registered:
            summary = embed_registered(work.spark, work.lake, place_of(settings), chosen, service, work.told)
        else:
            summary = embed_catalog(work.spark, work.lake, files, chosen, service, whose, work.told)
        work.numbers.update(asdict(summary))
    tell(summary.lines(), work.numbers, as_json)
