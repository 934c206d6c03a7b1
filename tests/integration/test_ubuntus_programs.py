"""A host with the programs that Ubuntu 26.04 has in place of others: sudo-rs, uutils' coreutils and dracut.

They come from Debian's unstable release, with the Python, docker and apt that it has just now.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import HostRequest
from tests.lab.fixtures import Site, gpuprov_succeeds, running

pytestmark = [pytest.mark.lab, pytest.mark.long, pytest.mark.root]
_PASSWORD = "correct horse"
_OS_RELEASE = Path(__file__).resolve().parents[1] / "data/os-release/ubuntu-26.04"
# Ubuntu, too, keeps the older sudo as sudo.ws.
_PREPARE = """
export DEBIAN_FRONTEND=noninteractive
apt-get -q update && apt-get -q -y --no-install-recommends install rust-coreutils sudo-rs dracut
for name in $(coreutils --list | tr -d '['); do
    for place in /usr/bin/$name /usr/sbin/$name; do
        dpkg -S $place 2>/dev/null | grep -q ^coreutils: || continue
        dpkg-divert --local --rename --divert $place.gnu $place && /usr/bin/coreutils ln -sf coreutils /usr/bin/$name
    done
done
dpkg-divert --local --rename --divert /usr/bin/sudo.ws /usr/bin/sudo && ln -s /usr/lib/cargo/bin/sudo /usr/bin/sudo
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    request = HostRequest("parts", release="sid", user="ops", password=_PASSWORD, archive=True)
    with running({"parts": request}, tmp_path_factory.mktemp("site")) as made:
        host = made.hosts["parts"]
        host.ssh(_PREPARE, timeout=600)
        (host.root / "etc/os-release").write_text(_OS_RELEASE.read_text())
        yield made


@pytest.mark.parametrize(("sudo", "shown"), [("sudo", "sudo-rs"), ("sudo.ws", "Sudo version")])
def test_a_host_is_set_up_and_left_with_either_sudo(site: Site, sudo: str, shown: str) -> None:
    host = site.hosts["parts"]
    assert "uutils" in host.ssh("mv --version").stdout and shown in host.ssh(f"{sudo} --version").stdout
    login = {"ansible_user": "ops", "ansible_become_password": _PASSWORD, "ansible_become_exe": sudo}
    inventory = site.inventory("parts", **login)
    gpuprov_succeeds("install", "--hosts", inventory)
    assert "1 host ready: containers see 2 GPUs (docker)" in gpuprov_succeeds("verify", "--hosts", inventory).stdout
    assert "nothing found wrong" in gpuprov_succeeds("doctor", "--hosts", inventory).stdout
    assert "nothing to change" in gpuprov_succeeds("install", "--hosts", inventory, "--check").stdout
    gpuprov_succeeds("uninstall", "--hosts", inventory)
    assert "gpuprov" not in host.ssh("ls /usr/lib /usr/bin /etc/systemd/system").stdout
