"""Builds a CUDA toolkit's .run for tests: the real one's options, log and traces, around a toolkit of three files."""

from pathlib import Path

# $ROOT is for tests without a host of their own. /etc/simrun.fail asks for a failure, as with the driver's.
_SCRIPT = """\
#!/bin/sh
label="CUDA Installer"
prefix=/usr/local/cuda-@BRANCH@ toolkit=n silent=n tmpdir=/tmp
for word; do
    case $word in
    --silent) silent=y ;;
    --toolkit) toolkit=y ;;
    --toolkitpath=*) prefix=${word#*=} ;;
    --tmpdir=*) tmpdir=${word#*=} ;;
    --override) ;;
    *) echo "Unknown option: $word" >&2; exit 1 ;;
    esac
done
log=$ROOT/var/log/cuda-installer.log
mkdir -p "$ROOT/var/log"
echo "[INFO]: Driver not installed." > "$log"
[ -d "$ROOT$tmpdir" ] && [ "$silent$toolkit" = yy ] || exit 1
mkdir -p "$ROOT$prefix/bin" "$ROOT$prefix/lib64" "$ROOT/usr/share/applications" "$ROOT/etc/ld.so.conf.d"
if grep -qs cuda "$ROOT/etc/simrun.fail"; then
    echo "[ERROR]: boost::filesystem::copy_file: No space left on device" >> "$log"
    exit 255
fi
echo '{"cuda": {"name": "CUDA SDK", "version": "@VERSION@"}}' > "$ROOT$prefix/version.json"
printf '#!/bin/sh\\necho "Cuda compilation tools, release @BRANCH@"\\n' > "$ROOT$prefix/bin/nvcc"
echo menu > "$ROOT/usr/share/applications/nsight-@VERSION@.desktop"
echo "$prefix/lib64" > "$ROOT/etc/ld.so.conf.d/cuda-@DASHED@.conf"
{
    echo '#!/bin/sh'
    echo "rm -f '$ROOT/usr/share/applications/nsight-@VERSION@.desktop'"
} > "$ROOT$prefix/bin/cuda-uninstaller"
chmod 755 "$ROOT$prefix/bin/nvcc" "$ROOT$prefix/bin/cuda-uninstaller"
ln -sfn "$prefix" "$ROOT/usr/local/cuda"
echo "= Summary ="
exit 0
"""


def build_cuda_run(destination: Path, version: str = "12.4.1") -> Path:
    """Writes cuda_VERSION_linux.run into that folder; returns its path. Same input, same bytes."""
    branch = version.rpartition(".")[0]
    text = (
        _SCRIPT.replace("@VERSION@", version).replace("@BRANCH@", branch).replace("@DASHED@", branch.replace(".", "-"))
    )
    destination.mkdir(parents=True, exist_ok=True)
    path = destination / f"cuda_{version}_linux.run"
    path.write_text(text)
    return path
