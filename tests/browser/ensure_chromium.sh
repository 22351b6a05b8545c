#!/bin/sh
# Install Debian's chromium and its driver where that is possible; say loudly where it is not.
if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then exit 0; fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium chromium-driver >/dev/null
fi
if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then exit 0; fi
echo "**********************************************************************"
echo "* No chromium and chromedriver here: the BROWSER TESTS WILL BE SKIPPED."
echo "* On Debian or Ubuntu: apt-get install chromium chromium-driver"
echo "**********************************************************************"
