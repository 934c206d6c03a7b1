#! /bin/sh
CRCsum=@CRC@
MD5=@MD5@
skip=@SKIP@
skip_decompress=@SKIP@
size_decompress=0
label="@LABEL@"
version_string=@VERSION@
pkg_version=0
script=./nvidia-installer
targetdir="NVIDIA-Linux-@ARCH@-@VERSION@"
scriptargs=""
keep=n
add_this_kernel=n
apply_patch=n
TMPROOT=${TMPDIR:=/tmp}
TARGET_OS="Linux"
TARGET_ARCH="@ARCH@"

# A test file: a driver installation with stub libraries, wrapped as NVIDIA wraps the real one (its makeself 1.6.0-nv2).
# The order of the variables, the options, the messages and the exit codes are those of the real stub. Its quirks are
# meant: options only as the first argument, --tmpdir=X not understood, arguments split at blanks.
# Different: the payload is compressed with gzip, which every host has, so no decompressor is embedded.

usage_intro() {
    echo ""
    echo "$0 [options]"
    echo ""
    echo "This program will install the $label by unpacking the embedded"
    echo "tarball and executing the ./nvidia-installer installation utility."
    echo ""
}

case "$1" in
-help | --help | -h)
    usage_intro
    cat <<'END_OF_HELP'
Below are the most common options; for a complete list use
'--advanced-options'.

--info
  Print embedded info (title, default target directory) and exit.

--check
  Check integrity of the archive and exit.

-x, --extract-only
  Extract the contents of the archive, but do not run 'nvidia-installer'.


The following arguments will be passed on to the ./nvidia-installer
utility:

@COMMON_OPTIONS@
END_OF_HELP
    exit 0
    ;;
-A | --advanced-options)
    usage_intro
    cat <<'END_OF_HELP'
--info
  Print embedded info (title, default target directory) and exit.

--lsm
  Print embedded lsm entry (or no LSM) and exit.

--pkg-history
  Print the package history of this file and exit.

--list
  Print the list of files in the archive and exit.

--check
  Check integrity of the archive and exit.

-x, --extract-only
  Extract the contents of the archive, but do not run 'nvidia-installer'.

--keep
  Do not delete target directory when done.

--target [NewDirectory]
  Extract contents in 'NewDirectory'


The following arguments will be passed on to the ./nvidia-installer
utility:

COMMON OPTIONS:

@COMMON_OPTIONS@

ADVANCED OPTIONS:

@ADVANCED_OPTIONS@
END_OF_HELP
    exit 0
    ;;
-lsm | --lsm) echo "no LSM"; exit 0 ;;
--pkg-history) echo; exit 0 ;;
--label) echo "$label"; exit 0 ;;
--version-string) echo "$version_string"; exit 0 ;;
--pkg-version) echo "$pkg_version"; exit 0 ;;
--target-os) echo "$TARGET_OS"; exit 0 ;;
--target-arch) echo "$TARGET_ARCH"; exit 0 ;;
--target-directory) echo "$targetdir"; exit 0 ;;
--script) echo "$script $scriptargs"; exit 0 ;;
--info)
    echo
    echo "  Identification    : $label"
    echo "  Target directory  : $targetdir"
    echo "  Uncompressed size : @USIZE@ KB"
    echo "  Compression       : gzip"
    echo "  Date of packaging : @DATE@"
    echo "  Application run after extraction : $script $scriptargs"
    echo
    echo "  The directory $targetdir will be removed after extraction."
    echo
    exit 0
    ;;
--list)
    echo "Target directory: $targetdir"
    tail -n +$skip "$0" | gzip -cd | tar tvf - 2> /dev/null
    exit 0
    ;;
--check)
    sum=$(tail -n +4 "$0" | cksum | awk '{print $1}')
    if [ "$sum" != "$CRCsum" ]; then
        echo "Error in checksums $sum $CRCsum"
        exit 2
    fi
    sum=$(tail -n +4 "$0" | md5sum | cut -b-32)
    if [ "$sum" != "$MD5" ]; then
        echo "Error in md5 sums $sum $MD5"
        exit 2
    fi
    echo "check sums and md5 sums are ok"
    exit 0
    ;;
esac

location=$(pwd)
run_script=y
while [ "$1" ]; do
    case "$1" in
    --extract-only | -x)
        run_script=n
        keep=y
        ;;
    --keep) keep=y ;;
    --target)
        if [ ! "$2" ]; then
            echo "ERROR: --target: no target directory specified."
            exit 1
        fi
        targetdir=$2
        keep=y
        shift
        ;;
    --tmpdir)
        scriptargs="$scriptargs $1 $2"
        if [ ! "$2" ]; then
            echo "ERROR: --tmpdir: no temporary directory specified."
            exit 1
        fi
        TMPROOT=$2
        shift
        ;;
    *) scriptargs="$scriptargs $1" ;;
    esac
    shift
done

case "$TMPROOT" in
/*) ;;
*) TMPROOT=$(pwd)/$TMPROOT ;;
esac
if [ ! -d "$TMPROOT" ] && ! mkdir -p "$TMPROOT"; then
    echo "Unable to create temp directory $TMPROOT"
    exit 1
fi
TMPDIR=$TMPROOT
probe=$(mktemp "$TMPDIR/makeself.XXXXXXXX" 2> /dev/null)
if [ ! "$probe" ]; then
    echo "Unable to create temporary file in $TMPDIR"
    exit 1
fi
chmod +x "$probe"
if ! "$probe" > /dev/null 2>&1; then
    echo "ERROR: Temporary directory $TMPDIR is not executable - use the " \
        "--tmpdir option to specify a different one."
    rm "$probe"
    exit 1
fi
rm "$probe"

LOCAL_OS=$(uname 2> /dev/null)
LOCAL_ARCH=$(uname -m 2> /dev/null)
if [ "$run_script" = y ] && [ "$LOCAL_ARCH" != "$TARGET_ARCH" -o "$LOCAL_OS" != "$TARGET_OS" ]; then
    echo ""
    echo "ERROR: this .run file is intended for the"
    echo "${TARGET_OS}-${TARGET_ARCH} platform, but you appear to be"
    echo "running on ${LOCAL_OS}-${LOCAL_ARCH}.  Aborting installation."
    echo ""
    exit 1
fi

if [ "$keep" = y ]; then
    echo "Creating directory $targetdir"
    tmpdir=$targetdir
else
    workingdir="$TMPROOT/selfgz$$"
    tmpdir="$workingdir/$targetdir"
    rm -rf $tmpdir
fi
if [ -d "$tmpdir" -o -f "$tmpdir" ]; then
    echo "The directory '$tmpdir' already exists.  Please either"
    echo "move the existing directory out of the way, or specify a"
    echo "different directory with the '--target' option."
    exit 1
fi
mkdir -p $tmpdir || {
    echo "Unable to create the target directory '$tmpdir'."
    exit 1
}

if [ "x$SETUP_NOCHECK" != x1 ]; then
    printf '%s' "Verifying archive integrity... "
    sum=$(tail -n +4 "$0" | cksum | awk '{print $1}')
    if [ "$sum" != "$CRCsum" ]; then
        echo "Error in check sums $sum $CRCsum"
        exit 2
    fi
    echo "OK"
fi
sum=$(tail -n +4 "$0" | md5sum | cut -b-32)
if [ "$sum" != "$MD5" ]; then
    echo "Error in md5 sums $sum $MD5"
    exit 2
fi

# Asked for a temporary file system that is too small: behave as tar does there, whatever the size of this one.
simulated=$SIMRUN_FAIL
[ -r /etc/simrun.fail ] && read -r simulated < /etc/simrun.fail

UnTAR() {
    { [ "$simulated" != tmp-too-small ] && tar xvf - 2> /dev/null; } || {
        echo "Extraction failed." > /dev/tty
        kill -15 $$
    }
}

printf '%s' "Uncompressing $label"
cd $tmpdir
[ "$keep" = y ] || trap 'echo "Signal caught, cleaning up" > /dev/tty; cd $TMPROOT; rm -rf $tmpdir; exit 15' 1 2 15
res=3
if (cd "$location" && tail -n +$skip "$0") | gzip -cd | UnTAR | (while read -r _; do printf .; done; echo); then
    chown -Rf "$(id -u):$(id -g)" .
    res=0
    if [ "$run_script" = y ]; then
        $script $scriptargs
        res=$?
    fi
    [ "$keep" = y ] || {
        cd $TMPROOT
        rm -rf $workingdir
    }
else
    echo "Cannot decompress $0"
    exit 1
fi
exit $res

END_OF_STUB
