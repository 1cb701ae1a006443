#!/bin/sh
# Install the brokers that the tests start private nodes of. Quick when they are there already.
#
#     scripts/setup_brokers.sh               RabbitMQ and Redis, the system's own packages
#     scripts/setup_brokers.sh --rabbitmq    RabbitMQ alone
#     scripts/setup_brokers.sh --all         also PostgreSQL, as a timeout store
#     scripts/setup_brokers.sh --with-4.3    all of them and RabbitMQ 4.3, from Debian testing in a folder of
#                                            its own; implied by CI=true or NATIVE_DELAY_TEST_43=1
#
# The folder is ~/.cache/celery_native_delay/rabbitmq-4.3 or $NATIVE_DELAY_RABBITMQ_43_ROOT.
set -eu

SUITE=forky     # the Debian release that has RabbitMQ 4.3
SERVER=usr/lib/rabbitmq/bin/rabbitmq-server
here=$(dirname "$0")

with_43=no
with_redis=yes
with_postgresql=no
case "${1-}" in
    "") ;;
    --rabbitmq) with_redis=no ;;
    --all) with_postgresql=yes ;;
    --with-4.3) with_postgresql=yes with_43=yes ;;
    *) echo "usage: $0 [--rabbitmq | --all | --with-4.3]" >&2; exit 2 ;;
esac
if [ "${CI-}" = true ] || [ "${NATIVE_DELAY_TEST_43-}" = 1 ]; then with_43=yes; fi

# install_system NAME PACKAGE SERVER...: nothing to do where one of these servers is there.
install_system() {
    name=$1 package=$2; shift 2
    for server; do
        if [ -x "$server" ]; then return; fi
    done
    if [ "$(uname)" = Darwin ]; then
        echo "$name is missing: run \`brew install ${package%-server}\`." >&2
        return 1
    fi
    echo "Installing $name from this system's packages."
    "$here/install_packages.sh" "$package"
    not_at_boot "$package"
}

# The service of a package just installed never starts: the tests start nodes of their own.
not_at_boot() {
    if [ -d /run/systemd/system ]; then
        if [ "$(id -u)" = 0 ]; then as_root=; else as_root="sudo -n"; fi
        $as_root systemctl disable --quiet "$1"
    fi
}

# What "$@" mounts disappears with its mount namespace: none is ever left in the folder, which
# would make deleting it dangerous.
alone() {
    unshare --mount "$@"
}

install_rabbitmq_43() {
    root=${NATIVE_DELAY_RABBITMQ_43_ROOT:-$HOME/.cache/celery_native_delay/rabbitmq-4.3}
    if [ -x "$root/$SERVER" ]; then return; fi
    if [ "$(uname)" != Linux ] || [ "$(id -u)" != 0 ]; then
        echo "RabbitMQ 4.3 for the tests runs in a chroot: that needs Linux and root." >&2
        return 1
    fi
    if ! command -v debootstrap >/dev/null || ! [ -e /usr/share/keyrings/debian-archive-keyring.gpg ]; then
        "$here/install_packages.sh" debootstrap debian-archive-keyring
    fi
    mkdir -p "$(dirname "$root")"
    exec 9>"$root.lock"
    flock 9
    if [ -x "$root/$SERVER" ]; then return; fi

    # Built beside its final place and moved there when complete: a broken build is never used.
    building=$root.building
    rm -rf --one-file-system "$building"
    echo "Building RabbitMQ 4.3 from Debian $SUITE in $root (about a minute)."
    # debootstrap's own default mirror; the script of `sid` fits every later release.
    if ! alone debootstrap --variant=minbase "$SUITE" "$building" "" sid >"$root.log" 2>&1 \
        || ! alone sh -euc "$INSTALL_43" "$building" >>"$root.log" 2>&1; then
        tail -n 20 "$root.log" >&2
        echo "RabbitMQ 4.3 could not be built; all of the output is in $root.log." >&2
        return 1
    fi
    mv "$building" "$root"
    rm -f "$root.log"
}

INSTALL_43='
mount --rbind /proc "$0/proc"
mount --rbind /dev "$0/dev"
cp /etc/hosts "$0/etc/hosts"
printf "#!/bin/sh\nexit 101\n" >"$0/usr/sbin/policy-rc.d"
chmod 755 "$0/usr/sbin/policy-rc.d"
export DEBIAN_FRONTEND=noninteractive
chroot "$0" apt-get install -qq -y --no-install-recommends rabbitmq-server python3-venv
chroot "$0" apt-get clean
'

install_system RabbitMQ rabbitmq-server "/$SERVER" \
    /opt/homebrew/opt/rabbitmq/sbin/rabbitmq-server /usr/local/opt/rabbitmq/sbin/rabbitmq-server
if [ "$with_redis" = yes ]; then
    install_system Redis redis-server \
        /usr/bin/redis-server /opt/homebrew/bin/redis-server /usr/local/bin/redis-server
fi
if [ "$with_postgresql" = yes ]; then
    install_system PostgreSQL postgresql /usr/lib/postgresql/*/bin/postgres \
        /opt/homebrew/bin/postgres /usr/local/bin/postgres
fi
if [ "$with_43" = yes ]; then install_rabbitmq_43; fi
