"""Which server keys are accepted: known ones; new ones where the user allows it; changed and revoked ones never."""

import base64
import os
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import paramiko
import pytest

from gpuprov.fleet.host_keys import (
    ACCEPT_OPTION,
    SYSTEM_FILES,
    USER_FILES,
    KeyCheck,
    KnownHosts,
    KnownKey,
    fingerprint,
    known_hosts_name,
    preferred_key_types,
    revoked_by,
)
from gpuprov.protocol.errors import ExitCode, GpuprovError
from tests.unit.refused import refused

NAME = "lab-a"
FIRST, SECOND = paramiko.ECDSAKey.generate(), paramiko.ECDSAKey.generate()


def line(key: paramiko.PKey, names: str = NAME, marker: str = "") -> str:
    return f"{marker}{names} {key.get_name()} {key.get_base64()}\n"


def matching_keys(text: str, name: str, path: str = "") -> tuple[KnownKey, ...]:
    """Return the keys that KnownHosts finds for `name`, with `path` as the file's name."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "known_hosts"
        file.write_text(text, "utf-8")
        found = KnownHosts((str(file),), ()).keys(name)
        return tuple(replace(key, place=key.place.replace(str(file), path)) for key in found)


@pytest.fixture
def user(tmp_path: Path) -> Path:
    return tmp_path / "known_hosts"


@pytest.fixture
def system(tmp_path: Path) -> Path:
    return tmp_path / "ssh_known_hosts"


def check(user: Path, system: Path, *, accept_new: bool) -> KeyCheck:
    return KeyCheck(KnownHosts((str(user),), (str(system),)), NAME, accept_new=accept_new)


def refusal(offered: paramiko.PKey, user: Path, system: Path, *, accept_new: bool) -> tuple[str, str, str]:
    with pytest.raises(GpuprovError) as caught:
        check(user, system, accept_new=accept_new).missing_host_key(None, "another name", offered)
    problem = caught.value.problems[0]
    assert caught.value.exit_code == ExitCode.UNREACHABLE
    return problem.what, problem.evidence, problem.next_step


@pytest.mark.parametrize("accept_new", [False, True])
def test_a_changed_key_is_refused_whatever_the_user_allows(user: Path, system: Path, accept_new: bool) -> None:
    user.write_text(line(FIRST))
    what, evidence, next_step = refusal(SECOND, user, system, accept_new=accept_new)
    assert what.startswith(f"{NAME}: host key changed")
    assert f"{SECOND.get_name()} {fingerprint(SECOND.asbytes())}" in evidence
    assert f"{user}:1 has {FIRST.get_name()} {fingerprint(FIRST.asbytes())}" in evidence
    assert f"ssh-keygen -R '{NAME}' -f {user}" in next_step and ACCEPT_OPTION in next_step
    assert user.read_text() == line(FIRST)


@pytest.mark.parametrize("accept_new", [False, True])
def test_a_key_that_the_system_knows_another_of_is_refused_too(user: Path, system: Path, accept_new: bool) -> None:
    system.write_text(line(FIRST))
    _, evidence, next_step = refusal(SECOND, user, system, accept_new=accept_new)
    assert f"{system}:1 has" in evidence and f"-f {system}" in next_step
    assert not user.exists()


@pytest.mark.parametrize("accept_new", [False, True])
@pytest.mark.parametrize("revoked_in", ["user", "system"])
def test_revoked_key_is_refused_even_if_known(user: Path, system: Path, revoked_in: str, accept_new: bool) -> None:
    user.write_text(line(FIRST))
    place = user if revoked_in == "user" else system
    with place.open("a") as file:
        file.write(line(FIRST, "*", "@revoked "))
    what, evidence, next_step = refusal(FIRST, user, system, accept_new=accept_new)
    assert what.startswith(f"{NAME}: host key revoked")
    # ssh-keygen -R keeps such lines.
    assert "ssh-keygen -A" in next_step and "-R" not in next_step
    shown = f"{FIRST.get_name()} {fingerprint(FIRST.asbytes())}"
    second = f"{place}:{2 if revoked_in == 'user' else 1}"
    assert evidence.splitlines()[-3:] == [f"it offers {shown}", f"{user}:1 has {shown}", f"{second} has {shown}"]


def test_a_key_that_is_revoked_for_all_hosts_makes_none_of_them_a_changed_one(user: Path, system: Path) -> None:
    system.write_text(line(FIRST, "*", "@revoked "))
    assert "unknown" in refusal(SECOND, user, system, accept_new=False)[0]
    check(user, system, accept_new=True).missing_host_key(None, "", SECOND)
    assert user.read_text() == line(SECOND)
    assert f"-f {user}," in refusal(paramiko.ECDSAKey.generate(), user, system, accept_new=True)[2]


def test_an_authority_for_certificates_is_named_and_is_no_key_of_the_host(user: Path, system: Path) -> None:
    user.write_text("# names\n" + line(FIRST, "lab-*", "@cert-authority ") + line(FIRST, "other", "@cert-authority "))
    for offered in (FIRST, SECOND):
        what, evidence, _ = refusal(offered, user, system, accept_new=False)
        assert "is unknown" in what
        assert f"its certificate is missing: {user}:2 names who may sign it" in evidence
        assert f"{user}:3" not in evidence
    check(user, system, accept_new=True).missing_host_key(None, "", SECOND)
    assert [key.key for key in KnownHosts((str(user),), ()).keys(NAME)] == [SECOND.asbytes()]


def test_another_key_beside_a_revoked_one_is_accepted_if_it_is_known(user: Path, system: Path) -> None:
    user.write_text(line(FIRST, marker="@revoked ") + line(SECOND))
    check(user, system, accept_new=False).missing_host_key(None, "", SECOND)


@pytest.mark.parametrize("accept_new", [False, True])
def test_a_known_key_is_accepted_and_nothing_is_written(user: Path, system: Path, accept_new: bool) -> None:
    user.write_text(line(SECOND, "lab-b"))
    system.write_text(line(SECOND) + line(FIRST))
    check(user, system, accept_new=accept_new).missing_host_key(None, "another name", FIRST)
    assert user.read_text() == line(SECOND, "lab-b")


def test_an_unknown_key_is_refused_unless_the_user_accepts_new_ones(user: Path, system: Path) -> None:
    what, evidence, next_step = refusal(FIRST, user, system, accept_new=False)
    assert what == f"the host key of {NAME} is unknown"
    assert f"it offers {FIRST.get_name()} {fingerprint(FIRST.asbytes())}" in evidence
    assert f"{user}, {system}" in evidence
    assert ACCEPT_OPTION in next_step and str(user) in next_step
    assert not user.exists()
    check(user, system, accept_new=True).missing_host_key(None, "another name", FIRST)
    assert user.read_text() == line(FIRST)
    check(user, system, accept_new=False).missing_host_key(None, "another name", FIRST)
    refusal(SECOND, user, system, accept_new=True)


def test_fingerprints_and_stored_keys_are_as_openssh_has_them(tmp_path: Path) -> None:
    known = KnownHosts((str(tmp_path / "ssh/known_hosts"),), ())
    known.store("[lab-a]:2222", FIRST.get_name(), FIRST.asbytes())
    path = tmp_path / "ssh/known_hosts"
    shown = subprocess.run(("ssh-keygen", "-l", "-F", "[lab-a]:2222", "-f", path), capture_output=True, text=True)
    assert fingerprint(FIRST.asbytes()) in shown.stdout
    subprocess.run(("ssh-keygen", "-q", "-H", "-f", path), check=True, capture_output=True)
    assert path.read_text().startswith("|1|")
    (found,) = known.keys("[lab-a]:2222")
    assert (found.key, found.place, found.revoked) == (FIRST.asbytes(), f"{path}:1", False)
    assert known.keys("lab-a") == known.keys("[lab-b]:2222") == ()


def test_a_hashed_authority_is_found_whatever_the_port_and_the_case_of_the_name(user: Path) -> None:
    for name in (NAME, "lab-b"):
        KnownHosts((str(user),), ()).store(name, FIRST.get_name(), FIRST.asbytes())
    subprocess.run(("ssh-keygen", "-q", "-H", "-f", user), check=True, capture_output=True)
    # ssh-keygen -H leaves lines with a marker as they are.
    user.write_text("".join(f"@cert-authority {one}\n" for one in user.read_text().splitlines()))
    for port in (22, 2222):
        found = KeyCheck(KnownHosts((str(user),), ()), "Lab-A", accept_new=False, port=port).authorities()
        assert [key.place for key in found] == [f"{user}:1"]


def test_a_file_whose_name_has_a_colon_is_named_whole(tmp_path: Path) -> None:
    user = tmp_path / "of:me"
    user.write_text(line(FIRST))
    assert refusal(SECOND, user, tmp_path / "none", accept_new=True)[2].count(f" -f {user},") == 1


@pytest.mark.parametrize("ending", ["\n", "", " caf\xe9", " caf\xe9\n"])
def test_each_stored_key_has_a_line_of_its_own_and_no_line_is_empty(user: Path, ending: str) -> None:
    known = KnownHosts((str(user),), ())
    known.store(NAME, FIRST.get_name(), FIRST.asbytes())
    before = user.read_text().rstrip("\n") + ending
    user.write_text(before, "latin-1")
    known.store("lab-b", SECOND.get_name(), SECOND.asbytes())
    assert user.read_text("latin-1") == before.rstrip("\n") + "\n" + line(SECOND, "lab-b")


def test_only_the_user_may_read_what_is_stored(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        KnownHosts((str(tmp_path / "a/b/known_hosts"),), ()).store(NAME, "ssh-rsa", b"key")
    finally:
        os.umask(mask)
    assert (tmp_path / "a/b/known_hosts").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "a/b").stat().st_mode & 0o777 == 0o700
    # What the user gave it, it keeps.
    (tmp_path / "a/b/known_hosts").chmod(0o644)
    KnownHosts((str(tmp_path / "a/b/known_hosts"),), ()).store(NAME, "ssh-rsa", b"another")
    assert (tmp_path / "a/b/known_hosts").stat().st_mode & 0o777 == 0o644


def test_the_users_files_are_below_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert KnownHosts() == KnownHosts(USER_FILES, SYSTEM_FILES)
    KnownHosts(system_files=()).store(NAME, FIRST.get_name(), FIRST.asbytes())
    assert (tmp_path / ".ssh/known_hosts").read_text() == line(FIRST)
    (tmp_path / ".ssh/known_hosts2").write_text(line(SECOND))
    assert [key.key for key in KnownHosts(system_files=()).keys(NAME)] == [FIRST.asbytes(), SECOND.asbytes()]


def test_a_key_is_refused_if_it_cannot_be_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "nonexistent"))
    with pytest.raises(GpuprovError, match=f"host key of {NAME} can't be stored") as caught:
        KeyCheck(KnownHosts(system_files=()), NAME, accept_new=True).missing_host_key(None, "", FIRST)
    assert "no home directory" in caught.value.problems[0].evidence
    assert not (tmp_path / "nonexistent").exists()


def test_a_file_that_changed_since_is_read_again(user: Path, system: Path) -> None:
    known = KnownHosts((str(user),), ())
    assert known.keys(NAME) == ()
    for number, text in enumerate((line(FIRST), line(SECOND), line(SECOND, "lab-b"))):
        user.write_text(text)
        os.utime(user, (number, number))
        assert [key.key for key in known.keys(NAME)] == [
            base64.b64decode(text.split()[2]) for _ in range(NAME in text.split())
        ]


TWO = line(FIRST, "lab-b,lab-a") + line(SECOND, "lab-?") + line(FIRST, "lab-c") + line(SECOND, "lab-a,!lab-x")


def test_keys_come_in_the_order_of_the_file_with_their_lines() -> None:
    assert [(key.place, key.key) for key in matching_keys(TWO, "lab-a", "/k")] == [
        ("/k:1", FIRST.asbytes()), ("/k:2", SECOND.asbytes()), ("/k:4", SECOND.asbytes()),
    ]  # fmt: skip
    assert [key.place for key in matching_keys(TWO, "lab-x", "/k")] == ["/k:2"]
    assert [key.place for key in matching_keys(TWO, "lab-c")] == [":2", ":3"]


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("x,lab-a,10.0.0.1 ssh-rsa AAAA", 1),
        ("LAB-A ssh-rsa AAAA", 1),
        ("lab-b ssh-rsa AAAA", 0),
        ("lab-ab ssh-rsa AAAA", 0),
        ("[lab-a]:2222 ssh-rsa AAAA", 0),
        ("*.example,lab-? ssh-rsa AAAA", 1),
        ("lab-*,!lab-a ssh-rsa AAAA", 0),
        ("|1|AAAA|AAAA ssh-rsa AAAA", 0),
        ("|1|AAAA ssh-rsa AAAA", 0),
        ("@cert-authority lab-a ssh-rsa AAAA", 0),
        ("lab-a ssh-rsa AAA!", 0),
        ("lab-a ssh-rsa", 0),
        ("|1|AAAA=|AAAA ssh-rsa AAAA", 0),
        ("lab-a,|1| ssh-rsa AAAA", 1),
        ("|1|A|AAAA ssh-rsa AAAA", 0),
        ("|1|AAAA|A ssh-rsa AAAA", 0),
        ("@revoked", 0),
        ("@revoked lab-a ssh-rsa", 0),
        ("@unheard-of lab-a ssh-rsa AAAA", 0),
        ("#lab-a ssh-rsa AAAA", 0),
        ("lab-a ssh-rsa AAAA a comment", 1),
        ("lab-a,lab-a ssh-rsa AAAA", 1),
        ("*,!other ssh-rsa AAAA", 1),
        ("!lab-a ssh-rsa AAAA", 0),
        ("lab-[a] ssh-rsa AAAA", 0),
        ("lab-a ssh-rsa A\nlab-a ssh-rsa AAAA", 1),
        ("x y\nlab-a ssh-rsa AAAA", 1),
        ("# x\n@cert-authority lab-a ssh-rsa AAAA\nlab-a ssh-rsa AAAA", 1),
        # A comment may be of another host: only \n ends its line, for ssh too.
        *((f"x ssh-rsa AAAA root{sign}lab-a ssh-rsa AAAA", 0) for sign in "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"),
        ("\flab-a ssh-rsa AAAA", 0),
        ("lab-a\xa0ssh-rsa\xa0AAAA", 0),
        (" \tlab-a\tssh-rsa \t AAAA\r\n", 1),
    ],
)
def test_lines_as_people_and_programs_write_them(text: str, count: int) -> None:
    assert len(matching_keys(text, NAME)) == count


def test_a_port_is_no_class_of_characters() -> None:
    assert (known_hosts_name("Lab-A", 22), known_hosts_name("lab-a", 2222)) == ("lab-a", "[lab-a]:2222")
    assert len(matching_keys("lab-a ssh-rsa AAAA\n[lab-a]:2222 ssh-rsa AAAA", "[lab-a]:2222")) == 1
    assert len(matching_keys("[lab-*]:2222 ssh-rsa AAAA", "[lab-a]:2222")) == 1
    assert matching_keys("[lab-*]:2222 ssh-rsa AAAA", "l:2222") == ()
    # As a HostKeyAlias is written.
    assert len(matching_keys("lab-*,!Lab-B ssh-rsa AAAA", "Lab-A")) == 1
    assert matching_keys("lab-*,!Lab-B ssh-rsa AAAA", "Lab-B") == ()


def test_algorithms_of_revoked_keys_are_not_asked_for_first() -> None:
    supported = ("ssh-ed25519", "ecdsa-sha2-nistp256", "rsa-sha2-512")
    assert preferred_key_types((), supported) == supported
    known = matching_keys(line(FIRST, marker="@revoked ") + "lab-a ssh-rsa AAAA", NAME)
    assert preferred_key_types(known, supported) == ("rsa-sha2-512", "ssh-ed25519", "ecdsa-sha2-nistp256")
    assert preferred_key_types(matching_keys(line(FIRST), NAME), supported) == (
        "ecdsa-sha2-nistp256", "ssh-ed25519", "rsa-sha2-512",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("content", "says"), [(b"x\n", "no public key"), (b"ssh-rsa A\n", "no public key"), (None, "No such file")]
)
def test_a_file_of_revoked_keys_that_can_not_be_read_is_named(tmp_path: Path, content: bytes | None, says: str) -> None:
    place = tmp_path / "a b"
    if content is not None:
        place.write_bytes(content)
    problem = refused(revoked_by, str(place), FIRST.asbytes(), b"")
    assert says in problem.evidence and "index" not in problem.evidence
    assert problem.next_step == f"ls -l '{place}'"
