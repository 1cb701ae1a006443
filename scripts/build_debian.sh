#!/bin/sh
# Build a folder with a release of Debian for chroot, with PACKAGES; quick when it is there already.
#
#     scripts/build_debian.sh RELEASE FOLDER PACKAGE...
set -eu

release=$1 root=$2; shift 2
here=$(dirname "$0")

if [ "$(uname)" != Linux ] || [ "$(id -u)" != 0 ]; then
    echo "Debian $release runs in a chroot: that needs Linux and root." >&2
    exit 1
fi
mkdir -p "$(dirname "$root")"
exec 9>"$root.lock"
flock 9

# What "$@" mounts disappears with its mount namespace: none is ever left in the folder, which
# would make deleting it dangerous.
alone() {
    unshare --mount "$@"
}

INSTALL='
root=$1; shift
mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"
cp /etc/hosts "$root/etc/hosts"
printf "#!/bin/sh\nexit 101\n" >"$root/usr/sbin/policy-rc.d"
chmod 755 "$root/usr/sbin/policy-rc.d"
export DEBIAN_FRONTEND=noninteractive
chroot "$root" apt-get install -qq -y --no-install-recommends "$@"
chroot "$root" apt-get clean
'

install_into() {
    alone sh -euc "$INSTALL" sh "$@" >>"$root.log" 2>&1
}

failed() {
    tail -n 20 "$root.log" >&2
    echo "Debian $release could not be built; all of the output is in $root.log." >&2
    exit 1
}

if ! [ -e "$root/usr" ]; then
    if ! command -v debootstrap >/dev/null || ! [ -e /usr/share/keyrings/debian-archive-keyring.gpg ]; then
        "$here/install_packages.sh" debootstrap debian-archive-keyring
    fi
    # Built beside its final place and moved there when complete: a broken build is never used.
    building=$root.building
    rm -rf --one-file-system "$building"
    echo "Building Debian $release in $root (about a minute)."
    # debootstrap's own default mirror; the script of `sid` fits every later release.
    alone debootstrap --variant=minbase "$release" "$building" "" sid >"$root.log" 2>&1 || failed
    install_into "$building" "$@" || failed
    mv "$building" "$root"
elif ! chroot "$root" dpkg --status "$@" >/dev/null 2>&1; then
    install_into "$root" "$@" || failed
fi
rm -f "$root.log"
