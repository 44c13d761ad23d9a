"""`trio-federation completion`: the script with which a shell completes commands, options and files. The scripts, and
what answers them, are click's; `main.py` sees to it that an answer imports no more than the command it is about."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes commands, options and files in a shell.

    To have it in every new shell, for bash (4.4 or later) write into ~/.bashrc

    \b
        eval "$(trio-federation completion bash)"

    for zsh write into ~/.zshrc, after compinit

    \b
        eval "$(trio-federation completion zsh)"

    and for fish run once

    \b
        trio-federation completion fish \\
            > ~/.config/fish/completions/trio-federation.fish
    """
    root = ctx.find_root()
    name = str(root.info_name)
    made = get_completion_class(shell)
    assert made is not None, "these come with click"
    # The variable with which the script asks is the one that click's main looks at.
    variable = f"_{name}_COMPLETE".replace("-", "_").upper()
    click.echo(made(root.command, {}, name, variable).source(), nl=False)
