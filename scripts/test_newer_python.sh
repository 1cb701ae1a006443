#!/bin/sh
# Run the unit tests, the promises that need no broker, and the project of the Django guide on Debian
# testing's Python and Django 6. The Python is in the folder that scripts/setup_brokers.sh makes for
# RabbitMQ 4.3. Needs Linux and root.
set -eu

here=$(cd "$(dirname "$0")/.." && pwd)
root=${NATIVE_DELAY_RABBITMQ_43_ROOT:-$HOME/.cache/celery_native_delay/rabbitmq-4.3}
[ -d "$root/usr" ] || { echo "no $root: NATIVE_DELAY_TEST_43=1 scripts/setup_brokers.sh" >&2; exit 1; }

# All that is mounted here ends with the namespace.
export PIP_CACHE_DIR=/tmp/pip HOME=/root
exec unshare --mount sh -euc '
mount --make-rprivate /
mount --rbind /proc "$0/proc"
mount --rbind /dev "$0/dev"
mount -t tmpfs tmpfs "$0/tmp"
for shared in /etc/resolv.conf /etc/hosts /etc/pip.conf /etc/ssl /root/.config/pip; do
    [ -e "$shared" ] || continue
    if [ -d "$shared" ]; then mkdir -p "$0$shared"; else mkdir -p "$0${shared%/*}"; touch "$0$shared"; fi
    mount --rbind "$shared" "$0$shared"
done
mkdir -p "$0/tmp/project"
tar --create --exclude=./.git --exclude=./.venv --directory "$1" . | tar --extract --directory "$0/tmp/project"
if ! [ -x "$0/usr/bin/python3" ]; then
    DEBIAN_FRONTEND=noninteractive chroot "$0" apt-get install -qq -y --no-install-recommends python3-venv >/dev/null
fi
exec chroot "$0" sh -euc "
cd /tmp/project
python3 -m venv /tmp/venv
/tmp/venv/bin/python --version
/tmp/venv/bin/pip install --quiet --constraint constraints.txt --editable .[dev]
/tmp/venv/bin/pip install --quiet \"django>=6\" django-tasks-celery
exec /tmp/venv/bin/python -m pytest --numprocesses=${TEST_PROCESSES:-5} \
    -m \"not (ci or redis or rabbitmq or rabbitmq43)\" ${TESTS:-tests/unit tests/conformance tests/acceptance/test_django.py}
"' "$root" "$here"
