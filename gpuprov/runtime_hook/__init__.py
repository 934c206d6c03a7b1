"""The OCI runtime that gives containers their GPUs: standard library only, few imports, for every start pays them.

On a host this package lies alone in /usr/lib/gpuprov; its modules import each other relatively and nothing else of
gpuprov. What costs milliseconds at start (json, re, pathlib, dataclasses, …) is not imported here, but by deploy.py,
which is not among the deployed files. The byte code that deploy.py makes does not import typing.
"""
