"""Why a host can't have what its specification asks for: rows of options.json whose condition holds. Pure."""

from collections.abc import Iterator, Mapping

from gpuprov.boot.watch import UNWRITABLE, has_login
from gpuprov.core.changes import parent_of
from gpuprov.driver import cuda_toolkit, dcgm, kernel
from gpuprov.driver.run_files import local_path
from gpuprov.driver.source import DriverSource
from gpuprov.driver_run import RunFile
from gpuprov.facts.boot import MPS_PROGRAM
from gpuprov.facts.host import HostFacts
from gpuprov.facts.interpreter import NAMES, packages_of_pythons
from gpuprov.facts.leftovers import PLUGIN
from gpuprov.facts.watch import OFF
from gpuprov.protocol.errors import Problem
from gpuprov.protocol.models import model_of, name_of
from gpuprov.protocol.secrets import masked
from gpuprov.protocol.spec import HostSpec, spec_to_json
from gpuprov.protocol.tables import packaged

# Generations used in machines with NVSwitches (HGX and DGX A100, H100, B200, …).
_WITH_SWITCHES = frozenset(("volta", "ampere", "hopper", "blackwell", "rubin"))


def refusals(driver: DriverSource) -> Iterator[Problem]:
    """Yield a problem for each row whose option is asked for and whose condition holds."""
    facts, spec = driver.facts, driver.spec
    holds = {**_of_driver(driver), **_of_modules(driver), **_of_images(driver)}
    holds |= {**_of_cuda(facts, spec), **_of_docker(facts, spec), **_of_host(facts, spec)}
    commands = facts.package_manager.commands
    pythons = packages_of_pythons(facts.packages.installed)
    install = f"{commands.install} {facts.distribution.pythons[0]}"
    words = {
        "row": facts.distribution, "commands": commands, "facts": facts, "spec": spec,
        "get_python": f"{commands.reinstall} {' '.join(pythons)}" if pythons else install,
    }  # fmt: skip
    for row in packaged("options")["refusals"]:
        if getattr(spec, row.get("option", "driver")) and (evidence := holds[row["when"]]):
            texts = (row["what"], row.get("seen", "{evidence}"), row["next"])
            yield Problem(*(text.format(evidence=evidence, **words) for text in texts))


def _of_driver(driver: DriverSource) -> Mapping[str, object]:
    """Return each condition of the driver and its GPUs with its evidence; not true if it does not hold."""
    facts, spec = driver.facts, driver.spec
    version = driver.coming_version or facts.driver_installed_version or spec.driver_version
    models = ((one, model_of(one, facts.tables)) for one in facts.gpu_device_ids)
    others = (one for one, model in models if not (model and model.coherent_memory))
    is_grid = spec.driver == "preinstalled" or spec.driver_url or spec.driver_mirror or facts.bundle
    is_packaged = spec.driver in ("packages", "distribution")
    # A .run file and NVIDIA's packages have it, and Ubuntu's; Debian's is a package of its own.
    without_mps = spec.driver == "preinstalled" or (spec.driver == "distribution" and facts.os.id == "debian")
    mps_comes = facts.boot.mps or not without_mps or "nvidia-cuda-mps" in spec.packages
    return {
        "no MPS program": "" if mps_comes else f"there is no {MPS_PROGRAM}",
        "container": facts.kernel.container,
        "virtual": facts.virtual_gpu,
        "no GRID driver": "" if is_grid else facts.virtual_gpu or ("" if spec.vgpu is None else "gpuprov_vgpu is set"),
        "not coherent": next((name_of(one, facts.tables) or one for one in others if facts.image is None), ""),
        "before 580": f"driver {version}" if version and int(version.partition(".")[0]) < 580 else "",
        "no RDMA device": "rdma" in spec.gpudirect and not facts.rdma_devices,
        "no driver": spec.driver == "preinstalled" and not facts.driver_installed_version,
        "precompiled, not from packages": spec.kernel_modules == "precompiled" and not is_packaged,
        "no DCGM": not spec.dcgm,
        "unknown packages of DCGM": not dcgm.wanted_packages(driver),
    }


def _of_cuda(facts: HostFacts, spec: HostSpec) -> Mapping[str, object]:
    installs, is_remote = cuda_toolkit.installs(facts, spec), local_path(spec.cuda_url) != spec.cuda_url
    manifest = facts.bundle.manifest if facts.bundle is not None and installs else None
    has = f"it holds {manifest.cuda_version or 'none'}" if manifest is not None else ""
    other = ""
    if manifest is not None and cuda_toolkit.takes_from_bundle(spec):
        held = manifest.file(manifest.cuda_file).sha256
        seen = f"{manifest.cuda_file} has SHA-256 {held}, gpuprov_cuda_sha256 is {spec.cuda_sha256}"
        other = seen if held != spec.cuda_sha256 else ""
    return {
        "no version of CUDA": not spec.cuda,
        "untrusted CUDA": installs and is_remote and not spec.cuda_sha256,
        "a folder for CUDA": bool(spec.cuda and spec.cuda_url) and facts.cuda.link == cuda_toolkit.LINK,
        "CUDA from packages": installs and cuda_toolkit.package_of(spec) in facts.packages.installed,
        # With a bundle, nothing else is fetched.
        "no CUDA in the bundle": has and is_remote and f"{has}, asked for is {spec.cuda} from {masked(spec.cuda_url)}",
        "other CUDA in the bundle": other,
    }


def _of_modules(driver: DriverSource) -> Mapping[str, object]:
    facts, spec, version = driver.facts, driver.spec, driver.spec.driver_version
    no_release = "gpuprov_driver_url is set and gpuprov_driver_version is not" if spec.driver_url else (
        "no release of the driver is known here")  # fmt: skip
    stops = facts.running is not None and facts.running.display_manager and spec.stop_display_manager
    builds = facts.kernel.takes_modules and driver.brings_modules and not driver.is_installed
    url = driver.url if isinstance(driver, RunFile) and driver.installs and not driver.sha256 else ""
    lacks_dkms = facts.bundle is None and kernel.needs_dkms(driver) and not kernel.dkms_packages(driver)
    return {
        "no release": driver.has_installer and not version and no_release,
        "unknown branch": driver.has_installer and version.isdecimal() and ", ".join(facts.tables.branches()),
        ".run over packages": driver.has_installer and "." in version and facts.driver_packaged,
        "X server": driver.has_installer and builds and not stops and "; ".join(facts.displays),
        "untrusted download": url.startswith("http:") and not facts.driver_packaged and "." in version and masked(url),
        "DKMS refused": lacks_dkms and not spec.epel and driver.depends_on_dkms,
        "key of DKMS not known": lacks_dkms and spec.epel and (driver.depends_on_dkms or spec.epel_repository),
    }


def _of_images(driver: DriverSource) -> Mapping[str, object]:
    spec, image = driver.spec, driver.facts.image
    if image is None:
        return dict.fromkeys(("image", "no kernel", "kind of modules not known", "switches not known", "watch"))
    is_unknown = spec.kernel_module_type == "auto" and not spec.image_gpus
    may_have_switches = spec.image_nvswitch is None and _WITH_SWITCHES & {*spec.image_gpus}
    return {
        "image": "gpuprov_target: image",
        "no kernel": driver.installs_modules and not image.kernels,
        "kind of modules not known": driver.installs_modules and is_unknown,
        "switches not known": spec.fabric_manager == "auto" and may_have_switches and ", ".join(spec.image_gpus),
        "watch": spec.watch != OFF,
    }


def _of_host(facts: HostFacts, spec: HostSpec) -> Mapping[str, object]:
    watch, folder, python = facts.watch, parent_of(spec.watch_metrics), facts.interpreter
    watches = spec.watch != OFF and facts.image is None
    named = [name for name, value in spec_to_json(spec).items() if name != "proxy" and has_login(value)]
    named += ["driver_releases"] if has_login(dict(watch.extra)) else []
    lacks_program = watches and not (watch.agent or watch.program)
    return {
        "no Python": not python.path and ("\n".join(python.refused) or f"there is no {', '.join(NAMES)} in /usr/bin"),
        "no folder for metrics": watches and folder not in watch.folders and folder,
        "closed folder for metrics": watches and spec.watch_metrics.startswith(UNWRITABLE) and folder,
        "no program to watch": lacks_program and (watch.agent_path or "no file of the agent is named"),
        "login to store": watches and ", ".join(f"gpuprov_{name}" for name in named),
    }


def _of_docker(facts: HostFacts, spec: HostSpec) -> Mapping[str, object]:
    row, docker, left = facts.distribution, facts.docker, facts.leftovers
    others = "no engine but docker's own" if docker.installed else "neither podman, containerd nor crio"
    lacking = "" if docker.installed else spec.docker
    is_stopped = spec.migrate_nvidia_docker and spec.docker != "none" and docker.installed and not docker.active
    traces = (*left.unseen, *left.files, *((PLUGIN,) if PLUGIN in facts.packages.installed else ()))
    return {
        "no package manager": facts.packages.manager != row.package_manager,
        "no engine": spec.docker == "none" and not (facts.engines or facts.kubernetes) and others,
        "no docker": lacking == "preinstalled",
        "no Docker repository": lacking == "docker-ce" and not row.docker_repository,
        "no docker of its own": lacking == "distribution" and not row.docker_packages,
        # Only docker knows which containers use a volume.
        "stopped docker": is_stopped and not docker.is_unreachable and ", ".join(traces),
    }
