"""The lab's network: one bridge, addresses behind it, the way out for packages; all of it carries the lab's name."""

from pathlib import Path

from tests.lab.shell import run

_FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")


class Network:
    """Bridge number `number`: 10.213.NUMBER.0/24, this machine at .1.

    Not 172.17/16 (docker's) nor 10.88/16 (podman's): those would cut the hosts off.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.bridge = "gpuprov-lab" if number == 0 else f"gpuprov-lab{number}"
        self.prefix = f"10.213.{number}"
        self.gateway = f"{self.prefix}.1"

    def is_up(self) -> bool:
        """Say whether the bridge exists."""
        return Path(f"/sys/class/net/{self.bridge}").exists()

    def up(self) -> None:
        """Make the bridge, its address and its rules, if they are not there: who made it may have been killed."""
        if not self.is_up():
            run(("ip", "link", "add", self.bridge, "type", "bridge"))
        run(("ip", "address", "replace", f"{self.gateway}/24", "dev", self.bridge))
        run(("ip", "link", "set", self.bridge, "up"))
        if _FORWARDING.read_text().strip() != "1":
            _FORWARDING.write_text("1")
        for rule in self._rules():
            table, *words = rule
            if "yes" not in run(("sh", "-c", f"iptables -t {table} -C {' '.join(words)} 2>/dev/null && echo yes; :")):
                run(("iptables", "-t", table, "-I", *words))

    def down(self) -> None:
        """Remove bridge and rules; nothing happens where there are none."""
        for table, *words in self._rules():
            while "yes" in run(("sh", "-c", f"iptables -t {table} -D {' '.join(words)} 2>/dev/null && echo yes; :")):
                pass
        run(("ip", "link", "delete", self.bridge), check=False)

    def _rules(self) -> tuple[tuple[str, ...], ...]:
        # FORWARD's policy is DROP once dockerd has run on this machine.
        mark = ("-m", "comment", "--comment", self.bridge)
        outside = ("-s", f"{self.prefix}.0/24", "!", "-o", self.bridge)
        return (
            ("nat", "POSTROUTING", *outside, *mark, "-j", "MASQUERADE"),
            ("filter", "FORWARD", "-i", self.bridge, *mark, "-j", "ACCEPT"),
            ("filter", "FORWARD", "-o", self.bridge, *mark, "-j", "ACCEPT"),
        )
