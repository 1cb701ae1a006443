#!/bin/sh
# Install the Java that Spark runs on; pyspark itself comes with the extra `spark`.
set -eu

for java in "${JAVA_HOME:+$JAVA_HOME/bin/java}" java; do
    if [ -n "$java" ] && "$java" -version >/dev/null 2>&1; then exit 0; fi
done
if [ "$(uname)" = Darwin ]; then
    echo "Java is missing: run \`brew install openjdk@17\` and set JAVA_HOME." >&2
    exit 1
fi
echo "Installing Java from this system's packages."
# Spark 4 needs Java 17 or newer; distributions that no longer have 17 have a newer one.
"$(dirname "$0")/install_packages.sh" openjdk-17-jre-headless \
    || "$(dirname "$0")/install_packages.sh" default-jre-headless
