"""The command line: `python -m tests.simgpu libraries|run-file|tree|kernel|nodes`."""

import argparse
import sys
from pathlib import Path

from .commands import BuildError
from .gpus import CUDA_VERSION, DRIVER_VERSION, MAXIMUM_GPUS, device_nodes
from .kernel_tree import write_kernel_tree
from .libraries import build_libraries
from .runfile import build_run, install_tree


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.simgpu", description="Builds a simulated GPU for tests.")
    version = argparse.ArgumentParser(add_help=False)
    version.add_argument("--driver-version", default=DRIVER_VERSION)
    version.add_argument("--cuda-version", default=CUDA_VERSION)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("libraries", parents=[version], help="build the stub libraries, print their folder")
    run = commands.add_parser("run-file", parents=[version], help="build the test .run")
    run.add_argument("directory", type=Path)
    tree = commands.add_parser("tree", parents=[version], help="lay an installed driver's files below a directory")
    tree.add_argument("directory", type=Path)
    kernel = commands.add_parser("kernel", parents=[version], help="write the /sys and /proc of a kernel with GPUs")
    kernel.add_argument("directory", type=Path)
    nodes = commands.add_parser("nodes", help="print the device nodes as: path major minor mode")
    for command in (kernel, nodes):
        command.add_argument("--gpus", type=int, default=1, choices=range(MAXIMUM_GPUS + 1), metavar="0..16")
    return parser


def main() -> int:
    """Runs one command; returns its exit code."""
    arguments = _parser().parse_args()
    try:
        if arguments.command == "libraries":
            print(build_libraries(arguments.driver_version, arguments.cuda_version))
        elif arguments.command == "run-file":
            print(build_run(arguments.directory, arguments.driver_version, arguments.cuda_version))
        elif arguments.command == "tree":
            install_tree(arguments.directory, arguments.driver_version)
        elif arguments.command == "kernel":
            write_kernel_tree(arguments.directory, arguments.gpus, arguments.driver_version)
        else:
            for node in device_nodes(arguments.gpus):
                print(f"{node.path} {node.major} {node.minor} {node.mode:o}")
    except BuildError as error:
        print(f"simgpu: {error}", file=sys.stderr)
        return 1
    return 0


sys.exit(main())
