#!/bin/sh
# Run a command as root in another release of Debian, in a copy of this repository that is deleted
# at the end. Needs Linux and root.
#
#     scripts/in_debian.sh trixie make test
#
# The first run builds the release in ~/.cache/celery_native_delay/debian-RELEASE, which takes about a
# minute; `forky` is in the folder that has RabbitMQ 4.3 (scripts/setup_brokers.sh --with-4.3).
set -eu

here=$(cd "$(dirname "$0")/.." && pwd)
release=$1; shift
root=$HOME/.cache/celery_native_delay/debian-$release
if [ "$release" = forky ]; then
    root=${NATIVE_DELAY_RABBITMQ_43_ROOT:-$HOME/.cache/celery_native_delay/rabbitmq-4.3}
fi
"$here/scripts/build_debian.sh" "$release" "$root" git make python3-venv

# All that is mounted here ends with the namespace. What is installed stays for the next run.
pip_cache=$HOME/.cache/pip
mkdir -p "$pip_cache"
exec env HOME=/root unshare --mount sh -euc '
root=$1 here=$2 pip_cache=$3; shift 3
mount --make-rprivate /
mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/tmp"
for shared in /etc/resolv.conf /etc/hosts /etc/pip.conf /etc/ssl /root/.config/pip; do
    [ -e "$shared" ] || continue
    if [ -d "$shared" ]; then mkdir -p "$root$shared"; else mkdir -p "$root${shared%/*}"; touch "$root$shared"; fi
    mount --rbind "$shared" "$root$shared"
done
mkdir -p "$root/root/.cache/pip" "$root/tmp/project"
mount --rbind "$pip_cache" "$root/root/.cache/pip"
tar --create --exclude=./.git --exclude=./.venv --exclude=./.pytest_cache --directory "$here" . | tar --extract --directory "$root/tmp/project"
exec chroot "$root" env --chdir=/tmp/project "$@"
' sh "$root" "$here" "$pip_cache" "$@"
