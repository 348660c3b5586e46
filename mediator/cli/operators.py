"""The operator's command that has a running service read the operators of its settings again."""

from mediator.cli.options import CommandGroup, CommandOptions

app = CommandGroup(help="Change who may use the console and the admin API.", no_args_is_help=True)


@app.command(epilog="Example: mediator operators reload")
def reload(options: CommandOptions) -> None:
    """Have the service read operators.tokens of its settings again; who is removed there is signed out."""
    answer = options.ask("operators-reload")
    done = [f"{what} {', '.join(answer[what])}" for what in ("added", "removed", "changed") if answer[what]]
    text = f"operators from {answer['source']}: {'; '.join(done) or 'nothing has changed'}"
    if answer["waiting"]:
        text += f"\nOther options differ too, and wait for a restart: {', '.join(answer['waiting'])}"
    options.print(answer, text)
