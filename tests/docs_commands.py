"""The commands that README and docs/ tell people to type, and which tests execute them.

A command is in order if tests execute it, or if its page marks it as an example. A mark stands above a block's fence,
says why, and holds for all commands of the block:

    <!-- example: needs a GPU -->

- `gpuprov SUBCOMMAND`: executed if one call in the test files of the subcommand (TESTS) has the subcommand and all of
  the command's own options. Options that all commands over hosts share are in a call of any of them (SHARED).
- Tutorials: executed, each command of a `console` block.
- Commands that need no host: HERE, by pattern; they are executed as they stand in the page.
- All other programs: OTHERS, by pattern.
- A single command, and the examples of `--help` (docs/cli.md), are marked in EXAMPLES, by pattern.
"""

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))
# Its tests type the pages in docs/tutorials, block by block, and the first section of the page on bundles.
TUTORIALS = ROOT / "tests/integration/test_tutorials.py"
TYPED = (*sorted((ROOT / "docs/tutorials").glob("*.md")), ROOT / "docs/air-gapped.md")
_FENCE = re.compile(r" *```(\w*)")
_MARK = re.compile(r"<!-- example: (.+) -->")
_PROMPT = re.compile(r"[\w-]*[$#] ")
_BEGINS = re.compile(r"(sudo|gpuprov|ansible-playbook|make) \w")
_BEFORE = re.compile(r"(?:sudo |\.venv/bin/)+")
# What a command of a page may begin with, behind a prompt and sudo. A block that begins so has commands alone; of one
# with prompts the rest is output.
PROGRAMS = frozenset((
    "ansible-galaxy", "ansible-playbook", "apptainer", "apt-get", "buildah", "cd", "crictl", "ctr", "curl", "docker",
    "docker-compose", "echo", "eval", "git", "gpuprov", "install", "journalctl", "kubectl", "make", "mount", "nerdctl",
    "nvidia-smi", "pip", "podman", "pre-commit", "python3", "systemctl", "tar", "umount",
))  # fmt: skip

_INSTALL = ("integration/test_install.py", "integration/test_host_program.py", "unit/test_cli.py")
_CONTAINERS = ("unit/test_commands_for_containers.py",)
# Subcommand → files below tests/ that execute it with the options that pages show.
TESTS = {
    "accept": ("integration/test_accept.py", "unit/test_accept.py"),
    "advisories": ("unit/test_advisories.py",),
    "advisories update": ("unit/test_advisories.py",),
    "agent build": ("unit/test_cli.py",),
    "bundle create": ("integration/test_bundle.py", "integration/test_bundle_create.py",
                      "integration/test_bundle_create_rpm.py", "integration/test_bundle_rpm.py",
                      "unit/bundle/test_format.py"),
    "bundle show": ("integration/test_bundle.py", "unit/bundle/test_format.py"),
    "bundle verify": ("integration/test_bundle.py", "unit/bundle/test_format.py"),
    "cdi generate": _CONTAINERS,
    "cdi inject": _CONTAINERS,
    "cdi list": _CONTAINERS,
    "cdi transform root": _CONTAINERS,
    "cdi validate": _CONTAINERS,
    "completion": ("unit/test_cli.py",),
    "cuda": ("integration/test_cuda.py", "integration/test_host_program.py", "unit/test_cli.py"),
    "docker-args": ("integration/test_clients.py", "integration/test_containers_on_hosts.py"),
    "doctor": ("integration/test_doctor.py", "integration/test_repair.py", "unit/test_cli.py"),
    "facts": ("unit/test_cli.py", "unit/test_host_program.py", "integration/test_fleet.py"),
    "health": ("integration/test_health.py", "unit/test_health_callers.py"),
    "hook explain": ("integration/test_explain_on_hosts.py", *_CONTAINERS),
    "hook requirements": _CONTAINERS,
    "install": (
        *_INSTALL, "integration/test_no_arguments.py", "integration/test_bundle.py", "integration/test_fleet.py",
        "integration/test_rolling.py",
    ),
    "kubernetes manifest": ("unit/kubernetes/test_cluster.py", "integration/test_kubernetes.py"),
    "init": ("unit/fleet/test_first_inventory.py", "integration/test_first_inventory.py"),
    "options": ("unit/test_cli.py", "unit/test_spec.py"),
    "playbooks": ("integration/test_release.py",),
    "report": ("unit/fleet/test_history.py", "unit/test_cli.py"),
    "rollback": (*_INSTALL, "integration/test_proxy.py"),
    "runtime configure": ("integration/test_runtime_configure.py", "unit/test_runtime_commands.py"),
    "serve": ("integration/test_nvidia_docker.py", "unit/test_serve.py"),
    "uninstall": ("integration/test_uninstall.py",),
    "verify": (*_INSTALL, "integration/test_kubernetes.py", "integration/test_kubernetes_faults.py"),
}  # fmt: skip

# Files that execute the options which all commands over hosts have: --hosts, --limit, --json and others.
SHARED = ("integration/test_install.py", "integration/test_fleet.py", "unit/test_cli.py")

# Commands that need no host, as patterns → their exit code: tests/unit/test_docs_commands.py executes them.
HERE = {
    "gpuprov options": "0",
    "gpuprov options --[jm]*": "0",
    "*gpuprov completion *": "0",
    "gpuprov hook requirements *cuda>=13.2'": "1",
    "gpuprov hook requirements --cuda 12.4 --brand tesla *": "0",
    "gpuprov cuda --explain *": "0",
    "gpuprov advisories": "0",
    "gpuprov kubernetes manifest*": "0",
}

# Other commands, as patterns → the file below tests/ that executes them, or one of NO_FILE.
_CI, _PEOPLE = "CI, or the session that runs the tests", "people"
NO_FILE = (_CI, _PEOPLE)
_MACHINE = "integration/test_host_program.py"
_CONTAINER = "integration/test_containers_on_hosts.py"
_PLAYBOOKS = "integration/test_ansible.py"
OTHERS = {
    "make setup": _CI,
    "make test": _CI,
    "make demo": _PEOPLE,
    "pre-commit install": _PEOPLE,
    "install -m 755 gpuprov-host.pyz *": _MACHINE,
    "docker run --rm --gpus all IMAGE nvidia-smi -L": _MACHINE,
    "docker run --rm --runtime=nvidia -e NVIDIA_VISIBLE_DEVICES=all * nvidia-smi -L": _MACHINE,
    "docker run --rm $(gpuprov docker-args*": _CONTAINER,
    "podman run --rm $(gpuprov docker-args*": _CONTAINER,
    "podman run --rm --device nvidia.com/gpu=all *": "integration/test_more_engines.py",
    # Its hosts lack curl: the tests have an HTTP client of their own.
    "docker run --rm $(curl -sf 'localhost:3476/docker/cli*": "integration/test_nvidia_docker.py",
    "curl -s localhost:3476/gpu/status/json": "integration/test_nvidia_docker.py",
    "docker compose -f compose.yaml -f gpu.yaml up": "integration/test_clients.py",
    "ansible-playbook * playbooks/site.yml*": _PLAYBOOKS,
    "ansible-playbook * playbooks/verify.yml*": _PLAYBOOKS,
    "ansible-playbook * playbooks/doctor.yml*": "integration/test_doctor.py",
    "cd ~/gpu-hosts && ansible-playbook *": "integration/test_release.py",
    "ansible-galaxy collection install *": "integration/test_ansible_collection.py",
    "ansible-playbook * gpuprov.host.site*": "integration/test_ansible_collection.py",
    "tar -xf bundle.tar agent/gpuprov-agent.pyz": "integration/test_bundle.py",
    "echo * | python3 -I *agent.pyz": "integration/test_bundle.py",
    "python3 -I /usr/lib/gpuprov/boot.pyz *": "integration/test_boots.py",
    "journalctl -u gpuprov-nodes *": "integration/test_boots.py",
    "systemctl poweroff": "integration/test_image.py",
    "systemctl * gpuprov-watch.*": "integration/test_watch.py",
    "journalctl -u gpuprov-watch.service": "integration/test_watch.py",
    "systemctl restart containerd": "integration/test_more_engines.py",
}

# Examples, as patterns → why no test executes them.
EXAMPLES = {
    "gpuprov bundle create * --driver *": "downloads NVIDIA's driver",
    "gpuprov install * --host-command-timeout *": "needs Slurm",
    "gpuprov cuda nvcr.io/*": "needs an image of a registry",
    "gpuprov * --root *": "no test has the disk of an image",
}


@dataclass(frozen=True)
class Command:
    """A command as it is typed, without prompt, sudo and comment; `example`: why no test executes it."""

    page: str
    line: int
    text: str
    example: str = ""

    @property
    def program(self) -> str:
        """Return its first word."""
        return self.text.split()[0]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


@functools.cache
def calls_in(file: str) -> tuple[frozenset[str], ...]:
    """Return the words of each call in a test file: its texts, and those that its names stand for, such as `words`."""
    names = _named(file)
    found = []
    for top in _tree(file).body:
        inner = {**names, **_assigned(list(ast.walk(top))[1:])}
        if isinstance(top, ast.FunctionDef):  # fixtures, and what @pytest.mark.parametrize gives
            arguments = [argument.arg for argument in top.args.args]
            inner |= {name: [*names.get(name, []), *top.decorator_list] for name in arguments}
        calls = [node for node in ast.walk(top) if isinstance(node, (ast.Call, ast.Tuple, ast.Constant))]
        found += [frozenset(_words([call], inner, 3)) for call in calls]
    return tuple(found)


@functools.cache
def _tree(file: str) -> ast.Module:
    return ast.parse((ROOT / "tests" / file).read_text("utf-8"))


@functools.cache
def _named(file: str) -> Mapping[str, list[ast.AST]]:
    """Return what a file's names stand for: constants, helpers, and those of other test modules that it imports."""
    names = _assigned(_tree(file).body)
    for node in _tree(file).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
            source = str(node.module).partition(".")[2].replace(".", "/") + ".py"
            others = _named(source) if (ROOT / "tests" / source).is_file() else {}
            names |= {alias.name: others[alias.name] for alias in node.names if alias.name in others}
    return names


def _assigned(nodes: list[Any]) -> dict[str, list[ast.AST]]:
    found: dict[str, list[ast.AST]] = {}
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = [node]
        elif isinstance(node, ast.Assign):
            for name in [one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name)]:
                found.setdefault(name, []).append(node.value)
    return found


def _words(nodes: list[ast.AST], names: Mapping[str, list[ast.AST]], depth: int) -> Iterator[str]:
    for node in [one for outer in nodes for one in ast.walk(outer)]:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"[\w./-]+", node.value)
        elif isinstance(node, ast.Name) and depth and node.id in names:
            yield from _words(names[node.id], names, depth - 1)


def commands(page: Path) -> Iterator[Command]:
    """Yield the commands of a page."""
    lines = page.read_text("utf-8").splitlines()
    if page.name == "cli.md":
        yield from _of_help(page.name, lines)
        return
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        number += 1
        if not fence:
            continue
        end = next(other for other in range(number, len(lines)) if lines[other].strip() == "```")
        if fence[1] in ("", "sh", "console"):
            above = next((line for line in reversed(lines[: number - 1]) if line.strip()), "")
            mark = _MARK.fullmatch(above)
            is_typed = fence[1] == "console" and page in TYPED
            example = "typed by the tutorials' tests" if is_typed else mark[1] if mark else ""
            yield from _of_block(page.name, number + 1, lines[number:end], example)
        number = end + 1


def _of_block(page: str, first: int, lines: list[str], example: str) -> Iterator[Command]:
    prompted = any(_PROMPT.match(line) for line in lines)
    joined = re.sub(r"\\\n *", lambda _: "\0", "\n".join(lines)).split("\n")
    for number, line in enumerate(joined):
        number += sum(other.count("\0") for other in joined[:number])
        if (prompted and not _PROMPT.match(line)) or not line.strip():
            continue
        text = _typed(line.replace("\0", ""))
        command = Command(page, first + number, text, example or _why(text))
        if number == 0 and not prompted and command.program not in PROGRAMS and not any(map(_BEGINS.match, lines)):
            return  # what programs print
        yield command


def _of_help(page: str, lines: list[str]) -> Iterator[Command]:
    """Yield the examples in help texts; what follows three blanks says what they are for."""
    within = False
    for number, line in enumerate(lines, 1):
        within = line.startswith("  Example") or (within and (line.startswith("    ") or not line))
        if within and line.startswith("    "):
            text = re.sub(r"(?<=\S) {3,}.*", "", _typed(line))
            yield Command(page, number, text, _why(text))


def _typed(line: str) -> str:
    line = re.sub(r"(?:^|\s+)#\s.*", "", _PROMPT.sub("", line, count=1) if _PROMPT.match(line) else line).strip()
    return _BEFORE.sub("", line)


def _why(text: str) -> str:
    return matching(text, EXAMPLES) or ""


def matching(text: str, table: dict[str, str]) -> str | None:
    """Return the value of the first pattern that the text matches."""
    return next((value for pattern, value in table.items() if fnmatchcase(text, pattern)), None)
