#!/bin/sh
# Install the Chromium that tests look at the page in Flower with, and its driver.
set -eu

if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then exit 0; fi
if [ "$(uname)" = Darwin ]; then
    echo "Chromium is missing: run \`brew install --cask chromium chromedriver\`." >&2
    exit 1
fi
echo "Installing Chromium from this system's packages."
"$(dirname "$0")/install_packages.sh" chromium chromium-driver
