"""`gpuprov serve`: answer old scripts as nvidia-docker-plugin did, in the foreground."""

from __future__ import annotations

import click

from gpuprov.fleet.standard_streams import say


@click.command("serve", short_help="Answer nvidia-docker scripts on 127.0.0.1:3476.")
def serve_command() -> None:
    """Answer GET requests in the form of nvidia-docker-plugin 1.0, so that scripts that ask it work again.

    It listens on 127.0.0.1:3476 and, as root, on /run/gpuprov/serve.sock (root alone); no other address can be named.
    It loads and changes nothing. Paths: /docker/cli, /gpu/info and /gpu/status, each also with /json, and all below
    /v1.0. For a service: gpuprov_serve. `gpuprov docker-args` is the safer way, for no other program can answer in its
    place.

    \b
    Examples:
      sudo gpuprov serve
      docker run --rm $(curl -sf 'localhost:3476/docker/cli?dev=0+1') IMAGE nvidia-smi
      curl -s localhost:3476/gpu/status
    """
    from gpuprov.boot.serve_main import ADDRESS, serve
    from gpuprov.core.system import System

    say(f"serving {ADDRESS[0]}:{ADDRESS[1]} until Ctrl-C", err=True)
    serve(System())
