#!/bin/sh
# Install the brokers that the tests start private nodes of. Quick when they are there already.
#
#     scripts/setup_brokers.sh               RabbitMQ and Redis, the system's own packages
#     scripts/setup_brokers.sh --rabbitmq    RabbitMQ alone
#     scripts/setup_brokers.sh --all         also PostgreSQL and MariaDB, for stores
#     scripts/setup_brokers.sh --with-4.3    all of them and RabbitMQ 4.3, from Debian testing in a folder of
#                                            its own; implied by CI=true or NATIVE_DELAY_TEST_43=1
#
# The folder is ~/.cache/celery_native_delay/rabbitmq-4.3 or $NATIVE_DELAY_RABBITMQ_43_ROOT.
set -eu

RELEASE=forky   # the Debian release that has RabbitMQ 4.3
SERVER=usr/lib/rabbitmq/bin/rabbitmq-server
here=$(dirname "$0")

with_43=no
with_redis=yes
with_databases=no
case "${1-}" in
    "") ;;
    --rabbitmq) with_redis=no ;;
    --all) with_databases=yes ;;
    --with-4.3) with_databases=yes with_43=yes ;;
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
        case $1 in mariadb-server) set -- mariadb ;; esac
        $as_root systemctl disable --quiet "$1"
    fi
}

install_system RabbitMQ rabbitmq-server "/$SERVER" \
    /opt/homebrew/opt/rabbitmq/sbin/rabbitmq-server /usr/local/opt/rabbitmq/sbin/rabbitmq-server
if [ "$with_redis" = yes ]; then
    install_system Redis redis-server \
        /usr/bin/redis-server /opt/homebrew/bin/redis-server /usr/local/bin/redis-server
fi
if [ "$with_databases" = yes ]; then
    install_system PostgreSQL postgresql /usr/lib/postgresql/*/bin/postgres \
        /opt/homebrew/bin/postgres /usr/local/bin/postgres
    install_system MariaDB mariadb-server /usr/sbin/mariadbd /usr/bin/mariadbd \
        /opt/homebrew/bin/mariadbd /usr/local/bin/mariadbd
fi
if [ "$with_43" = yes ]; then
    root=${NATIVE_DELAY_RABBITMQ_43_ROOT:-$HOME/.cache/celery_native_delay/rabbitmq-4.3}
    [ -x "$root/$SERVER" ] || "$here/build_debian.sh" "$RELEASE" "$root" make python3-venv rabbitmq-server
fi
