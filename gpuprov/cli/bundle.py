"""`gpuprov bundle`: make, list and check the file from which hosts without a network are installed."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpuprov.fleet.options import AS_JSON, INVENTORY_FIELDS, named_options, require_whole_program, text_option
from gpuprov.fleet.standard_streams import say, say_text
from gpuprov.protocol.errors import ExitCode, GpuprovError, UsageError
from gpuprov.protocol.secrets import hidden
from gpuprov.protocol.words import counted

if TYPE_CHECKING:
    from gpuprov.bundle.format import Contents
    from gpuprov.bundle.manifest import Manifest
    from gpuprov.bundle_create.recipe import Recipe
    from gpuprov.core.proxy import Proxy
    from gpuprov.core.system import System
    from gpuprov.protocol.spec import HostSpec
    from gpuprov.protocol.tables import Tables

_FILE = click.argument("file", type=click.Path(exists=True, dir_okay=False))


@click.group(short_help="One file for hosts without a network.")
def bundle() -> None:
    """One file with all that an installation needs, for hosts without a network.

    \b
    Examples:
      gpuprov bundle create --distro debian-12 --driver 580.178.04 -o bundle.tar      with a network
      gpuprov bundle verify bundle.tar
      gpuprov install --bundle bundle.tar --hosts inventory.ini                       without one
    """


@bundle.command(short_help="Collect all that an installation needs into one file.")
@click.option(
    "--distro", metavar="NAME-VERSION", required=True, help="The hosts' distribution, such as debian-12 or rocky-9."
)
@click.option("--arch", "architecture", metavar="ARCH", default=platform.machine,
              help="The hosts' `uname -m`. Default: this machine's.")  # fmt: skip
@text_option("--driver", metavar="VERSION", help="The driver. Default: what the inventory asks for.")
@click.option("--driver-file", metavar="FILE", type=click.Path(exists=True, dir_okay=False),
              help="A trusted .run file on this machine.")  # fmt: skip
@click.option("--cuda-file", metavar="FILE", type=click.Path(exists=True, dir_okay=False),
              help="A trusted .run file of the CUDA toolkit; give its version by -e gpuprov_cuda=…")  # fmt: skip
@click.option("--fabric-manager", is_flag=True, help="Add NVIDIA's fabric manager, for hosts with NVSwitches.")
@click.option("--kernel", "kernels", metavar="RELEASE", multiple=True,
              help="Add headers and a compiler for this kernel (`uname -r`); repeatable.")  # fmt: skip
@click.option("--package", "packages", metavar="NAME", multiple=True, help="Add a package; repeatable.")
@click.option("--image", "images", metavar="IMAGE", multiple=True,
              help="Add a container image, pulled if docker here lacks it; repeatable.")  # fmt: skip
@click.option("--source", "sources", metavar="LINE", multiple=True, help="Use this instead of the distribution's "
              "servers: a line of sources.list, or 'URL KEY-URL FINGERPRINT' for dnf and zypper; repeatable."
              )  # fmt: skip
@text_option("--mirror", metavar="URL", help="The mirror of Debian or Ubuntu. Default: the one of this machine's apt.")
@text_option("--sign", "sign_key", metavar="KEYID", help="Sign the manifest with this key of your gpg.")
@named_options(*INVENTORY_FIELDS, hosts="Add what these hosts' variables ask for.")
@click.option("--output", "-o", metavar="FILE", required=True, type=click.Path(dir_okay=False, writable=True),
              help="The file to write.")  # fmt: skip
def create(sign_key: str, output: str, **options: Any) -> None:
    """Collect packages with all that they depend on, keys, the driver and gpuprov's agent into one file.

    Needs apt (dnf and createrepo_c for rpm's distributions), gpg, a network, and no root.

    \b
    Examples:
      gpuprov bundle create --distro debian-12 --driver 580.178.04 --kernel 6.1.0-37-amd64 -o bundle.tar
      gpuprov bundle create --distro debian-12 --hosts inventory.ini --sign ops@example.org -o bundle.tar
    """
    require_whole_program("`gpuprov bundle create`")
    folder, is_device = Path(output).resolve().parent, Path(output).exists() and not Path(output).is_file()
    if is_device or not os.access(folder, os.W_OK):
        # Known only after an hour of downloads, else; and root would put a file in the place of /dev/null.
        seen = "it is a device or a pipe" if is_device else f"{folder} is missing, or this user may not write to it"
        raise UsageError(f"the bundle {output} can't be written", seen, "name another file with -o")
    from gpuprov.bundle_create.recipe import Wanted, machine_mirror, make_recipe, mirror_at
    from gpuprov.core.system import System
    from gpuprov.driver.run_files import resolved

    inventory = {name: options.pop(name) for name in INVENTORY_FIELDS}
    changed = _changed(options.pop("driver"), options.pop("driver_file"), options.pop("cuda_file"))
    asked, tables = _specs(inventory, changed)
    system = System()
    system.proxy, system.tables = _proxy(asked), tables
    if problem := system.proxy_problem():
        raise GpuprovError.several((problem,))
    mirror = options.pop("mirror")
    chosen = mirror_at(mirror) if mirror else machine_mirror(system, options["distro"].partition("-")[0])
    wanted = Wanted(**options, mirror=chosen, tables=tables)
    recipe = make_recipe(wanted, tuple(resolved(system, spec, wanted.architecture) for spec in asked))
    contents = _create(system, recipe, sign_key, Path(output).resolve())
    size = Path(output).stat().st_size
    packages = counted(len(contents.manifest.packages), "package")
    say(f"{output}: {counted(size, 'byte')}, {packages}, digest {contents.digest}")


def _changed(driver: str, driver_file: str | None, cuda_file: str | None) -> dict[str, str]:
    """Return the options of the specification that override the inventory."""
    from gpuprov.core.system import System

    changed = {"driver_version": driver} if driver else {}
    # To the CUDA toolkit a plain path would mean a path on the hosts.
    for name, file, scheme in (("driver", driver_file, ""), ("cuda", cuda_file, "file://")):
        if file:
            path = str(Path(file).resolve())
            changed |= {f"{name}_url": scheme + path, f"{name}_sha256": System().sha256(path)}
    return changed


def _specs(inventory: dict[str, Any], changed: dict[str, str]) -> tuple[tuple[HostSpec, ...], Tables]:
    """Return the specifications of the inventory's hosts, or the one of -e, with the options, and their tables.

    Raises GpuprovError (exit code 2) if two of them name different tables.
    """
    from gpuprov.agent.site_tables import checked_tables, for_request
    from gpuprov.fleet.inventory import read_extra_vars, read_inventory
    from gpuprov.protocol.spec import parse_spec, spec_to_json

    sources, origin = inventory.pop("hosts"), "the command line"
    found = read_inventory(sources, **inventory).hosts if sources else (read_extra_vars(inventory["extra_vars"]),)
    specs: dict[HostSpec, None] = {}
    sent: dict[str, Any] = {}
    for values in ({**spec_to_json(target.spec), **changed} for target in found):
        own = for_request(parse_spec(values, origin))
        # A table that a specification names resolves its branch.
        specs[parse_spec(values, origin, checked_tables(own))] = None
        if different := [name for name, table in own.items() if sent.setdefault(name, table) != table]:
            step = f"give all hosts the same gpuprov_{different[0]}, or make a bundle for each: --limit"
            raise UsageError(f"the hosts name different tables, and a bundle has one: {', '.join(different)}", "", step)
    return tuple(specs), checked_tables(sent)


def _proxy(specs: tuple[HostSpec, ...]) -> Proxy:
    """Return the one proxy that the specifications name. Raises GpuprovError (exit code 2) if they name several."""
    from gpuprov.core.proxy import NO_PROXY, Proxy

    found = {Proxy(spec.proxy, spec.no_proxy) for spec in specs if spec.proxy}
    if len(found) > 1:
        seen = ", ".join(sorted(one.address for one in found))
        next_step = "say which one this machine uses: -e gpuprov_proxy=http://HOST:PORT"
        raise UsageError("the hosts name different proxies", seen, next_step)
    return next(iter(found), NO_PROXY)


def _create(system: System, recipe: Recipe, sign_key: str, output: Path) -> Contents:
    from gpuprov.agent.site_tables import UPDATED, user_table
    from gpuprov.bundle.format import read_contents, write_bundle
    from gpuprov.bundle.manifest import SIGNING_KEY
    from gpuprov.bundle_create import create as collecting
    from gpuprov.bundle_create.recipe import Collection
    from gpuprov.fleet.agent_file import build_agent

    part = output.with_name(f"{output.name}.part")
    try:
        with system.temporary_directory("/var/tmp") as work:
            to = Collection(system, recipe, work, _progress)
            own = {f"{name}.json": json.dumps(user_table(name), sort_keys=True).encode() for name in UPDATED}
            own[collecting.AGENT] = build_agent().content
            environment = collecting.user_gpg()
            if sign_key:
                own[SIGNING_KEY] = collecting.export_key(system, sign_key, environment)
                # A key that does not sign, or a wrong passphrase, is known before the downloads.
                collecting.sign(system, b"", sign_key, environment)
            made = collecting.collect(to, own, str(Path("~/.cache/gpuprov/bundle").expanduser()))
            signature = collecting.sign(system, made.to_bytes(), sign_key, environment) if sign_key else b""
            _progress(f"writing {output}")
            with part.open("wb") as file:
                write_bundle(file, made, lambda path: system.open(to.places[path]), signature)
            part.replace(output)
    except GpuprovError as error:  # dnf prints URLs with their passwords
        raise GpuprovError.several(hidden(error.problems, ()), exit_code=error.exit_code) from None
    finally:
        part.unlink(missing_ok=True)
    with output.open("rb") as file:
        return read_contents(file)


def _progress(message: str, done: int = 0, total: int = 0) -> None:
    share = f" {100 * done // total} %" if total else ""
    say(f"{message}{share}", err=True)


@bundle.command()
@_FILE
@click.option("--json", "as_json", is_flag=True, help="The manifest, with the bundle's digest and its signer.")
def show(file: str, as_json: bool) -> None:
    """List what a bundle is for and what it holds. Checks its layout, not the digests.

    \b
    Examples:
      gpuprov bundle show bundle.tar
      gpuprov bundle show bundle.tar --json | jq -r '.packages[].name'
    """
    from gpuprov.bundle.format import read_contents

    with Path(file).open("rb") as opened:
        contents = read_contents(opened)
    if as_json:
        data = json.loads(contents.manifest_bytes)
        say_text(json.dumps({**data, "digest": contents.digest, "signed": bool(contents.signature)}, indent=2))
    else:
        say(*_as_lines(contents))


def _as_lines(contents: Contents) -> list[str]:
    """Return the target and content of a bundle, one line per package."""
    manifest = contents.manifest
    size = sum(one.size for one in manifest.files)
    rows = [
        ("for", manifest.target),
        ("made by", f"gpuprov {manifest.gpuprov}"),
        ("digest", contents.digest),
        ("signed", "yes" if contents.signature else "no"),
        ("driver", manifest.driver_version or "none"),
        ("cuda", f"{manifest.cuda_version}, .run" if manifest.cuda_file else "no .run"),
        ("kernels", ", ".join(_listed(manifest, "kernels")) or "none"),
        ("images", ", ".join(one.reference for one in manifest.images) or "none"),
        ("files", f"{len(manifest.files)}, {size / 2**20:.1f} MiB"),
        ("packages", str(len(manifest.packages))),
    ]
    lines = [f"{name:10}{value}" for name, value in rows]
    asked = {name.partition("=")[0] for name in _listed(manifest, "packages")}
    for one in manifest.packages:
        mark = "  asked for" if one.name in asked else ""
        lines.append(f"  {one.name} {one.version} {one.architecture}{mark}")
    return lines


def _listed(manifest: Manifest, name: str) -> list[str]:
    """Return one of the lists that the bundle was made from; anybody may have written it."""
    found = manifest.inputs.get(name)
    return [str(one) for one in found] if isinstance(found, list) else []


@bundle.command(short_help="Check every digest, and the signature if a key is given.")
@_FILE
@text_option("--bundle-key", metavar="FINGERPRINT", help="The key that must have signed it.")
@AS_JSON
def verify(file: str, bundle_key: str, as_json: bool) -> None:
    """Check every digest, and the signature if a key is given; exit 1 if anything is wrong.

    \b
    Examples:
      gpuprov bundle verify bundle.tar
      gpuprov bundle verify bundle.tar --bundle-key 'AB12 … 90EF'
    """
    from gpuprov.bundle.open import checked
    from gpuprov.fleet.standard_streams import percentage

    try:
        contents = checked(str(Path(file).absolute()), bundle_key, percentage("checking every digest:"))
    except GpuprovError as error:
        if not as_json:
            raise
        say_text(json.dumps({"ok": False, "problems": [vars(problem) for problem in error.problems]}))
        raise SystemExit(int(ExitCode.FAILED)) from None
    count = len(contents.manifest.files)
    if as_json:
        say_text(json.dumps({"ok": True, "digest": contents.digest, "files": count, "signed_by": bundle_key}))
        return
    signed = "signed by the pinned key" if bundle_key else "signature not looked at (--bundle-key)"
    say(f"{file}: whole, {counted(count, 'file')}, for {contents.manifest.target}, {signed}; digest {contents.digest}")
