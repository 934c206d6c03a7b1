"""Holds of packages under dnf and zypper: what the lists say, when a hold is set or taken off, and the way back."""

from pathlib import Path

import pytest

from gpuprov.packages import rpm_locks
from gpuprov.packages.dnf import DNF
from gpuprov.packages.interface import HELD_LIST, LockFacts, PackageFacts
from gpuprov.packages.rpm import RpmManager
from gpuprov.packages.rpm_locks import LOCK_TOOLS, HoldRpmPackages, edited, gather_locks, held_names
from gpuprov.packages.zypper import ZYPPER
from tests.unit.refused import refused
from tests.unit.scripted import Answer, Scripted

NAME, EVR = "nvidia-container-toolkit", "0:1.17.8-1"
DRIVER = ("libnvidia-ml", "nvidia-driver")
LIST = "/etc/dnf/plugins/versionlock.list"
# As dnf-plugins-core 4.3 and zypper 1.14 write them; the others by dnf5-versionlock(8) and yum-versionlock(1).
FOREIGN = {
    "dnf": "\n# Added lock on Thu Nov 19 10:00:00 2026\nbash-0:5.1.8-9.el9.*\nvim\n!tmux-0:3.2a-5.el9.*\n",
    "yum": "0:bash-4.2.46-35.el7_9.*\n# a comment\n!0:tmux-1.8-4.el7.*\n",
    "dnf5": 'version = "1.0"\n\n# ours since May\n[[packages]]\nname = "bash"\n[[packages.conditions]]\nkey = "evr"\n'
    'comparator = "="\nvalue = "0:5.2.15-5.fc39"\n',
    "zypper": "\ntype: package\nmatch_type: glob\ncase_sensitive: on\nsolvable_name: bash\n\n",
}
OURS = {
    "dnf": f"{NAME}-{EVR}.*\n",
    "yum": f"0:{NAME}-1.17.8-1.*\n",
    "dnf5": f'name = "{NAME}"\ncomment = "held by gpuprov"\n[[packages.conditions]]\nkey = "evr"\ncomparator = "="\n'
    f'value = "{EVR}"\n',
    "zypper": f"type: package\nmatch_type: glob\ncase_sensitive: on\nsolvable_name: {NAME}\n",
}


def test_what_others_hold_is_read() -> None:
    assert {tool: held_names(tool, FOREIGN[tool]) for tool in LOCK_TOOLS} == {
        "dnf": {"bash", "vim"}, "yum": {"bash"}, "dnf5": {"bash"}, "zypper": {"bash"},
    }  # fmt: skip


@pytest.mark.parametrize("tool", LOCK_TOOLS)
@pytest.mark.parametrize("others", [True, False])
def test_a_hold_is_set_moved_and_taken_off_and_nothing_else_changes(tool: str, others: bool) -> None:
    before = FOREIGN[tool] if others else ""
    held = edited(tool, before, {NAME: EVR}, ())
    assert OURS[tool] in held and held.startswith(before)
    assert held_names(tool, held) == held_names(tool, before) | {NAME}
    assert edited(tool, held, {NAME: EVR}, ()) == held
    moved = edited(tool, held, {NAME: "0:1.18.0-1"}, ())
    assert held_names(tool, moved) == held_names(tool, held)
    assert tool == "zypper" or ("1.18.0" in moved and "1.17.8" not in moved)
    assert edited(tool, held, {}, (NAME,)) == (before or LOCK_TOOLS[tool].head)


def test_an_entry_begins_a_line_of_its_own() -> None:
    assert edited("dnf", "vim", {"b": "0:1-1", "a": "0:2-1"}, ()) == "vim\na-0:2-1.*\nb-0:1-1.*\n"
    assert edited("dnf", "tmux\nvim", {}, ("tmux",)) == "vim"
    assert edited("dnf5", "", {}, ("a",)) == ""


@pytest.mark.parametrize("tool", ["dnf", "yum"])
def test_a_name_with_dashes_and_a_version_with_an_epoch(tool: str) -> None:
    text = edited(tool, "", {"a-b-c": "2:1.0~rc1-3.el9"}, ())
    assert held_names(tool, text) == {"a-b-c"}
    assert "2:" in text


@pytest.mark.parametrize(
    ("held", "held_here", "wanted", "lacking", "changes"),
    [
        ((), (), ("a",), ("a",), ["hold a at this version"]), (("a",), ("a",), ("a",), (), []),
        # A newer version is asked for: the hold goes for the installation, and comes back with the new version.
        (("a",), ("a",), ("a",), ("a",), ["no longer hold a", "hold a at this version"]),
        # Somebody else's hold is in the way of the version that is asked for; what is not asked for is left.
        (("a", "b"), (), ("a",), ("a",), ["no longer hold a", "hold a at this version"]),
        (("b",), (), (), (), []),
        # No longer asked for, and held by gpuprov.
        (("a",), ("a",), (), (), ["no longer hold a"]),
        # gpuprov_hold_pinned: false.
        (("a",), ("a",), (), ("a",), ["no longer hold a"]),
        # None: no holds are asked for. The driver's go together where one of its packages changes.
        (("a",), ("a",), None, ("a",), []),
        ((*DRIVER, "a"), (*DRIVER, "a"), None, ("a",), []),
        ((*DRIVER, "a"), (*DRIVER, "a"), None, (DRIVER[1], "a"), [f"no longer hold {', '.join(DRIVER)}"]),
        ((*DRIVER, "a"), (*DRIVER, "a"), ("a",), (DRIVER[1],), [f"no longer hold {', '.join(DRIVER)}"]),
        (DRIVER, DRIVER, ("a",), ("a",), ["hold a at this version"]),
        (DRIVER, (), (), (DRIVER[0],), [f"no longer hold {DRIVER[0]}"]),
    ],
)  # fmt: skip
def test_when_a_hold_is_taken_off_and_set(
    held: tuple[str, ...], held_here: tuple[str, ...], wanted: tuple[str, ...] | None, lacking: tuple[str, ...],
    changes: list[str],
) -> None:  # fmt: skip
    facts = LockFacts("zypper", "/etc/zypp/locks", frozenset(held), frozenset(held_here))
    before, behind = rpm_locks.plan(facts, wanted, lacking)
    assert [change.summary() for change in (*before, *behind)] == changes
    assert {(change.tool, change.path) for change in (*before, *behind)} <= {("zypper", "/etc/zypp/locks")}


@pytest.mark.parametrize(
    ("held", "held_here", "hold", "coming", "names", "release"),
    [
        ((), (), True, False, DRIVER, ()),
        ((DRIVER[0],), (), True, False, (DRIVER[1],), ()),
        (DRIVER, DRIVER, True, False, None, None),
        # What is yet to come is held with the others.
        (DRIVER, DRIVER, True, True, (), ()),
        (DRIVER, DRIVER, False, False, (), DRIVER),
        (DRIVER, (), False, False, None, None),
    ],
)
def test_when_the_driver_is_held(
    held: tuple[str, ...], held_here: tuple[str, ...], hold: bool, coming: bool,
    names: tuple[str, ...] | None, release: tuple[str, ...] | None,
) -> None:  # fmt: skip
    locks = LockFacts("dnf", LIST, frozenset(held), frozenset(held_here))
    facts = PackageFacts("dnf", dict.fromkeys((*DRIVER, NAME), "1"), locks=locks)
    expected = HoldRpmPackages("dnf", LIST, names or (), release or (), driver=hold)
    assert rpm_locks.plan_driver(facts, hold, coming) == (() if names is None else (expected,))
    assert rpm_locks.plan_driver(PackageFacts("dnf", facts.installed), hold, coming) == (), "nothing holds packages"


class Host(Scripted):
    """A host that says which version of the package is installed; it has a driver, too."""

    version = EVR

    def answer(self, argv: tuple[str, ...]) -> Answer:
        assert argv[0] == "rpm" and argv[2] == "--queryformat"
        if argv[1] == "-qa":
            return f"bash 0:5-1\n{NAME} {self.version}\n" + "".join(f"{name} 3:580-1\n" for name in DRIVER)
        assert argv[1] == "-q" and argv[4:]
        lines = [f"{NAME} {self.version}" if name == NAME else f"package {name} is not installed" for name in argv[4:]]
        return "".join(f"{line}\n" for line in lines)


def make_host(root: Path, **files: str) -> Host:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return Host(str(root))


def tell(message: str, done: int, total: int) -> None:
    raise AssertionError("nothing takes long here")


def test_applied_again_and_undone(tmp_path: Path) -> None:
    host = make_host(tmp_path, **{LIST[1:]: FOREIGN["dnf"], "var/lib/gpuprov/held": "docker-ce\n"})
    change = HoldRpmPackages("dnf", LIST, (NAME,), ("vim",))
    assert f"+{NAME}-{EVR}.*" in change.diff(host) and "-vim" in change.diff(host)
    before = change.capture(host)
    outcome = change.apply(host, tell)
    assert held_names("dnf", host.read_text(LIST) or "") == {"bash", NAME}
    assert host.read_text(HELD_LIST) == f"docker-ce\n{NAME}\n"
    assert change.diff(host) == ""
    HoldRpmPackages.undo(host, before, outcome)
    assert host.read_text(LIST) == FOREIGN["dnf"]
    assert host.read_text(HELD_LIST) == "docker-ce\n"


@pytest.mark.parametrize(
    ("text", "added"), [("", [*DRIVER]), (f"{DRIVER[0]}-3:580-1.*\n", [DRIVER[1]]), ("bash\n", [*DRIVER])]
)
def test_the_drivers_hold_is_of_what_is_installed_by_then(tmp_path: Path, text: str, added: list[str]) -> None:
    host = make_host(tmp_path, **({LIST[1:]: text} if text else {}))
    change = HoldRpmPackages("dnf", LIST, (), driver=True)
    assert change.capture(host)["names"] == added
    change.apply(host, tell)
    assert host.read_text(LIST) == text + "".join(f"{name}-3:580-1.*\n" for name in added)


@pytest.mark.parametrize("driver", [True, False])
def test_no_hold_counts_as_set_if_rpm_does_not_tell_what_is_installed(tmp_path: Path, driver: bool) -> None:
    host = make_host(tmp_path)
    host.answer = lambda argv: (137, "")  # type: ignore[method-assign]
    change = HoldRpmPackages("dnf", LIST, () if driver else (NAME,), driver=driver)
    problem = refused(change.apply, host, tell)
    assert problem.what == "rpm does not tell which versions are installed" and not host.exists(LIST)


def test_undo_of_a_removed_list_restores_its_own_entries(tmp_path: Path) -> None:
    host = make_host(tmp_path, **{LIST[1:]: "tmux\nbash\nvim\n"})
    change = HoldRpmPackages("dnf", LIST, (), ("vim", "tmux"))
    before, outcome = change.capture(host), change.apply(host, tell)
    assert host.read_text(LIST) == "bash\n" and host.asked == []
    host.remove(LIST)
    HoldRpmPackages.undo(host, before, outcome)
    assert host.read_text(LIST) == "tmux\nvim\n"


@pytest.mark.parametrize("line", [b"tmux\n", b"tmux"])
def test_what_somebody_wrote_into_the_list_since_then_survives_the_undo(tmp_path: Path, line: bytes) -> None:
    host = make_host(tmp_path, **{LIST[1:]: "vim\n"})
    change = HoldRpmPackages("dnf", LIST, (NAME,), ("vim",))
    before, outcome = change.capture(host), change.apply(host, tell)
    host.append(LIST, line)
    HoldRpmPackages.undo(host, before, outcome)
    assert held_names("dnf", host.read_text(LIST) or "") == {"vim", "tmux"}


def test_a_list_that_was_not_there_is_gone_again(tmp_path: Path) -> None:
    host = make_host(tmp_path)
    change = HoldRpmPackages("zypper", "/etc/zypp/locks", (NAME, "not-installed"))
    before, outcome = change.capture(host), change.apply(host, tell)
    assert host.read_text("/etc/zypp/locks") == edited("zypper", "", {NAME: EVR}, ())
    HoldRpmPackages.undo(host, before, outcome)
    assert not host.exists("/etc")


@pytest.mark.parametrize(
    ("manager", "program", "files", "found"),
    [
        (DNF, "dnf-3", {}, ("dnf", LIST, ("python3-dnf-plugin-versionlock",))),
        (DNF, "dnf-3", {"etc/dnf/plugins/versionlock.conf": "[main]\nenabled = 1\n"}, ("dnf", LIST, ())),
        (DNF, "dnf-3", {"etc/dnf/plugins/versionlock.conf": "[main]\nlocklist = /srv/locks\n"},
         ("dnf", "/srv/locks", ())),
        (DNF, "dnf5", {}, ("dnf5", "/etc/dnf/versionlock.toml", ())),
        (ZYPPER, "zypper", {}, ("zypper", "/etc/zypp/locks", ())),
    ],
)  # fmt: skip
def test_which_tool_holds_packages_here(
    tmp_path: Path, manager: RpmManager, program: str, files: dict[str, str], found: tuple[str, str, tuple[str, ...]]
) -> None:
    host = make_host(tmp_path, **files, **{f"usr/bin/{program}": "#!/bin/sh\n"})
    host.path(f"/usr/bin/{program}").chmod(0o755)
    if program != manager.name:
        host.path(f"/usr/bin/{manager.name}").symlink_to(program)
    facts = gather_locks(host, manager.hold_tool(host))
    assert (facts.tool, facts.path, facts.missing_plugin) == found
    assert (facts.held, facts.held_here) == (frozenset(), frozenset())
    if not facts.missing_plugin:
        host.make_directory(facts.path.rpartition("/")[0])
        host.write(facts.path, edited(facts.tool, FOREIGN[facts.tool], {NAME: EVR}, ()).encode())
        host.make_directory("/var/lib/gpuprov")
        host.write(HELD_LIST, f"{NAME}\ngone\n".encode())
        facts = gather_locks(host, manager.hold_tool(host))
        assert {NAME, "bash"} <= facts.held and facts.held_here == {NAME}
