"""The options of images that are built on a machine without a GPU: a part of HostSpec (spec.py)."""

from __future__ import annotations

from dataclasses import dataclass

from marshmallow import validate

from gpuprov.protocol.spec_fields import TextOrList, choice, flag, maybe, option

# Those that some driver branch of today serves; driver/generations.py knows their device ids.
GENERATIONS = (
    "maxwell", "pascal", "volta", "turing", "ampere", "ada", "hopper", "grace-hopper", "blackwell", "rubin",
)  # fmt: skip
HOST, IMAGE = "host", "image"


@dataclass(frozen=True)
class ImageOptions:
    """Whether a machine's disk becomes an image, and which GPUs its copies will meet."""

    target: str = choice(
        HOST,
        "`host`: this host with its GPUs. `image`: an image, built on a machine without a GPU and booted on others.",
        HOST, IMAGE,
    )  # fmt: skip
    image_gpus: tuple[str, ...] = option(
        TextOrList(validate.OneOf(GENERATIONS, error="is not one of {choices}")),
        (),
        "With `gpuprov_target: image`: the GPUs that its copies will meet, one generation or a list: "
        f"{', '.join(f'`{one}`' for one in GENERATIONS)}. They decide which kernel modules are built, unless "
        "gpuprov_kernel_module_type does.",
    )
    image_nvswitch: bool | None = maybe(
        "With `gpuprov_target: image`: whether its copies will meet NVSwitches (HGX and DGX machines), and so need the "
        "fabric manager.",
    )
    image_force: bool = flag(
        False,
        "With `gpuprov_target: image`: also build on a machine with GPUs, running containers, a display or a "
        "kubelet. Its identity (machine-id, SSH host keys) is removed.",
    )
    image_remove_signing_key: bool = flag(
        False,
        "With `gpuprov_target: image`: remove the private key with which DKMS signs kernel modules. With Secure Boot, "
        "copies then load the modules of the image, but none that DKMS builds later.",
    )
