#!/bin/sh
# Install packages of the Debian or Ubuntu that this machine runs; no service is started by it.
#
#     scripts/install_packages.sh PACKAGE...
set -eu

if ! command -v apt-get >/dev/null; then
    echo "This system has no apt-get: install $* with its own package manager." >&2
    exit 1
fi
if [ "$(id -u)" != 0 ]; then
    if ! sudo -n true 2>/dev/null; then
        echo "Installing $* needs root: run \`sudo apt-get install $*\` and try again." >&2
        exit 1
    fi
    exec sudo -n "$0" "$@"
fi

# One at a time: `make demo` installs a broker beside Python's packages.
exec 9>"${TMPDIR:-/tmp}/celery_native_delay-packages.lock"
flock 9

# Debian asks this script before it starts a service; 101 means no.
policy=/usr/sbin/policy-rc.d
saved=
restore() {
    rm -f "$policy"
    if [ -n "$saved" ]; then mv "$saved" "$policy"; fi
}
if [ -e "$policy" ]; then
    saved=$(mktemp "$policy.XXXXXX")
    mv "$policy" "$saved"
fi
trap restore EXIT
trap 'exit 1' HUP INT TERM
printf '#!/bin/sh\nexit 101\n' >"$policy"
chmod 755 "$policy"

apt-get update -qq || echo "Some package lists could not be refreshed; going on with the old ones." >&2
log=$(mktemp)
status=0
if ! DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@" \
    >"$log" 2>&1; then
    cat "$log" >&2
    echo "Installing $* failed; above is what apt-get said." >&2
    status=1
fi
rm -f "$log"
exit "$status"
