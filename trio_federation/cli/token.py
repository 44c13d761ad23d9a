"""`trio-federation token`: prints the token of one cluster. How one is derived is `credentials.py`; a hub does the same
when it checks one, so that nothing is stored anywhere."""

from __future__ import annotations

import click

from trio_federation.config import read_hub_secret_file, weak_secret
from trio_federation.credentials import MAX_SERIAL, make_token, read_serial
from trio_federation.errors import ConfigurationError


@click.command()
@click.argument("cluster")
@click.option(
    "--secret-file",
    required=True,
    type=click.Path(),
    metavar="FILE",
    help="The file with the hub's secret, as [hub] secret_file names it.",
)
@click.option(
    "--serial",
    default="1",
    show_default=True,
    metavar="N",
    help="Which of the tokens of the cluster, one after the other.",
)
def token(cluster: str, secret_file: str, serial: str) -> None:
    """Print the token with which an agent proves that it is CLUSTER, and no other.

    Write it into the file that [federation] secret_file of that agent names. The hub needs "token" in its accept, for
    instance accept = ["token"].

    The same secret, cluster and serial give the same token. To revoke one, give the agent one with a higher --serial,
    and add the old one to the hub's deny_file, as CLUSTER.SERIAL.

    The output is the token and a line break, and nothing else. Whoever has the token can speak for the cluster: make
    the file that it goes to readable for nobody else.
    """
    number = read_serial(serial)
    if number is None:
        raise ConfigurationError([f"--serial: {serial[:12]!r} is not a whole number from 1 to {MAX_SERIAL}"])
    try:
        secret = read_hub_secret_file(secret_file)
        made = make_token(secret.reveal(), cluster, number)
    except ValueError as error:
        raise ConfigurationError([str(error)]) from error
    if (weakness := weak_secret(secret)) is not None:
        click.echo(f"note: the secret {weakness}", err=True)
    click.echo(made)
