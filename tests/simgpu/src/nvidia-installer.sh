#!/bin/sh
# An installer that takes the options of NVIDIA's, says what it says and leaves what it leaves, for stub libraries.
# POSIX sh: the hosts it runs on have no compiler and perhaps no Python.
#
# Beside it lie .manifest (what goes where) and .options (what this version understands), both generated.
# SIMRUN_FAIL in the environment, or the word in /etc/simrun.fail, asks for one of the failures that the real one shows:
# sanity-errors-rc0 no-compiler no-headers compile-error nouveau x-running module-loaded alternate-install sigbus slow
# (tmp-too-small is the header's).
#
# Not simulated: questions. Without --silent it behaves as if --no-questions --ui=none had been given.

LC_ALL=C
# ldconfig, depmod and modprobe are looked for where they usually are, even if the caller's PATH lacks that.
PATH=$PATH:/usr/sbin:/sbin
export LC_ALL PATH
umask 022

VERSION=@VERSION@
DESCRIPTION="NVIDIA Accelerated Graphics Driver for Linux-@ARCH@"
STATE=/var/lib/nvidia
PROGRAM=$0
HERE=$(cd "$(dirname "$0")" && pwd)

log_file=
silent=n
uninstall=n
mode=install
kernel_modules=y
userspace=y
dkms=n
libglvnd=auto
systemd=auto
compat32=auto
modprobe=y
x_check=y
nouveau_check=y
disable_nouveau=n
alternate_check=y
running_driver_ok=n
opengl=y
skip_load=n
kernel_name=
kernel_source=
kernel_type=kernel
tmpdir=
library_directory=

simulated=$SIMRUN_FAIL
[ -r /etc/simrun.fail ] && read -r simulated < /etc/simrun.fail

case ${PROGRAM##*/} in
nvidia-uninstall) uninstall=y ;;
esac

# --- talking -----------------------------------------------------------------------------------------------------

log() { [ -z "$log_ready" ] || printf '%s\n' "$*" >> "$log_file"; }
say() { # a message of the user interface: to the log with an arrow, to the terminal unless silent
    log "-> $*"
    [ "$silent" = y ] || printf '%s\n' "$*"
}
error() {
    log "ERROR: $*"
    printf '\nERROR: %s\n\n' "$*" >&2
}
warning() {
    log "WARNING: $*"
    if [ "$silent" = y ]; then
        printf '\nWARNING: %s\n\n' "$*" >&2
    else
        printf '\nWARNING: %s\n\n' "$*"
    fi
}
failed() {
    if [ "$uninstall" = y ]; then
        what=Uninstallation
    else
        what=Installation
    fi
    error "$what has failed.  Please see the file '$log_file' for details.  You may find suggestions on fixing installation problems in the README available on the Linux driver download page at www.nvidia.com."
    exit 1
}

open_log() {
    if ! : > "$log_file"; then
        echo "nvidia-installer: Error opening log file '$log_file' for writing; disabling logging." >&2
        return
    fi
    log_ready=y
    log "nvidia-installer log file '$log_file'"
    log "creation time: $(date '+%a %b %e %H:%M:%S %Y')"
    log "installer version: $VERSION"
    log ""
    log "PATH: $PATH"
    log ""
    log "nvidia-installer command line:"
    log "    $PROGRAM"
    for word in "$@"; do log "    $word"; done
    log ""
    log "Using built-in stream user interface"
    cpus=$(getconf _NPROCESSORS_ONLN 2> /dev/null || echo 1)
    log "-> Detected $cpus CPUs online; setting concurrency level to $cpus."
}

# --- options -----------------------------------------------------------------------------------------------------

invalid() {
    printf '%s: %s\n' "$PROGRAM" "$1" >&2
    printf '\nERROR: Invalid commandline, please run `%s --help` for usage information.\n\n' "$PROGRAM" >&2
    exit 1
}

# .options holds a line per option: name, short letter or -, and kind (flag, boolean, value).
option_kind() { awk -v n="$1" '$1 == n { print $3; exit }' "$OPTIONS"; }
option_of_letter() { awk -v l="$1" '$2 == l { print $1; exit }' "$OPTIONS"; }

set_option() { # name, value (y or n for booleans)
    case $1 in
    silent) silent=y ;;
    ui | no-questions | accept-license | expert | no-backup | no-recursion) ;;
    uninstall) uninstall=y ;;
    driver-info) mode=info ;;
    sanity) mode=sanity ;;
    version) mode=version ;;
    help | advanced-options | help-args-only | advanced-options-args-only) mode=help ;;
    log-file-name) log_file=$2 ;;
    tmpdir) tmpdir=$2 ;;
    no-kernel-module | no-kernel-modules) kernel_modules=n ;;
    kernel-module-only | kernel-modules-only) userspace=n ;;
    dkms) dkms=$2 ;;
    install-libglvnd) libglvnd=$2 ;;
    systemd) systemd=$2 ;;
    install-compat32-libs) compat32=$2 ;;
    no-nvidia-modprobe) modprobe=n ;;
    no-x-check) x_check=n ;;
    no-nouveau-check) nouveau_check=n ;;
    disable-nouveau) disable_nouveau=y ;;
    no-check-for-alternate-installs) alternate_check=n ;;
    allow-installation-with-running-driver) running_driver_ok=$2 ;;
    no-opengl-files) opengl=n ;;
    skip-module-load) skip_load=y ;;
    kernel-name) kernel_name=$2 ;;
    kernel-source-path) kernel_source=$2 ;;
    kernel-module-build-directory) kernel_type=$2 ;;
    kernel-module-type) [ "$2" = open ] && kernel_type=kernel-open ;;
    utility-libdir | opengl-libdir) library_directory=/usr/$2 ;;
    esac
}

parse_options() {
    while [ $# -gt 0 ]; do
        word=$1
        shift
        case $word in
        -?*) ;;
        *) invalid "unrecognized option: \"$word\"" ;;
        esac
        name=${word#-}
        name=${name#-}
        has_value=n
        case $name in
        *=*)
            value=${name#*=}
            name=${name%%=*}
            has_value=y
            ;;
        esac
        [ ${#name} -eq 1 ] && case $word in
        --*) ;;
        *) name=$(option_of_letter "$name") ;;
        esac
        kind=$(option_kind "$name")
        state=y
        if [ -z "$kind" ] && [ "$(option_kind "${name#no-}")" = boolean ]; then
            name=${name#no-}
            kind=boolean
            state=n
        fi
        case $kind in
        flag | boolean)
            [ $has_value = y ] && invalid "option \"${word%%=*}\" does not take an argument, but was given an argument of \"$value\""
            set_option "$name" $state
            ;;
        value)
            if [ $has_value = n ]; then
                [ $# -gt 0 ] || invalid "option \"$word\" requires an argument."
                value=$1
                shift
            fi
            set_option "$name" "$value"
            ;;
        *) invalid "unrecognized option: \"${word%%=*}\"" ;;
        esac
    done
}

# --- the state in /var/lib/nvidia --------------------------------------------------------------------------------

# The file's format is the real one: a kind, a path, and below it a checksum or a link target.
# 0 is an installed file, 1 an installed link, 2 a backed-up link, 100 and up a backed-up file.
checksum() { cksum < "$1" | cut -d' ' -f1; }

make_directories() { # creates a path's parents and remembers those that did not exist
    [ -d "$1" ] && return
    make_directories "$(dirname "$1")"
    mkdir "$1" || failed
    printf '%s\n' "$1" >> "$STATE/.dirs"
}

back_up() { # moves a file that is in the way, so that --uninstall can bring it back
    if [ -L "$1" ]; then
        printf '2: %s\n%s\n0777 0 0\n' "$1" "$(readlink "$1")" >> "$STATE/log"
        rm -f "$1"
    elif [ -e "$1" ]; then
        printf '%s: %s\n%s %s\n' "$backup_number" "$1" "$(checksum "$1")" "$(stat -c '%a %u %g' "$1")" >> "$STATE/log"
        mv "$1" "$STATE/$backup_number" || failed
        backup_number=$((backup_number + 1))
    fi
}

installed_version() {
    [ -r "$STATE/log" ] && sed -n '1s/.*(\(.*\)).*/\1/p' "$STATE/log"
}

# --- checks before anything is touched ---------------------------------------------------------------------------

check_x() {
    [ $x_check = y ] || return 0
    for lock in /tmp/.X*-lock; do
        [ -r "$lock" ] || continue
        read -r pid < "$lock"
        if kill -0 "$pid" 2> /dev/null; then
            simulated=x-running
            say "The file '$lock' exists and appears to contain the process ID '$pid' of a running X server."
        fi
    done
    [ "$simulated" = x-running ] || return 0
    say "You appear to be running an X server.  Installing the NVIDIA driver while X is running is not recommended, as doing so may prevent the installer from detecting some potential installation problems, and it may not be possible to start new graphics applications after a new driver is installed.  If you choose to continue installation, it is highly recommended that you reboot your computer after installation to use the newly installed driver. (Answer: Abort installation)"
    failed
}

check_alternate() {
    [ $alternate_check = y ] || return 0
    [ "$simulated" = alternate-install ] || [ -e /usr/lib/nvidia/alternate-install-present ] || return 0
    say "The NVIDIA driver appears to have been installed previously using a different installer. To prevent potential conflicts, it is recommended either to update the existing installation using the same mechanism by which it was originally installed, or to uninstall the existing installation before installing this driver. (Answer: Abort installation)"
    error "The installation was canceled due to the availability or presence of an alternate driver installation. Please see $log_file for more details."
    failed
}

nouveau_bound() {
    for link in /sys/bus/pci/devices/*/driver; do
        [ -L "$link" ] || continue
        target=$(readlink "$link")
        [ "${target##*/}" = nouveau ] && return 0
    done
    return 1
}

check_nouveau() {
    [ $nouveau_check = y ] && [ $kernel_modules = y ] || return 0
    [ "$simulated" = nouveau ] || nouveau_bound || return 0
    error "The Nouveau kernel driver is currently in use by your system.  This driver is incompatible with the NVIDIA driver, and must be disabled before proceeding."
    for directory in /etc/modprobe.d /usr/lib/modprobe.d; do
        mkdir -p "$directory"
        printf '# generated by nvidia-installer\nblacklist nouveau\noptions nouveau modeset=0\n' \
            > "$directory/nvidia-installer-disable-nouveau.conf"
    done
    say "One or more modprobe configuration files to disable Nouveau have been written.  You will need to reboot your system and possibly rebuild the initramfs before these changes can take effect.  Note if you later wish to reenable Nouveau, you will need to delete these files: /usr/lib/modprobe.d/nvidia-installer-disable-nouveau.conf, /etc/modprobe.d/nvidia-installer-disable-nouveau.conf"
    failed
}

check_module_loaded() {
    [ $kernel_modules = y ] || return 0
    loaded=$(sed -n 's/^\(nvidia[a-z_]*\) .*/\1/p' /proc/modules 2> /dev/null | head -n 1 | tr _ -)
    [ "$simulated" = module-loaded ] && loaded=nvidia-uvm
    [ -n "$loaded" ] && [ $running_driver_ok = n ] || return 0
    text="An NVIDIA kernel module '$loaded' appears to be already loaded in your kernel.  This may be because it is in use (for example, by an X server, a CUDA program, or the NVIDIA Persistence Daemon), but this may also happen if your kernel was configured without support for module unloading.  Some of the sanity checks that nvidia-installer performs to detect potential installation problems are not possible while an NVIDIA kernel module is running."
    warning "$text"
    say "Would you like to continue installation and skip the sanity checks? If not, please abort the installation, then close any programs which may be using the NVIDIA GPU(s), and attempt installation again. (Answer: Abort installation)"
    failed
}

# --- kernel modules ----------------------------------------------------------------------------------------------

check_compiler() {
    for pair in cc:gcc make:make; do
        tool=${pair%:*}
        package=${pair#*:}
        if { [ "$simulated" = no-compiler ] && [ "$tool" = cc ]; } || ! command -v "$tool" > /dev/null 2>&1; then
            error "Unable to find the development tool \`$tool\` in your path; please make sure that you have the package '$package' installed.  If $package is installed on your system, then please check that \`$tool\` is in your PATH."
            failed
        fi
    done
}

find_kernel_source() {
    kernel=${kernel_name:-$(uname -r)}
    if [ -n "$kernel_source" ] && [ ! -d "$kernel_source" ]; then
        error "The kernel source path '$kernel_source' does not exist.  Please make sure you have specified a valid kernel source path."
        failed
    fi
    : "${kernel_source:=/lib/modules/$kernel/build}"
    # A compile error is asked for: then the sources need not be there.
    [ "$simulated" = compile-error ] && return
    if [ "$simulated" = no-headers ] || [ ! -e "$kernel_source/Makefile" ]; then
        error "Unable to find the kernel source tree for the currently running kernel.  Please make sure you have installed the kernel source files for your kernel and that they are properly configured; on Red Hat Linux systems, for example, be sure you have the 'kernel-source' or 'kernel-devel' RPM installed.  If you know the correct kernel source files are installed, you may specify the kernel source path with the '--kernel-source-path' command line option."
        failed
    fi
    say "Kernel source path: '$kernel_source'"
}

compile_error() {
    error "An error occurred while performing the step: \"Building kernel modules\". See $log_file for details."
    log "-> The command \`cd ./$kernel_type; /usr/bin/make -k -j$cpus  NV_EXCLUDE_KERNEL_MODULES=\"\" SYSSRC=\"$kernel_source\"\` failed with the following output:"
    log ""
    if [ -n "$build_output" ]; then
        log "$build_output"
    else
        log "/tmp/selfgz/NVIDIA-Linux-@ARCH@-$VERSION/kernel/nvidia/nv.c:1:2: error: implicit declaration of function 'simulated_failure' [-Werror=implicit-function-declaration]"
    fi
    error "The nvidia kernel module was not created."
    failed
}

build_modules() {
    check_compiler
    find_kernel_source
    [ "$simulated" = compile-error ] && compile_error
    [ -d "$HERE/$kernel_type" ] || {
        error "The kernel module build directory '$kernel_type' does not exist."
        failed
    }
    # DKMS builds them by itself: with --dkms the real one takes no longer than without.
    [ "$dkms" = y ] && command -v dkms > /dev/null 2>&1 && return
    say "Building kernel modules"
    if ! build_output=$(make -C "$kernel_source" M="$HERE/$kernel_type" modules 2>&1); then
        compile_error
    fi
    log "$build_output"
    say "Kernel module compilation complete."
}

module_directory() {
    if [ -d "/lib/modules/$kernel/kernel" ]; then
        echo "/lib/modules/$kernel/kernel/drivers/video"
    else
        echo "/lib/modules/$kernel/video"
    fi
}

install_modules() {
    if [ "$dkms" = y ] && command -v dkms > /dev/null 2>&1; then
        source_tree=/usr/src/nvidia-$VERSION
        make_directories "$source_tree"
        for file in "$HERE/$kernel_type"/*.[ch] "$HERE/$kernel_type"/Kbuild "$HERE/$kernel_type"/Makefile "$HERE/$kernel_type"/dkms.conf; do
            [ "${file%.mod.c}" = "$file" ] || continue # left by the test build
            install_file "$file" "$source_tree/${file##*/}" 0644
        done
        say "Installing DKMS kernel module:"
        if ! output=$(dkms install -m nvidia -v "$VERSION" -k "$kernel" 2>&1); then
            log "$output"
            error "Failed to install the kernel module through DKMS. No kernel module was installed; please try installing again without DKMS, or check the DKMS logs for more information."
            failed
        fi
        say "done."
        return
    fi
    target=$(module_directory)
    make_directories "$target"
    for module in "$HERE/$kernel_type"/*.ko; do
        install_file "$module" "$target/${module##*/}" 0644
    done
    depmod -a "$kernel" 2> /dev/null
}

load_modules() {
    [ $skip_load = n ] && [ -z "$kernel_name" ] || return 0
    if ! output=$(modprobe nvidia 2>&1); then
        log "$output"
        error "Unable to load the 'nvidia' kernel module."
        failed
    fi
}

# --- files -------------------------------------------------------------------------------------------------------

choose_directories() {
    if [ -z "$library_directory" ]; then
        library_directory=/usr/lib64
        [ -d /usr/lib/x86_64-linux-gnu ] && library_directory=/usr/lib/x86_64-linux-gnu
        [ -d /usr/lib64 ] || [ -d "$library_directory" ] || library_directory=/usr/lib
    fi
    # No 32-bit libraries are in this package; a host without a place for them is told so, as by the real one.
    if [ $compat32 != n ] && [ ! -d /usr/lib32 ] && [ ! -d /usr/lib/i386-linux-gnu ]; then
        warning "Unable to find a suitable destination to install 32-bit compatibility libraries. Your system may not be set up for 32-bit compatibility. 32-bit compatibility files will not be installed; if you wish to install them, re-run the installation and set a valid directory with the --compat32-libdir option."
    fi
    if [ "$systemd" = auto ]; then
        systemd=n
        command -v systemctl > /dev/null 2>&1 && systemd=y
    fi
    if [ "$libglvnd" = auto ]; then
        libglvnd=y
        ldconfig -p 2> /dev/null | grep -q 'libGLdispatch\.so\.0' && libglvnd=n
    fi
}

wanted() { # is a row of the manifest with that condition to be installed?
    case $1 in
    systemd) [ "$systemd" = y ] ;;
    modprobe) [ "$modprobe" = y ] ;;
    libglvnd) [ "$libglvnd" = y ] && [ "$opengl" = y ] ;;
    *) true ;;
    esac
}

install_file() { # source, destination, mode
    make_directories "$(dirname "$2")"
    back_up "$2"
    if ! cp "$1" "$2"; then
        error "Unable to copy '$1' to '$2'."
        failed
    fi
    chmod "$3" "$2"
    printf '0: %s\n%s\n' "$2" "$(checksum "$2")" >> "$STATE/log"
}

install_link() { # path, target
    make_directories "$(dirname "$1")"
    back_up "$1"
    ln -s "$2" "$1" || failed
    printf '1: %s\n%s\n' "$1" "$2" >> "$STATE/log"
}

interrupt_halfway() { # a full root file system, or a test that kills us: both leave a part of the files behind
    case $simulated in
    sigbus)
        printf '\nReceived signal SIGBUS; aborting.\n\n' >&2
        trap - EXIT
        kill -BUS $$
        ;;
    slow) sleep "${SIMRUN_SLEEP:-60}" ;;
    esac
}

install_files() {
    say "Searching for conflicting files:"
    say "done."
    say "Installing '$DESCRIPTION' ($VERSION):"
    count=0
    tab=$(printf '\t')
    while IFS=$tab read -r kind when permissions path origin; do
        wanted "$when" || continue
        case $path in
        @LIBDIR@*) path=$library_directory${path#@LIBDIR@} ;;
        esac
        if [ "$kind" = f ]; then
            install_file "$HERE/$origin" "$path" "$permissions"
        else
            install_link "$path" "$origin"
        fi
        count=$((count + 1))
        [ $count -eq 40 ] && interrupt_halfway
    done < "$HERE/.rows"
    log "   executing: '$(command -v ldconfig)'..."
    ldconfig
    if [ "$systemd" = y ]; then
        log "   executing: '$(command -v systemctl) daemon-reload'..."
        if ! output=$(systemctl daemon-reload 2>&1); then
            log "$output"
            # In silent mode the real one answers its own question and goes on, with exit code 0.
            error "Failed to execute \`$(command -v systemctl) daemon-reload\`: $output"
            say "Would you like to continue installation? (Answer: Continue installation)"
        fi
    fi
    say "done."
    say "Driver file installation is complete."
}

sanity_check() {
    say "Running post-install sanity check:"
    broken=n
    if [ "$simulated" = sanity-errors-rc0 ]; then
        error "The installed file '$library_directory/libnvidia-ml.so.$VERSION' has a different checksum than when it was installed."
        broken=y
    fi
    if [ $opengl = y ] && ! ldconfig -p 2> /dev/null | grep -q 'libGL\.so\.1 '; then
        error "The symbolic link '/usr/lib/libGL.so.1' does not point to a valid file: libGL.so.1 could not be found."
        broken=y
    fi
    say "done."
    if [ $broken = y ]; then
        say "Post-install sanity check failed."
    else
        say "Post-install sanity check passed."
    fi
}

# --- what it is called for ---------------------------------------------------------------------------------------

start_state() {
    rm -rf "$STATE"
    mkdir -p "$STATE"
    chmod 0700 "$STATE"
    backup_number=100
    # The real file's first line is 1.0-<digits> (<version>), kept for installers of twenty years ago.
    (umask 077 && printf '1.0-%s (%s)\n%s\n' "$(printf %s "$VERSION" | tr -d .)" "$VERSION" "$DESCRIPTION" > "$STATE/log")
    : > "$STATE/.dirs"
}

# The order of removal: deepest directory first.
finish_state() {
    sort -r "$STATE/.dirs" > "$STATE/dirs"
    rm -f "$STATE/.dirs"
}

remove_previous() {
    [ -r "$STATE/log" ] || return 0
    previous=$(installed_version)
    if [ -x /usr/bin/nvidia-uninstall ]; then
        say "Uninstalling the previous installation with /usr/bin/nvidia-uninstall."
        SIMRUN_FAIL='' /usr/bin/nvidia-uninstall --silent > /dev/null 2>&1 && return 0
    fi
    log "-> Uninstalling the previous installation ($previous)."
    remove_files
}

install_driver() {
    check_x
    check_alternate
    check_nouveau
    check_module_loaded
    say "Installing NVIDIA driver version $VERSION."
    [ $kernel_modules = y ] && build_modules
    choose_directories
    if [ $userspace = y ]; then
        remove_previous
        start_state
        [ $libglvnd = y ] && log "Will install libglvnd libraries."
        sed '1,2d' "$HERE/.manifest" > "$HERE/.rows"
        install_files
    elif [ "$(installed_version)" != "$VERSION" ]; then
        error "The '--kernel-modules-only' option can only be used if the NVIDIA driver version $VERSION is already installed."
        failed
    else
        cp "$STATE/dirs" "$STATE/.dirs"
        backup_number=$((100 + $(ls "$STATE" | grep -c '^[0-9]')))
    fi
    if [ $kernel_modules = y ]; then
        install_modules
        load_modules
    fi
    finish_state
    sanity_check
    say "Installation of the $DESCRIPTION (version: $VERSION) is now complete."
}

remove_entry() { # kind, path, detail
    case $1 in
    0) if [ ! -e "$2" ]; then
        say "Unable to access file '$2' (No such file or directory)"
    else
        rm -f "$2"
    fi ;;
    1) [ -L "$2" ] && rm -f "$2" ;;
    2) ln -s "$3" "$2" ;;
    *)
        mv "$STATE/$1" "$2"
        set -- $3
        chmod "$2" "$path"
        ;;
    esac
}

# Files go first, what had been backed up comes back after them.
remove_files() {
    for pass in remove restore; do
        sed 1,2d "$STATE/log" | while IFS= read -r line; do
            kind=${line%%:*}
            path=${line#*: }
            IFS= read -r detail
            [ "$kind" = 2 ] && IFS= read -r _
            case $pass:$kind in
            remove:[01]) remove_entry "$kind" "$path" "$detail" ;;
            restore:[01]) ;;
            restore:*) remove_entry "$kind" "$path" "$detail" ;;
            esac
        done
    done
    # Without an end to the installation their list is in the order of their making.
    [ -r "$STATE/dirs" ] || sort -r "$STATE/.dirs" > "$STATE/dirs"
    while read -r directory; do
        rmdir "$directory" 2> /dev/null || warning "Failed to delete the directory '$directory' (Directory not empty)."
    done < "$STATE/dirs"
    rm -rf "$STATE"
    ldconfig
}

uninstall_driver() {
    if [ ! -r "$STATE/log" ]; then
        say "There is no NVIDIA driver currently installed."
        return
    fi
    previous=$(sed -n 1p "$STATE/log")
    name=$(sed -n 2p "$STATE/log")
    say "Parsing log file:"
    say "done."
    say "Validating previous installation:"
    say "done."
    say "Uninstalling $name ($previous):"
    if command -v dkms > /dev/null 2>&1 && dkms status -m nvidia 2> /dev/null | grep -q nvidia; then
        say "DKMS module detected; removing..."
        dkms remove -m nvidia -v "$(installed_version)" --all > /dev/null 2>&1
    fi
    version=$(installed_version)
    remove_files
    say "done."
    say "Uninstallation of existing driver: $name ($version) is complete."
}

print_help() {
    printf '\nnvidia-installer:  version %s\n  The NVIDIA Software Installer for Unix/Linux.\n\n' "$VERSION"
    [ $mode = version ] || awk '{ print "  --" $1 }' "$OPTIONS"
}

OPTIONS=$HERE/.options
if [ ! -r "$OPTIONS" ]; then # the installed copy carries its option table behind its own text
    OPTIONS=$(mktemp)
    trap 'rm -f "$OPTIONS"' EXIT
    sed '1,/^# option table$/d; s/^# //' "$PROGRAM" > "$OPTIONS"
fi
parse_options "$@"
case $mode in
help | version)
    print_help
    exit 0
    ;;
esac
if [ $uninstall = y ]; then
    : "${log_file:=/var/log/nvidia-uninstall.log}"
else
    : "${log_file:=/var/log/nvidia-installer.log}"
fi
if [ "$(id -u)" != 0 ]; then
    log_file=$(mktemp)
    error "nvidia-installer must be run as root"
    rm -f "$log_file"
    exit 1
fi
if [ $mode = info ]; then
    if [ -r "$STATE/log" ]; then
        echo "The currently installed driver is: '$(sed -n 2p "$STATE/log")' (version: $(installed_version))."
    else
        echo "There is no NVIDIA driver currently installed."
    fi
    exit 0
fi
open_log "$@"
if [ $mode = sanity ]; then
    sanity_check
elif [ $uninstall = y ]; then
    uninstall_driver
else
    install_driver
fi
exit 0
# option table
